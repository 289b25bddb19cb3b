"""Configuration: layers, places, mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll import units
from atoll.errors import ConfigError, InvalidSpec, UnknownName
from atoll.runs import config
from atoll.runs.config import FIELDS, line_of
from atoll.spec import Placement

FULL = """
entry = "train:train"
replicas = 4
store = "runs"
timeout = "2h"
gpu = "H100:8"

[args]
lr = 1e-3
layers = [1, 2]

[env]
MODE = "fast"

[secrets]
HF_TOKEN = "env:HF_TOKEN"

[executors.local]
root = "/spools"

[profiles.big]
replicas = 32

[profiles.big.env]
MODE = "careful"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(folder: Path, text: str | None = None, **options) -> config.Config:
    if text is not None:
        (folder / "atoll.toml").write_text(text)
    options.setdefault("environ", {})
    return config.load(folder, **options)


def origins(found: config.Config) -> dict[str, str]:
    return {key: setting.origin for key, setting in found.settings.items()}


def test_without_a_file_everything_is_the_default(folder):
    found = load(folder)
    assert set(origins(found).values()) == {"default"}
    assert found.file is None
    assert found.launch_options() == {}


def test_a_file_gives_values_and_their_lines(folder):
    found = load(folder, FULL)
    assert found.get("replicas") == 4
    assert found.get("timeout") == 7200.0
    assert origins(found)["replicas"] == "atoll.toml:3"
    assert origins(found)["args.lr"] == "atoll.toml:9"
    assert origins(found)["executors.local.root"] == "atoll.toml:19"
    assert origins(found)["grace"] == "default"


def test_launch_options_are_what_prepare_takes(folder):
    assert load(folder, FULL).launch_options() == {
        "entry": "train:train",
        "replicas": 4,
        "store": str(folder / "runs"),
        "timeout_s": 7200.0,
        "gpu": "H100:8",
        "args": {"lr": 1e-3, "layers": [1, 2]},
        "env": {"MODE": "fast"},
        "secrets": {"HF_TOKEN": "env:HF_TOKEN"},
        "settings": {"root": "/spools"},
    }


def test_variables_win_over_the_file_and_flags_over_variables(folder):
    environ = {"ATOLL_REPLICAS": "5", "ATOLL_STORE": "s3://b/p", "ATOLL_GRACE": "1m"}
    found = load(folder, FULL, environ=environ, flags={"replicas": 6, "env.MODE": "x", "gpu": None})
    assert (found.get("replicas"), origins(found)["replicas"]) == (6, "--replicas")
    assert (found.get("store"), origins(found)["store"]) == ("s3://b/p", "ATOLL_STORE")
    assert found.get("grace") == 60.0
    assert found.get("gpu") == "H100:8"
    assert (found.table("env"), origins(found)["env.MODE"]) == ({"MODE": "x"}, "--env MODE")


def test_a_profile_adds_to_the_file_key_by_key(folder):
    found = load(folder, FULL, profile="big")
    assert found.get("replicas") == 32
    assert found.table("env") == {"MODE": "careful"}
    assert found.get("gpu") == "H100:8"
    assert origins(found)["env.MODE"] == "atoll.toml:25"
    assert load(folder, FULL, environ={"ATOLL_PROFILE": "big"}).get("replicas") == 32


def test_a_profile_that_is_not_there_is_named_with_a_suggestion(folder):
    with pytest.raises(UnknownName, match="did you mean `big`"):
        load(folder, FULL, profile="bg")
    with pytest.raises(ConfigError, match="no profile `x`"):
        load(folder, "replicas = 1\n", profile="x")


def test_arguments_of_the_file_belong_to_its_entry(folder):
    assert load(folder, FULL, flags={"entry": "train:train", "args.lr": 1}).table("args") == {"lr": 1, "layers": [1, 2]}
    assert load(folder, FULL, flags={"entry": "other:main", "args.n": 1}).table("args") == {"n": 1}


def test_settings_of_an_executor_may_use_its_other_name(folder):
    found = load(folder, '[executors.eks]\nnamespace = "ml"\n[executors.hf-jobs]\nnamespace = "team"\n')
    assert found.settings["executors.kubernetes.namespace"].value == "ml"
    assert found.settings["executors.hf_jobs.namespace"].value == "team"


def test_every_problem_is_reported_at_once_with_its_place(folder):
    text = 'replicas = "four"\ntimeout = "soon"\nreplica = 3\nargs = 1\n[env]\nA = 1\n[executors.locl]\nx = 1\n'
    text += "[profiles.p]\nimage = 3\n"
    with pytest.raises(InvalidSpec) as caught:
        load(folder, text, environ={"ATOLL_CPUS": "many"})
    problems = "\n".join(caught.value.problems)
    for part in (
        "atoll.toml:1: replicas=`four`: a whole number",
        "atoll.toml:2: timeout=`soon`: write a length of time",
        "atoll.toml:3: unknown key `replica`, did you mean `replicas`?",
        "atoll.toml:4: `args` is a table",
        "atoll.toml:6: env.A=`1`: a text in quotes",
        "atoll.toml:7: unknown executor `locl`, did you mean `local`?",
        "atoll.toml:10: image=`3`: a text",
        "ATOLL_CPUS: cpus=`many`: a number",
    ):
        assert part in problems
    assert len(caught.value.problems) == 8


