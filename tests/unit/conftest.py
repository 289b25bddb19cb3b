"""Kernels for the tests of arithmetic: whoever computes, the same is promised."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from atoll import kernels
from atoll.kernels import native
from atoll.kernels.native import NativeKernels
from repository import ROOT
from tiers import allowing


@pytest.fixture(scope="session")
def build_hook() -> ModuleType:
    """`hatch_build.py`, which no package holds."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def library_of(build_hook: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Builds a library for the tests, so that they do not depend on how Atoll was installed."""

    def compile_it(source: Path) -> Path:
        library = tmp_path_factory.mktemp("compiled") / source.with_suffix(".so").name
        with pytest.MonkeyPatch.context() as patch, allowing("process"):
            patch.delenv("ATOLL_PURE", raising=False)
            try:
                build_hook.compile_library(source, library)
            except build_hook.CompileFailed as exc:
                pytest.skip(f"no C compiler: {exc}")
        return library

    return compile_it


@pytest.fixture(scope="session")
def native_library(library_of: Callable[[Path], Path]) -> Path:
    return library_of(native.SOURCE)


@pytest.fixture(scope="session")
def native_kernels(native_library: Path) -> NativeKernels:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ATOLL_PURE", raising=False)
        return native.load(native_library)


@pytest.fixture(scope="module", params=["numpy", "torch", "native"])
def each_kernel(request: pytest.FixtureRequest) -> Iterator[kernels.Kernels]:
    """The tests of a module, once for each."""
    before = kernels.current()
    match request.param:
        case "numpy":
            kernels.use(kernels.NUMPY)
        case "torch":
            from atoll.training.kernels import TorchKernels

            kernels.use(TorchKernels())
        case "native":
            kernels.use(request.getfixturevalue("native_kernels"))
    yield kernels.current()
    kernels.use(before)
