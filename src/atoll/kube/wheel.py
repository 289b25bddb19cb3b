"""The wheel of the installed Atoll for `bootstrap = "pip"`, made again from its files and without a network.

The wheel has the files of the package folder as they are, which is right for a package that pip installed and for a
source tree alike, and the metadata of the distribution. Only the contract suites are left out, which no replica needs,
because a ConfigMap has little room. The wheel is for every platform: compiled kernels are in it, are loaded only where
they fit, and numpy does their work elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import io
import platform
import re
import sys
import zipfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import atoll
from atoll.kube.bootstrap import Wheel

_METADATA = ("METADATA", "entry_points.txt", "licenses/LICENSE")
_WHEEL = "Wheel-Version: 1.0\nGenerator: atoll\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_WRITTEN = re.compile(r"/(__pycache__/|\.)")
_SUITE = re.compile(r"atoll/testing/(?!__init__\.py|\w+_jobs\.py)")
"""Files that only tests of adapters need; replicas run the jobs of the suites."""
_EPOCH = (1980, 1, 1, 0, 0, 0)


class NoWheel(Exception):
    """Why there is no wheel of the installed Atoll."""


@cache
def installed_wheel() -> tuple[Wheel, bytes]:
    """The wheel of the Atoll that this process has loaded, and its bytes; `NoWheel` if there is none."""
    files = {**_package(Path(atoll.__file__).parent), **_metadata(atoll.__version__)}
    record = record_of(files)
    data = packed(files, record)
    has_compiled = any(path.endswith(".so") for path in files)
    made_for = f"{sys.platform} {platform.machine()}" if has_compiled else ""
    file = f"atoll-{atoll.__version__}-py3-none-any.whl"
    return Wheel(file, hashlib.sha256(record.encode()).hexdigest(), len(data), made_for), data


def _package(folder: Path) -> dict[str, bytes]:
    """The files of the package, without suites and without what Python or an editor writes there."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    if not found:
        raise NoWheel(f"{folder} is not a folder with files")
    names = {path.relative_to(folder.parent).as_posix(): path for path in found}
    return {
        name: path.read_bytes() for name, path in names.items() if not (_WRITTEN.search(name) or _SUITE.match(name))
    }


def _metadata(version: str) -> dict[str, bytes]:
    """The metadata of the distribution. A source tree may have another version now than when it was installed."""
    try:
        installed = distribution("atoll")
    except PackageNotFoundError as exc:
        raise NoWheel("Atoll is not installed as a package here, so that its dependencies are not known") from exc
    folder = f"atoll-{version}.dist-info"
    found = {f"{folder}/{name}": text for name in _METADATA if (text := installed.read_text(name)) is not None}
    metadata = f"{folder}/METADATA"
    if metadata not in found:
        raise NoWheel("the installed Atoll has no METADATA")
    found[metadata] = re.sub(r"^Version: .*$", f"Version: {version}", found[metadata], count=1, flags=re.M)
    return {path: text.encode() for path, text in {**found, f"{folder}/WHEEL": _WHEEL}.items()}


def record_of(files: Mapping[str, bytes]) -> str:
    """The RECORD of a wheel: the digest and the size of each file."""
    lines = []
    for path in sorted(files):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[path]).digest()).decode().rstrip("=")
        lines.append(f"{path},sha256={digest},{len(files[path])}\n")
    return "".join(lines)


def packed(files: Mapping[str, bytes], record: str) -> bytes:
    """The files and their RECORD as a zip without times, so that the same files give the same wheel."""
    folder = next(path.partition("/")[0] for path in files if ".dist-info/" in path)
    every = {path: files[path] for path in sorted(files)}
    every[f"{folder}/RECORD"] = f"{record}{folder}/RECORD,,\n".encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path, content in every.items():
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.compress_type, entry.external_attr, entry.create_system = zipfile.ZIP_DEFLATED, 0o100644 << 16, 3
            archive.writestr(entry, content, compresslevel=9)
    return buffer.getvalue()


def wheel_or_why() -> Wheel | str:
    """The wheel of the installed Atoll, or why there is none."""
    try:
        return installed_wheel()[0]
    except NoWheel as exc:
        return str(exc)


def wheel_bytes() -> bytes:
    return installed_wheel()[1]
