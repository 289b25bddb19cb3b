"""The settings of a run: `atoll.toml` or `[tool.atoll]`, then `ATOLL_*`, then flags; each setting has its origin.

`load` reads at most one file and starts nothing. It reports every problem at once, with its place. A later layer
replaces single keys of an earlier one; the keys of `[args]`, `[env]`, `[secrets]` and `[executors.NAME]` are merged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll import units
from atoll.context import home
from atoll.errors import ConfigError, InvalidSpec, UnknownName, closest, did_you_mean
from atoll.spec import ON_DEAD, ON_DEAD_AFTER_S

PREFIX = "ATOLL_"
"""All of Atoll's variables begin with this."""
TABLES = ("args", "env", "secrets")
"""Tables with keys of the user; each key is a setting, so the keys of all layers are merged."""
SECTIONS = ("executors", "profiles")
OTHER_VARIABLES = frozenset(
    {
        *("ATOLL_HOME", "ATOLL_CONFIG", "ATOLL_PROFILE", "ATOLL_DEBUG", "ATOLL_LOG", "ATOLL_PURE"),
        *("ATOLL_RUN_ID", "ATOLL_ATTEMPT", "ATOLL_SPOOL", "ATOLL_LABEL", "ATOLL_TIMEOUT_S", "ATOLL_GRACE_S"),
    }
)
"""Variables of Atoll that are not settings of a run."""
_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?\Z")
_KEY = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_.-])+)\s*=""")
Reader = Callable[[Any], Any]
"""Converts a value of the file or the environment; raises `ValueError` with the rule."""


@dataclass(frozen=True)
class Setting:
    """A value and where it came from: `default`, `atoll.toml:3`, `ATOLL_ON` or `--on`."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Config:
    """Every effective setting by its dotted key, such as `replicas`, `env.DEBUG` or `executors.local.root`."""

    settings: Mapping[str, Setting]
    file: str | None = None
    profile: str | None = None
    profiles: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    def get(self, key: str) -> Any:
        """The value of a key, or None."""
        found = self.settings.get(key)
        return found.value if found else None

    def table(self, name: str) -> dict[str, Any]:
        """The keys below `name`, such as `table("env")`."""
        start = f"{name}."
        return {key[len(start) :]: found.value for key, found in self.settings.items() if key.startswith(start)}

    def executor_settings(self, executor: str) -> dict[str, Any]:
        """The settings in `[executors.NAME]` for this backend; for `several`, those of every backend."""
        from atoll.registry import plain_name
        from atoll.runs.parts import split_table

        name = plain_name(executor)
        if name != "several":
            return split_table(name, self.table(f"executors.{name}")).settings
        names = dict.fromkeys(key.split(".")[0] for key in self.table("executors"))
        found = {each: self.executor_settings(each) for each in names if each != name}
        own = {"settings": found} if found else {}
        return {**own, **self.table(f"executors.{name}")}

    def launch_settings(self, on: Any) -> dict[str, Any]:
        """What `[executors.NAME]` has for a run on these backends, also fields of the placement, such as `gpu`."""
        from atoll.runs.parts import backend_names

        tables = {name: self.table(f"executors.{name}") for name in backend_names(on)}
        return {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}

    def launch_options(self) -> dict[str, Any]:
        """Keyword arguments for `atoll.prepare` and `atoll.launch`; settings without a value are left out."""
        chosen = {name: self.settings[name] for name in FIELDS if name in self.settings}
        options = {
            FIELDS[name].option: found.value
            for name, found in chosen.items()
            if found.value is not None and found.origin != "default"
        }
        options.update({name: table for name in TABLES if (table := self.table(name))})
        from atoll.runs.parts import added, backend_names, split_table

        names = backend_names(self.get("on"))
        if len(names) > 1:
            settings = self.launch_settings(self.get("on"))
        else:
            settings, own = split_table(names[0], self.table(f"executors.{names[0]}"))
            options = added(own, options)
        return {**options, "settings": settings} if settings else options


