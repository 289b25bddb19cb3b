"""TorchX as it is installed: one environment for each version, with the official command line and the plug-in.

TorchX 0.7.0 needs versions of urllib3 and of the Kubernetes client that do not resolve beside ours. `VERSION.lock` pins
each environment; it is made once and kept in the cache folder of the tests, under the digest of its lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

VERSIONS = ("0.7.0", "nightly")
PLUG_IN = ROOT / "packages" / "atoll-torchx"
_HERE = Path(__file__).parent
_LONGEST_S = 500.0


@dataclass(frozen=True)
class Environment:
    """The environment of one version."""

    version: str
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *words: str | Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `python WORDS` with Atoll of this repository; the result has its exit code and its output."""
        paths = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests", ROOT / "tests" / "unit")))
        env = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": paths, **variables}
        command = [str(self.python), *map(str, words)]
        return subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_LONGEST_S
        )

    def torchx(self, *words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the official command line."""
        return self.run("-m", "torchx.cli.main", *words, folder=folder, **variables)


def environment(version: str) -> Environment:
    """The environment, made if it is not there."""
    found = Environment(version, cache() / f"torchx-{version}-{_digest(version)}")
    found.folder.parent.mkdir(parents=True, exist_ok=True)
    with open(found.folder.with_name(f"{found.folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        ready, plug_in = found.folder / "ready", _digest_of_the_plug_in()
        if not ready.exists():
            venv.create(found.folder, with_pip=True, clear=True)
            _install(found.python, "-r", str(_HERE / f"{version}.lock"))
            ready.touch()
        if ready.read_text() != plug_in:
            _install(found.python, "--no-deps", "--no-build-isolation", "--force-reinstall", str(PLUG_IN))
            ready.write_text(plug_in)
    return found


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atoll-tests"


def _digest(version: str) -> str:
    return hashlib.sha256((_HERE / f"{version}.lock").read_bytes()).hexdigest()[:12]


def _digest_of_the_plug_in() -> str:
    digest = hashlib.sha256()
    for path in sorted(each for each in PLUG_IN.rglob("*") if each.suffix in (".py", ".toml")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _install(python: Path, *words: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
