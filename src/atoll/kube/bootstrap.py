"""Pure: `bootstrap = "pip"`, the command that installs Atoll in any image with Python 3.11 or newer, then starts it.

Without a named index the wheel of the installed version comes from a ConfigMap of the run, and its dependencies from
the pip index that the image is configured for. With a named index everything comes from there. The command ends with
`EXIT_CODE` and a line that begins with `WORDS` if the installation fails, so that the status can tell it from a failure
of the user's code.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.kube.volumes import config_map_file

EXIT_CODE = 79
WORDS = "atoll bootstrap:"
FOLDER = "/opt/atoll/wheel"
MOST_BYTES = 1 << 20
"""The most that the files of a ConfigMap can have together."""
_KEY, _DIGEST = "wheel", "atoll.dev/content-sha256"
_EXTRA = re.compile(r"[a-z][a-z0-9-]*\Z")
_CREDENTIALS = re.compile(r"[a-z+]+://[^/@]*@")

# One program for `python -c`. `--user` is for an image whose packages this user cannot write to; pip then sees the
# packages of the image, so that it does not install torch a second time.
_PROGRAM = f"""
import importlib.util, os, subprocess, sys, sysconfig, tempfile
def fail(text):
    text = "{WORDS} " + text
    print(text, file=sys.stderr, flush=True)
    try:
        open("/dev/termination-log", "w").write(text)
    except OSError:
        pass
    sys.exit({EXIT_CODE})
if sys.version_info < (3, 11):
    fail("Atoll needs Python 3.11 or newer, and this image has " + sys.version.split()[0])
options = sys.argv[1:]
if sys.prefix == sys.base_prefix and not os.access(sysconfig.get_path("purelib"), os.W_OK):
    os.environ["PYTHONUSERBASE"] = tempfile.mkdtemp(prefix="atoll-")
    options.insert(0, "--user")
os.environ.update(PIP_BREAK_SYSTEM_PACKAGES="1", PIP_ROOT_USER_ACTION="ignore")
if importlib.util.find_spec("pip") is None:
    fail("this image has no pip for " + sys.executable + "; install Atoll in the image, or use one with pip")
pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
code = subprocess.call(pip + options)
if code:
    fail("pip ended with code " + str(code) + " and its output is above; the index of the image must have the "
         "dependencies of Atoll, or pip_index name one that has, or the image contain Atoll")
os.execv(sys.executable, [sys.executable, "-m", "atoll.replica"])
""".strip()


@dataclass(frozen=True)
class Wheel:
    """The wheel of the installed version, without its bytes, which the executor puts into the ConfigMap."""

    file: str
    sha256: str
    """The digest of its contents, whatever the compression."""
    size_bytes: int = 0
    compiled_for: str = ""
    """The platform of its compiled kernels; empty if it has none."""


def bootstrap_problems(bootstrap: str | None, index: str | None, extras: Sequence[str], *, owns: bool) -> Iterator[str]:
    """Every rule between the settings of the bootstrap. `owns` says that the image runs its own command."""
    if bootstrap is None:
        if index is not None:
            yield 'pip_index: has no effect without bootstrap="pip"'
        if extras:
            yield 'pip_extras: has no effect without bootstrap="pip"'
        return
    if owns:
        yield "bootstrap: has no effect with an own command, which does not start Atoll; use one of the two"
    if index is not None and _CREDENTIALS.match(index):
        yield (
            "pip_index: has a user name or a password, which the request would show; configure pip in the image, "
            "or pass PIP_INDEX_URL as a secret"
        )
    yield from (f"pip_extras: `{each}` is not the name of an extra" for each in extras if not _EXTRA.match(each))


def bootstrap_command(
    python: str, version: str, extras: Sequence[str], *, wheel: Wheel | None, index: str | None
) -> list[str]:
    """The command of the container. `wheel` is None if everything comes from `index`."""
    with_extras = f"[{','.join(sorted(set(extras)))}]" if extras else ""
    if wheel is not None:
        return [python, "-c", _PROGRAM, f"atoll{with_extras} @ file://{FOLDER}/{wheel.file}"]
    source = [] if index is None else ["--index-url", index]
    return [python, "-c", _PROGRAM, *source, f"atoll{with_extras}=={version}"]


def wheel_config_map(name: str, wheel: Wheel) -> dict[str, Any]:
    """The ConfigMap of the wheel, without its bytes: see `with_wheel`.

    `wheel` names the file and its digest, so that the plan is short and still changes with the wheel.
    """
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-wheel", "annotations": {_DIGEST: wheel.sha256}},
        "immutable": True,
    }


def with_wheel(thing: Mapping[str, Any], data: Callable[[], bytes]) -> Mapping[str, Any]:
    """An object of a run as it is sent: the ConfigMap of the wheel gets its bytes, any other object stays as it is."""
    if _DIGEST not in (thing["metadata"].get("annotations") or {}):
        return thing
    return {**thing, "binaryData": {_KEY: base64.b64encode(data()).decode()}}


def wheel_volume(name: str, wheel: Wheel) -> tuple[dict[str, Any], dict[str, Any]]:
    """The volume with the wheel, and its mount. A version may have letters that no key of a ConfigMap can have."""
    volume, mount = config_map_file("atoll-wheel", f"{name}-wheel", FOLDER)
    volume["configMap"]["items"] = [{"key": _KEY, "path": wheel.file}]
    return volume, mount


def wheel_problems(wheel: Wheel) -> Iterator[str]:
    """A wheel that no ConfigMap can hold."""
    if wheel.size_bytes > MOST_BYTES:
        yield (
            f"bootstrap: the wheel of Atoll has {wheel.size_bytes:,} bytes, and a ConfigMap holds at most "
            f"{MOST_BYTES:,}; name an index that has it as pip_index"
        )


def bootstrap_notes(wheel: Wheel | None, version: str, index: str | None) -> Iterator[str]:
    """Where a replica gets Atoll from."""
    if wheel is None:
        yield f"bootstrap: each replica installs Atoll {version} and its dependencies from {index} when it starts"
        return
    kernels = (
        f"its compiled kernels are for {wheel.compiled_for}" if wheel.compiled_for else "it has no compiled kernels"
    )
    yield (
        f"bootstrap: each replica installs Atoll {version} from a ConfigMap ({wheel.size_bytes / 1e6:.1f} MB) when it "
        f"starts, and its dependencies from the pip index of the image; {kernels}, and numpy does their work elsewhere"
    )
