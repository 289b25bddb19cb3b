"""The wheel of the installed Atoll: complete, the same every time, and installable by pip without a network."""

from __future__ import annotations

import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

import atoll
from atoll.kube import wheel
from atoll.kube.bootstrap import MOST_BYTES
from atoll.kube.wheel import NoWheel, installed_wheel, packed, record_of


def test_it_has_every_file_of_the_package_but_suites_and_nothing_else():
    names = set(zipfile.ZipFile(io.BytesIO(installed_wheel()[1])).namelist())
    folder = Path(atoll.__file__).parent
    sources = {f"atoll/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")}
    suites = {name for name in sources if name.startswith("atoll/testing/")}
    jobs = {f"atoll/testing/{name}.py" for name in ("__init__", "contract_jobs", "protocol_jobs")}
    assert names & suites == jobs
    sources -= suites - jobs
    assert sources | {"atoll/py.typed", "atoll/kernels/_native.c", "atoll/cli/help.txt"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_its_record_is_true():
    archive = zipfile.ZipFile(io.BytesIO(installed_wheel()[1]))
    (record,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
    rows = {path: (digest, size) for path, digest, size in csv.reader(io.StringIO(archive.read(record).decode()))}
    assert rows.pop(record) == ("", "")
    assert set(rows) == set(archive.namelist()) - {record}
    for path, (digest, size) in rows.items():
        content = archive.read(path)
        found = urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        assert (digest, int(size)) == (f"sha256={found}", len(content))


def test_the_same_files_give_the_same_wheel():
    first, again = installed_wheel(), installed_wheel.__wrapped__()
    assert first == again
    files = {"atoll/a.py": b"1", "atoll-1.dist-info/METADATA": b"x"}
    swapped = dict(reversed(files.items()))
    assert packed(files, record_of(files)) == packed(swapped, record_of(swapped))


def test_it_fits_into_a_config_map_and_names_its_platform():
    made, data = installed_wheel()
    assert made.size_bytes == len(data) < MOST_BYTES
    assert made.file == f"atoll-{atoll.__version__}-py3-none-any.whl"
    has_compiled = any(name.endswith(".so") for name in zipfile.ZipFile(io.BytesIO(data)).namelist())
    assert bool(made.compiled_for) is has_compiled


def test_the_version_is_that_of_the_loaded_package(monkeypatch):
    monkeypatch.setattr(atoll, "__version__", "9.8.7+local")
    made, data = installed_wheel.__wrapped__()
    metadata = zipfile.ZipFile(io.BytesIO(data)).read("atoll-9.8.7+local.dist-info/METADATA").decode()
    assert made.file.startswith("atoll-9.8.7+local-")
    assert "\nVersion: 9.8.7+local\n" in metadata


def test_a_package_without_metadata_has_no_wheel(monkeypatch, tmp_path):
    def nothing(name: str) -> None:
        raise wheel.PackageNotFoundError(name)

    with monkeypatch.context() as patched:
        patched.setattr(wheel, "distribution", nothing)
        with pytest.raises(NoWheel):
            installed_wheel.__wrapped__()
    monkeypatch.setattr(atoll, "__file__", str(tmp_path / "nowhere/__init__.py"))
    with pytest.raises(NoWheel):
        installed_wheel.__wrapped__()


@pytest.mark.process
def test_pip_installs_it_without_a_network(tmp_path):
    made, data = installed_wheel()
    (tmp_path / made.file).write_bytes(data)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(tmp_path / "there"), str(tmp_path / made.file)], check=True)
    code = "import atoll; print(atoll.__version__, atoll.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(tmp_path / "there")}, capture_output=True, text=True
    )
    assert done.stdout.split() == [atoll.__version__, str(tmp_path / "there/atoll/__init__.py")]
