"""The builds of control plane and controllers: once for all workers, never partial. A script is in place of Go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.kubernetes import build

pytestmark = pytest.mark.process


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `go` whose modules and build succeed, and which counts its builds in a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_go(folder, version="go1.99.1")


def write_go(folder: Path, *, version: str, download: str = "true", compiled: str = "echo program > $out") -> Path:
    script = f"""#!/bin/sh
case "$1" in
env) echo {version} ;;
mod) {download} ;;
list) echo {folder}/module ;;
build)
  echo one >> {folder}/builds
  modules=$3
  while [ $# -gt 0 ]; do [ "$1" != -o ] || out=$2; shift; done
  {compiled} ;;
esac
"""
    path = folder / "go"
    path.write_text(script)
    path.chmod(0o755)
    return path


def builds(go: Path) -> int:
    counted = go.with_name("builds")
    return counted.read_text().count("one") if counted.exists() else 0


def test_parallel_callers_build_once(go: Path):
    command = [sys.executable, build.__file__]
    callers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = {caller.communicate(timeout=60)[0].splitlines()[-1] for caller in callers}
    assert [Path(path).read_text() for path in told] == ["program\n"]
    assert build.control_plane() == Path(told.pop())
    assert builds(go) == 1


def test_another_compiler_makes_another_binary(go: Path):
    first = build.control_plane()
    write_go(go.parent, version="go1.99.2")
    assert not build.is_built()
    assert build.control_plane() != first
    assert builds(go) == 2


def test_the_oldest_release_has_modules_of_its_own(go: Path, monkeypatch: pytest.MonkeyPatch):
    write_go(go.parent, version="go1.99.1", compiled='echo "$modules" > $out')
    monkeypatch.setenv("ATOLL_TEST_KUBERNETES", "v1.29.6")
    found = subprocess.run([sys.executable, build.__file__], capture_output=True, text=True, check=True, timeout=60)
    binary = Path(found.stdout.splitlines()[-1])
    assert binary.read_text() == "-modfile=oldest.mod\n"
    assert build.control_plane() != binary


def test_a_build_that_fails_leaves_nothing_that_counts(go: Path):
    write_go(go.parent, version="go1.99.1", compiled="echo half > $out; echo no good >&2; exit 1")
    with pytest.raises(RuntimeError, match="no good"):
        build.control_plane()
    assert not build.is_built()
    write_go(go.parent, version="go1.99.1")
    assert build.control_plane().read_text() == "program\n"


def test_modules_that_cannot_be_fetched_are_told_from_a_failure(go: Path):
    write_go(go.parent, version="go1.99.1", download="echo no route to the proxy >&2; exit 1")
    with pytest.raises(build.CannotFetch, match="no route to the proxy"):
        build.control_plane()
    assert builds(go) == 0


def test_the_manifests_of_a_controller_are_kept_beside_its_binary(go: Path):
    source = go.parent / "module" / "config" / "crd" / "one.yaml"
    source.parent.mkdir(parents=True)
    source.write_text("kind: One\n")
    source.with_name("README.md").touch()
    source.chmod(0o400)
    built = build.built(build.APPWRAPPER)
    source.unlink()  # as when the module cache is cleaned
    assert build.built(build.APPWRAPPER) == built
    assert [(path.name, path.read_text()) for path in built.manifests.rglob("*.*")] == [("one.yaml", "kind: One\n")]
    assert builds(go) == 1
    assert not build.is_built(build.KUEUE)


def test_an_old_compiler_is_not_used(go: Path):
    write_go(go.parent, version="go1.25.9")
    assert build._toolchain() == build.Toolchain("go1.26.6", None)