@pytest.mark.parametrize(
    "text",
    ["profiles = 1\n", "[profiles]\nbig = 1\n", "[executors]\nlocal = 1\n", "executors = 1\n", "replicas = true\n"],
)
def test_a_value_of_the_wrong_kind_is_a_problem_not_a_crash(folder, text):
    with pytest.raises(InvalidSpec, match=r"atoll\.toml:\d"):
        load(folder, text)


def test_a_file_that_is_not_toml_is_named(folder):
    with pytest.raises(ConfigError, match=r"atoll\.toml is not valid TOML"):
        load(folder, "replicas = \n")


def test_the_nearest_file_counts_and_the_search_ends_at_the_repository(folder):
    (folder / "atoll.toml").write_text("replicas = 2\n")
    inner = folder / "a" / "b"
    inner.mkdir(parents=True)
    assert load(inner).get("replicas") == 2
    (folder / "a" / "atoll.toml").write_text('replicas = 3\nstore = "here"\n')
    found = load(inner)
    assert found.get("replicas") == 3
    assert found.get("store") == str(folder / "a" / "here")
    repository = inner / "repo"
    (repository / ".git").mkdir(parents=True)
    assert load(repository).file is None


def test_pyproject_has_a_table_of_its_own(folder):
    (folder / "pyproject.toml").write_text('[project]\nname = "x"\n\n[tool.atoll]\nreplicas = 5\n')
    found = load(folder)
    assert found.get("replicas") == 5
    assert origins(found)["replicas"] == "pyproject.toml:5"


def test_a_pyproject_without_our_table_is_none_of_our_business(folder):
    (folder / "pyproject.toml").write_text("this is not TOML at all\n")
    assert load(folder).file is None


def test_atoll_toml_beside_a_pyproject_table_wins_with_a_warning(folder):
    (folder / "pyproject.toml").write_text("[tool.atoll]\nreplicas = 5\n")
    found = load(folder, "replicas = 6\n")
    assert found.get("replicas") == 6
    assert any("pyproject.toml beside it is not" in warning for warning in found.warnings)


def test_a_variable_that_is_no_setting_is_a_warning(folder):
    found = load(folder, environ={"ATOLL_REPLICA": "4", "ATOLL_HOME": "/x", "ATOLL_RUN_ID": "r"})
    assert found.warnings == ("the variable ATOLL_REPLICA is not a setting, did you mean `ATOLL_REPLICAS`?",)


def test_what_all_variables_begin_with_does_not_make_them_alike(folder):
    found = load(folder, environ={"ATOLL_PUER": "1", "ATOLL_COLOUR": "red"})
    assert found.warnings == (
        "the variable ATOLL_COLOUR is not a setting",
        "the variable ATOLL_PUER is not a setting, did you mean `ATOLL_PURE`?",
    )


def test_another_file_can_be_named(folder):
    other = folder / "other.toml"
    other.write_text("replicas = 9\n")
    assert load(folder, "replicas = 1\n", file=other).get("replicas") == 9
    assert load(folder, environ={"ATOLL_CONFIG": str(other)}).get("replicas") == 9
    with pytest.raises(ConfigError, match="cannot read"):
        load(folder, file=folder / "none.toml")


def test_defaults_shown_are_the_defaults_that_hold():
    placement = Placement()
    for field in FIELDS.values():
        if hasattr(placement, field.option):
            assert field.default == getattr(placement, field.option), field.key


def test_every_field_of_a_placement_can_be_configured():
    tables = {"env", "secrets", "parts"}  # the parts are in `on`
    assert set(vars(Placement())) - tables <= {field.option for field in FIELDS.values()}


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (("a",), 1),
        (("t",), 3),
        (("t", "b"), 4),
        (("t", "q k"), 5),
        (("t", "u", "c"), 7),
        (("t", "inline", "x"), None),
        (("none",), None),
    ],
)
def test_the_line_of_a_key_is_found(key, line):
    text = 'a = 1\n\n[ t ]  # comment\nb = 2\n"q k" = 3\n[t.u]\nc = 4\n[t]\ninline = {x = 1}\n'
    assert line_of(text, key) == line


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("15m", 900),
        ("2h", 7200),
        ("1d", 86400),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("500ms", 0.5),
    ],
)
def test_lengths_of_time_are_read(text, seconds):
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5", "5 parsecs", "h", "1h30", "1e3"])
def test_what_is_no_length_of_time_is_refused(text):
    with pytest.raises(ValueError, match="`15m`"):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (60, "1m"), (200, "3m20s"), (7200, "2h"), (7500, "2h05m"), (273600, "3d04h")],
)
def test_lengths_of_time_are_written_short(seconds, text):
    assert units.duration_text(seconds) == text
