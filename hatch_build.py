"""Builds the C files of Atoll when a compiler is at hand, each a library of its own, and goes on without if not.

Editable installs get each library next to its source; a wheel gets them inside, and is for one platform then, whatever
the version of Python. `ATOLL_PURE=1` builds the package that runs anywhere. Compiler: `$CC`, or `cc`.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

SOURCES = ("src/atoll/kernels/_fused.c", "src/atoll/kernels/_native.c")
FLAGS = ("-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")


class CompileFailed(Exception):
    """In one line, why there is no library."""


def compile_library(source: Path, library: Path) -> None:
    """Build the library, and put it in place whole: a process may have the old one loaded."""
    if os.environ.get("ATOLL_PURE", "") not in ("", "0"):
        raise CompileFailed("ATOLL_PURE is set")
    library.parent.mkdir(parents=True, exist_ok=True)
    # `native.py` asks the library for this, so that it never uses one that was built from another source.
    version = hashlib.sha256(source.read_bytes()).hexdigest()
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder, library.name)
        compiler = shlex.split(os.environ.get("CC") or "cc")
        _run([*compiler, *FLAGS, f'-DATOLL_SOURCE="{version}"', "-o", str(built), str(source)])
        if not built.exists():
            raise CompileFailed(f"{compiler[0]} made no library")
        built.replace(library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as exc:
        raise CompileFailed(f"{command[0]}: {exc.strerror}") from exc
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise CompileFailed(f"{command[0]}: {said[0]}")


def platform_tag() -> str:
    """This machine's own tag. That the library fits others of its kind, as manylinux says, is not ours to claim."""
    return next(tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """What hatchling calls before it makes a wheel, editable or not."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root, is_editable = Path(self.root), version == "editable"
        libraries = {name: Path(name).with_suffix(".so") for name in SOURCES}
        places = {
            name: root / library if is_editable else self._corner / library.name for name, library in libraries.items()
        }
        try:
            for name, place in places.items():
                compile_library(root / name, place)
        except CompileFailed as exc:
            for place in places.values():
                place.unlink(missing_ok=True)
            self.app.display_warning(f"without compiled kernels, numpy does their work: {exc}")
            return
        if not is_editable:
            packaged = {str(places[name]): str(library.relative_to("src")) for name, library in libraries.items()}
            build_data["force_include"].update(packaged)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        shutil.rmtree(self._corner, ignore_errors=True)

    @property
    def _corner(self) -> Path:
        """Where the libraries of a wheel are until they are in it."""
        return Path(self.directory, ".native")


if __name__ == "__main__":
    for each in SOURCES:
        path = Path(__file__).parent / each
        compile_library(path, path.with_suffix(".so"))
