"""Builds the compiled kernels of `src/atoll/rounds/_native.c` when a C compiler is at hand, and goes on without if not.

Editable installs get the library next to its source; a wheel gets it inside, and is for one platform then, whatever
the version of Python. `ATOLL_PURE=1` builds the package that runs anywhere. Compiler: `$CC`, or `cc`.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

SOURCE = "src/atoll/rounds/_native.c"
LIBRARY = "src/atoll/rounds/_native.so"
PACKAGED = "atoll/rounds/_native.so"
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
        root = Path(self.root)
        is_editable = version == "editable"
        library = root / LIBRARY if is_editable else Path(self.directory, ".native", "_native.so")
        try:
            compile_library(root / SOURCE, library)
        except CompileFailed as exc:
            if is_editable:
                library.unlink(missing_ok=True)
            self.app.display_warning(f"without compiled kernels, numpy does their work: {exc}")
            return
        if not is_editable:
            build_data["force_include"][str(library)] = PACKAGED
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        folder = Path(self.directory, ".native")
        (folder / "_native.so").unlink(missing_ok=True)
        if folder.is_dir():
            folder.rmdir()


if __name__ == "__main__":
    compile_library(Path(__file__).parent / SOURCE, Path(__file__).parent / LIBRARY)
