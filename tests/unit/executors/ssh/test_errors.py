"""What ssh and a host say becomes an error that names the host and the next step."""

from __future__ import annotations

import pytest

import atoll
from atoll.errors import (
    AuthError,
    BackendError,
    BackendUnavailable,
    ConfigError,
    Conflict,
    InvalidSpec,
    RunNotFound,
    StopFailed,
    StoreError,
    SubmitError,
    Unsupported,
)
from atoll.executors.ssh.errors import SshFailed, error_record, reported, translated
from atoll.executors.ssh.protocol import PROTOCOL, versions_problem


@pytest.mark.parametrize(
    ("host", "login"),
    [("gpu1", "ssh gpu1"), ("me@gpu2:2222", "ssh -p 2222 me@gpu2"), ("[fe80::1]:9", "ssh -p 9 fe80::1")],
)
def test_a_hint_has_the_command_that_logs_in(host: str, login: str) -> None:
    error = translated(SshFailed(host, 255, "Host key verification failed."), "start", "python3")
    assert f"`{login}`" in (error.hint or "")


@pytest.mark.parametrize(
    ("code", "words", "kind", "reason"),
    [
        (255, "me@gpu1: Permission denied (publickey).", AuthError, "login"),
        (255, "Received disconnect from 10.0.0.1: Too many authentication failures", AuthError, "login"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", AuthError,
         "host_key_changed"),
        (255, "No ED25519 host key is known for gpu1 and you have…\nHost key verification failed.", AuthError,
         "host_key_unknown"),
        (255, "ssh: connect to host gpu1 port 22: Connection refused", BackendUnavailable, "unreachable"),
        (255, "ssh: Could not resolve hostname gpu1: Name or service not known", BackendUnavailable, "unreachable"),
        (255, "kex_exchange_identification: Connection closed by remote host", BackendUnavailable, "connection"),
        (255, "", BackendUnavailable, "connection"),
        (255, "command-line: line 0: Bad configuration option: x", BackendError, "ssh_config"),
        (None, "no answer within 60 s", BackendUnavailable, "no_answer"),
        (127, "bash: line 1: python9: command not found", BackendError, "no_python"),
        (1, "…'atoll.executors.ssh.host' (ModuleNotFoundError: No module named 'atoll')", BackendError, "no_atoll"),
        (1, "Traceback…\nOSError: disk", BackendError, "host_failed"),
    ],
)  # fmt: skip
def test_the_words_of_ssh_become_an_error(code: int | None, words: str, kind: type, reason: str) -> None:
    error = translated(SshFailed("me@gpu1", code, words), "status", "python9")
    assert (type(error), error.reason) == (kind, reason)
    assert "me@gpu1" in error.message
    assert error.hint or kind is BackendUnavailable or reason in ("ssh_config", "host_failed")


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (Conflict("exp", ["env.A: there 1, here 2"]), Conflict),
        (InvalidSpec("secrets", ["secrets.A=`env:B`: variable `B` is not set"]), InvalidSpec),
        (Unsupported("local", "exp", ["gpu=`H100:1`: 1 replica needs 1"]), InvalidSpec),
        (RunNotFound("no log"), RunNotFound),
        (SubmitError("did not start", created=["x"]), SubmitError),
        (StopFailed("run", {"process 7": "does not end"}), StopFailed),
        (StoreError("no such bucket"), StoreError),
        (ConfigError("no"), ConfigError),
        (BackendUnavailable("busy"), BackendUnavailable),
        (BackendError("broken"), BackendError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_an_error_of_a_host_keeps_its_class_and_names_the_host(raised, kind) -> None:
    error = reported("gpu7", "exp", error_record(raised), "submit")
    assert type(error) is kind
    assert "gpu7" in str(error)


def test_a_problem_of_a_host_keeps_its_field() -> None:
    raised = InvalidSpec("secrets", ["secrets.A=`env:B`: variable `B` is not set", "no field here"])
    error = reported("gpu7", "exp", error_record(raised), "submit")
    assert isinstance(error, InvalidSpec)
    assert error.fields == ("secrets.A", "hosts")


def test_another_version_is_refused_for_a_start_and_another_protocol_always() -> None:
    other = {"protocol": PROTOCOL, "atoll": "99.1.0"}
    problem = versions_problem("gpu1", other, is_start=True)
    assert problem is not None
    assert (problem.reason, "99.1.0" in problem.message, atoll.__version__ in problem.message) == (
        "version",
        True,
        True,
    )
    assert versions_problem("gpu1", other, is_start=False) is None
    assert versions_problem("gpu1", {"protocol": 99, "atoll": atoll.__version__}, is_start=False) is not None
    assert versions_problem("gpu1", {"protocol": PROTOCOL, "atoll": atoll.__version__}, is_start=True) is None
