"""Shared by every test: state in a temporary folder, and nothing of a run left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from atoll.context import RESERVED
from atoll.replica import processes

pytest_plugins = [
    "pytester",
    "skips",
    "tiers",
    "services.stores",
    "services.sagemaker.fixtures",
    "services.modal.fixtures",
    "services.kubernetes.fixtures",
    "services.hf_jobs.fixtures",
    "services.ssh.fixtures",
]
# The same examples in every run, and no deadline: machines are noisy. `--hypothesis-profile=explore` looks for more.
settings.register_profile("atoll", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("atoll")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell does for what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """ATOLL_HOME in a temporary folder; at the end of each test no process of it may be alive."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("ATOLL_HOME", str(home))
    for name in (*RESERVED, "ATOLL_DEBUG", "ATOLL_LOG"):
        monkeypatch.delenv(name, raising=False)
    yield home
    left = [(pid, label) for pid, label in processes.labelled() if label.startswith(f"{home}{os.sep}")]
    for _, label in left:
        processes.kill_all(label)
    assert not left, f"processes left behind: {left}"


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The URI of a fresh file store."""
    return (tmp_path / "store").as_uri()


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the test entry points in `jobs.py`."""
    folder = tmp_path / "code"
    folder.mkdir()
    source = Path(__file__).with_name("jobs.py")
    (folder / "jobs.py").write_text(source.read_text())
    monkeypatch.chdir(folder)
    return folder
