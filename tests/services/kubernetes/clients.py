"""`python -m services.kubernetes.clients` (in `tests/`): the Kubernetes tests with the oldest and the newest client.

Each version of the client `kubernetes` gets an environment of its own in the cache folder. The newest one does not
resolve beside boto3, so that these environments have only what the Kubernetes tests need, at the versions of the lock.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import venv
from pathlib import Path

from services.kubernetes.build import cache

ROOT = Path(__file__).parents[3]
CLIENTS = ("29.0.0", "37.0.2")
PACKAGES = (
    "click",
    "cryptography",
    "hatchling",
    "hypothesis",
    "numpy",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "rich",
    "xxhash",
)
"""What Atoll, its build and its Kubernetes tests need besides the client."""
TESTS = (
    "tests/contract/test_kubernetes.py",
    "tests/executors/kubernetes/test_role.py",
    "tests/executors/kubernetes/test_runs.py",
    "tests/unit/kube",
    "tests/unit/executors/kubernetes",
)

MARKERS = "not controllers and not coscheduling"


def environment(client: str) -> Path:
    """The Python of an environment with this client and the present Atoll."""
    folder = cache() / f"client-{client}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    locked = (ROOT / "requirements-dev.lock").read_text()
    pinned = [f"{name}=={_version(locked, name)}" for name in PACKAGES]
    _install(python, [*pinned, f"kubernetes=={client}"])
    _install(python, ["--no-deps", "--no-build-isolation", "--force-reinstall", str(ROOT)])
    return python


def _version(locked: str, name: str) -> str:
    found = re.search(rf"^{name}==(.+)$", locked, re.M | re.I)
    assert found, f"requirements-dev.lock does not pin {name}"
    return found[1]


def _install(python: Path, words: list[str]) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make test-clients ARGS=…", description=__doc__)
    parser.add_argument("--client", action="append", help="a version of the client; may be repeated")
    options, words = parser.parse_known_args()
    failed = []
    for client in options.client or CLIENTS:
        print(f"kubernetes=={client}", flush=True)
        python = environment(client)
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKERS, *(words or TESTS)]
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(client)
    sys.exit(f"failed with the client {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