def load(
    directory: str | os.PathLike[str] | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    profile: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """The settings that hold in `directory`. `flags` has dotted keys: `{"replicas": 4, "env.DEBUG": "1"}`.

    A flag that is None counts as not given, except for arguments (`args.NAME`), which may be None.
    """
    found, problems = load_valid(directory, file=file, profile=profile, environ=environ, flags=flags)
    if problems:
        raise InvalidSpec("configuration", problems)
    return found


def load_valid(
    directory: str | os.PathLike[str] | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    profile: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> tuple[Config, list[str]]:
    """As `load`: the settings that are valid, and the problems of the others."""
    environ = os.environ if environ is None else environ
    path = file or environ.get("ATOLL_CONFIG")
    found = read(Path(path)) if path else find(Path(directory or _here()).absolute())
    reader = _Reader()
    layers = {setting.key: setting for setting in _defaults()}
    profiles: dict[str, list[Setting]] = {}
    if found:
        layers.update((s.key, s) for s in reader.file(found, found.table))
        profiles = reader.profiles(found)
    if profile := profile or environ.get("ATOLL_PROFILE") or None:
        layers.update((s.key, s) for s in _chosen(profiles, profile, found))
    layers.update((s.key, s) for s in reader.environment(environ))
    _forget_arguments_of_another_entry(layers, (flags or {}).get("entry"))
    given = {key: value for key, value in (flags or {}).items() if value is not None or key.startswith("args.")}
    layers.update((key, Setting(key, value, flag_of(key))) for key, value in given.items())
    place = found.place() if found else None
    return Config(layers, place, profile, tuple(profiles), tuple(_warnings(environ, found))), reader.problems


def _here() -> str:
    """The working folder; the root if it was deleted, because `ps` and `cancel` need none."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.sep


def _defaults() -> Iterator[Setting]:
    for name, known in FIELDS.items():
        value = str(home() / "store") if name == "store" else known.default
        yield Setting(name, value, "default")


def _chosen(profiles: Mapping[str, list[Setting]], name: str, found: ConfigFile | None) -> list[Setting]:
    if not profiles:
        where = found.place() if found else "there is no atoll.toml, so it"
        raise ConfigError(f"no profile `{name}`: {where} has no `[profiles.{name}]`")
    if name not in profiles:
        raise UnknownName("profile", name, list(profiles))
    return profiles[name]


def _forget_arguments_of_another_entry(layers: dict[str, Setting], entry: str | None) -> None:
    """`[args]` belong to the `entry` of the file; a run of another entry does not get them."""
    if entry is None or entry == layers["entry"].value:
        return
    for key in [key for key in layers if key.startswith("args.")]:
        del layers[key]


def flag_of(key: str) -> str:
    """The option of the command line that sets a key."""
    table, _, name = key.partition(".")
    words = {"args": f"--arg {name}", "env": f"--env {name}", "secrets": f"--secret {name}", "entry": "ENTRY"}
    if table == "executors":
        return f"--setting {key.rpartition('.')[2]}"
    return words.get(table, f"--{key.replace('_', '-')}")


def _warnings(environ: Mapping[str, str], found: ConfigFile | None) -> Iterator[str]:
    """Probable mistakes that do not stop the command."""
    variables = {known.variable for known in FIELDS.values()} | OTHER_VARIABLES
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in variables:
            close = closest(name.removeprefix(PREFIX), [known.removeprefix(PREFIX) for known in sorted(variables)])
            meant = f", did you mean `{PREFIX}{close}`?" if close else ""
            yield f"the variable {name} is not a setting{meant}"
    if found and found.path.name == "atoll.toml":
        beside = found.path.parent / "pyproject.toml"
        if beside.is_file() and "[tool.atoll" in beside.read_text(encoding="utf-8", errors="replace"):
            yield f"{found.place()} is used, and [tool.atoll] in the pyproject.toml beside it is not"


@dataclass(frozen=True)
class Field:
    """One key. `option` is its keyword of `atoll.prepare`."""

    key: str
    read: Reader
    option: str
    default: Any = None
    is_path: bool = False
    """In a file, relative to the folder of that file."""
    show: Callable[[Any], str] = str

    @property
    def variable(self) -> str:
        return f"{PREFIX}{self.key.upper()}"


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text that is not empty")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("a whole number")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError("a number") from None


def _duration(value: Any) -> float:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError(units.DURATION_RULE)
    return units.parse_duration(value)


def _on(value: Any) -> str | tuple[str, ...]:
    """A backend, or the parts of a run: a list, or a text with commas."""
    texts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(each, str) and each for each in texts):
        raise ValueError("a backend, or a list of parts, such as `kubernetes:2`")
    return texts[0] if len(texts) == 1 else tuple(texts)


def _on_text(value: Any) -> str:
    return value if isinstance(value, str) else ",".join(value)


def _on_dead(value: Any) -> str:
    if value not in ON_DEAD:
        raise ValueError(f"one of {', '.join(f'`{word}`' for word in ON_DEAD)}")
    return str(value)


FIELDS: dict[str, Field] = {
    field.key: field
    for field in (
        Field("entry", _text, "entry"),
        Field("replicas", _whole, "replicas", default=1),
        Field("on", _on, "on", default="local", show=_on_text),
        Field("store", _text, "store", is_path=True),
        Field("workspace", _text, "workspace", is_path=True),
        Field("gpu", _text, "gpu"),
        Field("cpus", _number, "cpus"),
        Field("memory_gib", _number, "memory_gib"),
        Field("image", _text, "image"),
        Field("timeout", _duration, "timeout_s", default=86_400.0, show=units.duration_text),
        Field("grace", _duration, "grace_s", default=10.0, show=units.duration_text),
        Field("max_restarts", _whole, "max_restarts", default=0),
        Field("on_dead", _on_dead, "on_dead", default="fail"),
        Field("on_dead_after", _duration, "on_dead_after_s", default=ON_DEAD_AFTER_S, show=units.duration_text),
        Field("rank_env", _text, "rank_env", default="REPLICA_RANK"),
    )
}


class _Reader:
    """Reads layers into settings and collects the problems."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def file(self, source: ConfigFile, body: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[Setting]:
        for key, value in body.items():
            place = source.place(*above, key)
            if key in FIELDS:
                yield from self._field(key, value, place, source.path.parent)
            elif key in TABLES and is_table(value):
                yield from self._table(source, (*above, key), key, value)
            elif key == "executors" and is_table(value):
                yield from self._executors(source, (*above, key), value)
            elif key == "profiles" and is_table(value) and not above:
                continue
            elif key in TABLES or key in SECTIONS:
                self.problems.append(f"{place}: `{key}` is a table: `[{key}]`")
            else:
                meant = did_you_mean(key, [*FIELDS, *TABLES, *SECTIONS])
                self.problems.append(f"{place}: unknown key `{key}`{meant}")

    def profiles(self, source: ConfigFile) -> dict[str, list[Setting]]:
        """Every profile, so that a mistake is found before the profile is chosen."""
        found = {}
        for name, body in source.table.get("profiles", {}).items() if is_table(source.table.get("profiles")) else ():
            if is_table(body):
                found[name] = list(self.file(source, body, ("profiles", name)))
            else:
                self.problems.append(f"{source.place('profiles', name)}: a profile is a table: `[profiles.{name}]`")
        return found

    def environment(self, environ: Mapping[str, str]) -> Iterator[Setting]:
        for name, known in FIELDS.items():
            if environ.get(known.variable):
                yield from self._field(name, environ[known.variable], known.variable, None)

    def _field(self, key: str, value: Any, place: str, folder: Path | None) -> Iterator[Setting]:
        known = FIELDS[key]
        try:
            read_value = known.read(value)
        except ValueError as exc:
            self.problems.append(f"{place}: {key}=`{value}`: {exc}")
            return
        if known.is_path and folder is not None and "://" not in read_value:
            read_value = os.path.join(folder, os.path.expanduser(read_value))
        yield Setting(key, read_value, place)

    def _table(self, source: ConfigFile, where: tuple[str, ...], table: str, body: Any) -> Iterator[Setting]:
        for key, value in body.items():
            place = source.place(*where, key)
            if problem := table_problem(table, value):
                self.problems.append(f"{place}: {table}.{key}=`{value}`: {problem}")
            else:
                yield Setting(f"{table}.{key}", value, place)

    def _executors(self, source: ConfigFile, where: tuple[str, ...], body: Any) -> Iterator[Setting]:
        from atoll.registry import known, plain_name

        for name, settings in body.items():
            place, plain = source.place(*where, name), plain_name(name)
            if plain not in known("executor"):
                self.problems.append(
                    f"{place}: unknown executor `{name}`{did_you_mean(plain, list(known('executor')))}"
                )
            elif not is_table(settings):
                self.problems.append(f"{place}: settings of an executor are a table: `[executors.{name}]`")
            else:
                for key, value in settings.items():
                    yield Setting(f"executors.{plain}.{key}", value, source.place(*where, name, key))


def table_problem(table: str, value: Any) -> str | None:
    """Why this value cannot be in `[env]` or `[secrets]`. `[args]` takes any JSON, which the spec checks."""
    if table != "args" and not isinstance(value, str):
        return "a text in quotes"
    return None


def is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


@dataclass(frozen=True)
class ConfigFile:
    """One file with settings: its path, its text, and Atoll's table in it."""

    path: Path
    text: str
    table: Mapping[str, Any]
    prefix: tuple[str, ...] = ()
    """`("tool", "atoll")` in a pyproject.toml."""

    def place(self, *key: str) -> str:
        """`atoll.toml:3` for a key, or only the file if the line is not known."""
        line = line_of(self.text, (*self.prefix, *key))
        shown = _shown(self.path)
        return f"{shown}:{line}" if line else shown


def find(directory: Path) -> ConfigFile | None:
    """The nearest file in `directory` or above, up to the repository's root or the home folder."""
    home = Path(os.path.expanduser("~"))
    for folder in (directory, *directory.parents):
        if found := _in_folder(folder):
            return found
        if folder == home or (folder / ".git").exists():
            return None
    return None


def read(path: Path) -> ConfigFile:
    """Read this file; `ConfigError` if it is missing or not valid."""
    import tomllib

    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as exc:
        raise ConfigError(f"cannot read {_shown(path)}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{_shown(path)} is not valid TOML: {exc}") from exc
    if path.name != "pyproject.toml":
        return ConfigFile(path, text, table)
    ours = table.get("tool", {}).get("atoll", {})
    return ConfigFile(path, text, ours, ("tool", "atoll"))


def _in_folder(folder: Path) -> ConfigFile | None:
    if (path := folder / "atoll.toml").is_file():
        return read(path)
    path = folder / "pyproject.toml"
    # Most pyproject.toml files have no [tool.atoll]; such a file is not parsed, so it may even be broken.
    if path.is_file() and "tool.atoll" in path.read_text(encoding="utf-8", errors="replace"):
        return read(path)
    return None


def line_of(text: str, key: tuple[str, ...]) -> int | None:
    """The line (from 1) where a key is set; None when it is inside an inline table or a long value."""
    wanted = ".".join(key)
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = _plain(header[1])
            if section == wanted:
                return number
        elif found := _KEY.match(line):
            name = _plain(found[1])
            if (f"{section}.{name}" if section else name) == wanted:
                return number
    return None


def _plain(dotted: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in dotted.split("."))


def _shown(path: Path) -> str:
    """The relative path if the file is in or below the current folder."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
