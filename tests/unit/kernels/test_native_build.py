"""The package is built with compiled kernels where there is a compiler, and without them where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from atoll.kernels import native
from repository import ROOT

pytestmark = pytest.mark.process

LIBRARY = "atoll/kernels/_native.so"
LIBRARIES = {LIBRARY, "atoll/kernels/_fused.so"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what a build needs."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return copy


def build(tree: Path, *, editable: bool = False, **env: str) -> tuple[Path, str]:
    """The wheel, and what was said. As pip does it: through the functions of PEP 517 and PEP 660."""
    out = tree.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    code = f"import hatchling.build as b; b.build_{'editable' if editable else 'wheel'}({str(out)!r})"
    inherited = {name: value for name, value in os.environ.items() if name not in ("CC", "ATOLL_PURE")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=inherited | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (left,) = out.iterdir()
    return left, done.stdout + done.stderr


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.usefixtures("native_library")
def test_a_wheel_holds_the_library_and_is_for_one_platform_and_every_python(tree: Path) -> None:
    wheel, _ = build(tree)
    assert wheel.name.startswith("atoll-")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    assert sorted(name for name in names_in(wheel) if name.endswith(".so")) == sorted(LIBRARIES)
    assert not list(tree.rglob("*.so")), "a wheel leaves the tree as it was"


@pytest.mark.parametrize("env", [{"CC": "/bin/false"}, {"CC": "/bin/true"}, {"CC": "/no/such/cc"}, {"ATOLL_PURE": "1"}])
def test_without_a_compiler_the_package_runs_anywhere(tree: Path, env: dict[str, str]) -> None:
    for library in LIBRARIES:
        (tree / "src" / library).write_bytes(b"left from before")
    wheel, said = build(tree, **env)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not LIBRARIES & set(names_in(wheel))
    assert said.count("without compiled kernels") == 1


@pytest.mark.usefixtures("native_library")
def test_an_editable_install_has_the_library_next_to_its_source(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_PURE", raising=False)
    library = tree / "src" / LIBRARY
    build(tree, editable=True)
    assert native.load(library, library.with_suffix(".c")).name == "native"
    assert {str(path.relative_to(tree / "src")) for path in tree.rglob("*.so")} == LIBRARIES
    build(tree, editable=True, ATOLL_PURE="1")
    assert not list(tree.rglob("*.so")), "asked for without, there is none"
