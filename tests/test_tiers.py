"""The tiers of the tests: `tiers.py` marks by fixture, and a test without the marker it needs fails."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from repository import TESTS

pytestmark = pytest.mark.process

PRELUDE = "import socket, subprocess, threading, pytest, torch\n"
NEEDS_A_MARKER = {
    "process": "subprocess.run(['true'])",
    "server": "socket.create_server(('127.0.0.1', 0)).close()",
    "training": "torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()",
}


@pytest.fixture
def nested(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder for tests that another pytest runs."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "200")  # whole messages in the summary
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    return pytester


def test_a_test_without_its_marker_fails(nested: pytest.Pytester) -> None:
    files = {}
    for tier, line in NEEDS_A_MARKER.items():
        body = f"def test_{tier}():\n    {line}\n"
        files[f"test_{tier}_bare"] = PRELUDE + body
        files[f"test_{tier}_marked"] = f"{PRELUDE}@pytest.mark.{tier}\n{body}"
    nested.makepyfile(**files)
    result = nested.runpytest_subprocess("-p", "tiers")
    assert result.parseoutcomes()["passed"] == 3
    assert result.parseoutcomes()["failed"] == 3
    for tier in NEEDS_A_MARKER:
        result.stdout.fnmatch_lines([f"*test_{tier}_bare.py*mark it with `pytest.mark.{tier}`*"])


def test_a_failure_in_a_thread_or_behind_an_except_is_seen(nested: pytest.Pytester) -> None:
    nested.makepyfile(
        "import subprocess, threading\n"
        "def start():\n    try:\n        subprocess.run(['true'])\n    except BaseException:\n        pass\n"
        "def test_here():\n    start()\n"
        "def test_thread():\n    one = threading.Thread(target=start)\n    one.start()\n    one.join()\n"
    )
    result = nested.runpytest_subprocess("-p", "tiers")
    assert result.parseoutcomes() == {"passed": 2, "errors": 2}


def test_a_fixture_that_starts_a_server_marks_the_test(nested: pytest.Pytester) -> None:
    nested.makepyfile(
        "import subprocess, pytest\n@pytest.fixture\ndef seaweed():\n    subprocess.run(['true'])\n"
        "@pytest.fixture\ndef store(seaweed):\n    pass\n"
        "def test_server(store):\n    pass\ndef test_fast():\n    pass\n"
    )
    assert nested.runpytest_subprocess("-p", "tiers").parseoutcomes() == {"passed": 2}
    result = nested.runpytest_subprocess("-p", "tiers", "-m", "not server")
    assert result.parseoutcomes() == {"passed": 1, "deselected": 1}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_skip_that_is_not_listed_fails_the_run(nested: pytest.Pytester, workers: int) -> None:
    nested.makefile(".txt", allowed="# a comment\nno .* today :: The moon is not a machine.\n")
    nested.makepyfile(
        test_one="import pytest\ndef test_a():\n    pytest.skip('no moon today')\ndef test_b():\n    pass\n"
        "@pytest.mark.xfail\ndef test_c():\n    assert False\n"
    )
    arguments = ("-p", "skips", "-p", "xdist.plugin", "-n", str(workers))
    assert nested.runpytest_subprocess(*arguments, "--strict-skips=allowed.txt").ret == 0
    nested.makepyfile(
        test_two="import pytest\n@pytest.mark.skipif(True, reason='no nginx')\ndef test_a():\n    pass\n",
        test_three="import pytest\npytest.importorskip('no_such_module', reason='no module')\n",
        test_four="import pytest\n@pytest.fixture\ndef sun():\n    pytest.skip('no sun')\ndef test_a(sun):\n    pass\n",
    )
    assert nested.runpytest_subprocess(*arguments).ret == 0
    result = nested.runpytest_subprocess(*arguments, "--strict-skips=allowed.txt")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "*unexpected skips*",
            "test_four.py::test_a: no sun",
            "test_three.py: no module",
            "test_two.py::test_a: no nginx",
        ]
    )


def test_the_list_of_skips_says_why(nested: pytest.Pytester) -> None:
    nested.makefile(".txt", allowed="no sun\n")
    result = nested.runpytest_subprocess("-p", "skips", "--strict-skips=allowed.txt")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*allowed.txt:1 does not say why*"])


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from services.programs import running\n"
        "with running(['sh', '-c', 'echo up; exec sleep 600'], log=Path(sys.argv[1])) as server:\n"
        "    while Path(sys.argv[1]).read_text() != 'up\\n': time.sleep(0.01)\n"
        "    print(server.pid, flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGTERM)
    try:
        assert select.select([server], [], [], 60)[0], "the server still runs"
    finally:
        os.close(server)
