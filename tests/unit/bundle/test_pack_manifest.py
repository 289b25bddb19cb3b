"""What is said before sending, what is too big to send, and which links cannot travel."""

from __future__ import annotations

from pathlib import Path

import pytest
from workspace_trees import plant

from atoll.bundle import Manifest, build
from atoll.bundle.pack import LinkProblem, biggest_shares, printable, resolve, size_text
from atoll.errors import ConfigError

MIB = 1024**2


def test_the_manifest_says_what_will_be_sent(tmp_path: Path) -> None:
    sizes = {"a": 10, "b": 3000, "c/d": 2 * MIB, "e": 1, "f": 5, "g": 0}
    root = plant(tmp_path, {name: bytes(size) for name, size in sizes.items()})
    manifest = build(root).manifest
    assert (manifest.count, manifest.size_bytes, manifest.source) == (6, sum(sizes.values()), "walk")
    assert manifest.largest == (("c/d", 2 * MIB), ("b", 3000), ("a", 10), ("f", 5), ("e", 1))
    head, *rows = manifest.text().splitlines()
    assert head.startswith(f"bundle {manifest.digest[:12]}: 6 files, 2.0 MiB, ")
    assert head.endswith("packed, chosen by the ignore files")
    assert rows[:2] == ["     2.0 MiB  c/d", "     2.9 KiB  b"]


def test_the_manifest_text_cannot_garble_a_terminal() -> None:
    text = Manifest("0" * 64, 1, 1, 1, (("a\x1b[2J\nb", 1),), "git", ("odd \x07",)).text()
    assert text.splitlines()[1:] == [r"         1 B  a\x1b[2J\nb", r"  note: odd \x07"]
    assert "chosen by git" in text
    assert printable("é\udcff") == r"é\udcff"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 * 1024, "1.5 MiB"), (3 * 1024**3, "3.0 GiB")],
)
def test_sizes_read_well(size: int, text: str) -> None:
    assert size_text(size) == text


def test_too_many_bytes_names_the_biggest_and_the_way_out(tmp_path: Path) -> None:
    tree = {f"data/raw/{n}.bin": bytes(30_000) for n in range(5)} | {"model.pt": bytes(50_000), "train.py": "x"}
    with pytest.raises(ConfigError) as caught:
        build(plant(tmp_path, tree), max_bytes=100_000)
    message = str(caught.value)
    assert "195.3 KiB in 7 files, and the limit is 97.7 KiB in 20000 files" in message
    assert message.index("146.5 KiB  data/raw/  (5 files)") < message.index("48.8 KiB  model.pt")
    assert ".gitignore" in message
    assert ".atollignore" in message
    assert "`/data/raw/`" in message


def test_too_many_files_names_where_they_are(tmp_path: Path) -> None:
    tree = {f"cache/{n}": "" for n in range(12)} | {"big": bytes(1000)}
    with pytest.raises(ConfigError, match=r"cache/  \(12 files\)") as caught:
        build(plant(tmp_path, tree), max_files=12)
    assert "`/cache/`" in str(caught.value)


def test_the_limits_themselves_are_allowed(tmp_path: Path) -> None:
    root = plant(tmp_path, {"a": bytes(600), "b": bytes(400)})
    assert build(root, max_bytes=1000, max_files=2).manifest.count == 2
    with pytest.raises(ConfigError, match="too big"):
        build(root, max_bytes=999)
    with pytest.raises(ConfigError, match="too big"):
        build(root, max_files=1)


def test_far_too_many_files_are_not_all_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"at least .* in 20 files"):
        build(plant(tmp_path, {str(n): "" for n in range(50)}), max_files=2)


def test_shares_do_not_overlap_and_name_the_cause() -> None:
    sizes = {"a/b/c/huge": 1000, "a/b/small": 1, "d/1": 300, "d/2": 300, "e": 10, "f": 9, "g": 8, "h": 7}
    shares = biggest_shares(sizes)
    assert [(share.name, share.size_bytes) for share in shares] == [
        ("a/b/c/huge", 1000),
        ("d/", 600),
        ("e", 10),
        ("f", 9),
        ("g", 8),
    ]
    assert [share.name for share in biggest_shares(sizes, by_count=True)][:2] == ["a/b/", "d/"]


@pytest.mark.parametrize(
    ("path", "target", "reason"),
    [
        ("data", "/mnt/data", "is absolute"),
        ("data", "../data", "leads outside"),
        ("d/data", "../../data", "leads outside"),
        ("d/data", "../x/../../y", "leads outside"),
        ("data", "inside/../..", "leads outside"),
        ("data", "data", "is a circle"),
        ("data", "d/up", "leads outside"),
    ],
)
def test_links_that_replicas_cannot_follow_are_named(tmp_path: Path, path: str, target: str, reason: str) -> None:
    root = plant(tmp_path / "w", {"a": "", "d/b": ""})
    (root / path).symlink_to(target)
    if target == "d/up":
        (root / "d" / "up").symlink_to("../..")
    with pytest.raises(ConfigError, match=f"`{path}` -> `{target}`: {reason}"):
        build(root)
    plant(root, {".atollignore": "/data\n/d/data\n/d/up\n"})
    assert build(root).manifest.count == 3


def test_every_bad_link_is_named_at_once(tmp_path: Path) -> None:
    root = plant(tmp_path, {"a": ""})
    (root / "x").symlink_to("/x")
    (root / "y").symlink_to("../y")
    with pytest.raises(ConfigError, match=r"(?s)`x`.*`y`"):
        build(root)


def test_a_link_to_what_is_not_sent_is_noted(tmp_path: Path) -> None:
    root = plant(tmp_path, {"a": "", "out/log": "", ".gitignore": "out/\n", "d/b": ""})
    (root / "latest").symlink_to("out/log")
    (root / "good").symlink_to("d")
    manifest = build(root).manifest
    assert manifest.notes == ("the link `latest` -> `out/log` leads to nothing in the bundle",)
    assert manifest.count == 5


def test_links_are_resolved_through_each_other_and_not_by_their_text() -> None:
    links = {"a": "b/c", "b/c": "../d/e/f", "deep": "d/e/f/../x", "trick": "hop/../../y", "hop": "p/q/r"}
    assert resolve("a", links) == "d/e/f"
    assert resolve("deep", links) == "d/e/x"
    assert resolve("trick", links) == "p/y"  # by its text alone it would leave the folder
    with pytest.raises(LinkProblem, match="outside"):
        resolve("x", {"x": "in/../..", "in": "d"})  # and this one only seems to stay: in/.. is the root
