"""Pure: translates the end of an `ssh` process, and an error that a host reports, into Atoll's errors.

ssh ends with 255 if it could not log in or lost the connection, and otherwise with the code of the remote command. Its
words on standard error say which; they are the same in every language. The exception with these words stays the cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.errors import (
    AtollError,
    AuthError,
    BackendError,
    BackendUnavailable,
    CapacityError,
    ConfigError,
    Conflict,
    InvalidSpec,
    RunNotFound,
    StopFailed,
    StoreError,
    SubmitError,
    Unsupported,
)
from atoll.executors.ssh.hosts import parsed

EXECUTOR = "ssh"
NOT_CONNECTED = "unreachable"
"""The reason of an error before there was a connection: the host has received nothing."""
_OF_SSH = 255
_NOT_FOUND = (126, 127)


class SshFailed(Exception):
    """An `ssh` process ended without an answer of the host. `code` is None if it had to be ended."""

    def __init__(self, host: str, code: int | None, words: str) -> None:
        super().__init__(words)
        self.host, self.code, self.words = host, code, words


def translated(failed: SshFailed, operation: str, python: str) -> AtollError:
    """Atoll's error for a call without an answer. Raise it `from` that."""
    host, words = failed.host, failed.words
    about: dict[str, Any] = {"executor": EXECUTOR, "operation": operation}
    if failed.code == _OF_SSH:
        return _of_ssh(host, words, about)
    if failed.code is None:
        return BackendUnavailable(f"host `{host}`: {words}", reason="no_answer", **about)
    if failed.code in _NOT_FOUND:
        hint = "set `python` below `[executors.ssh]` to the interpreter on the hosts that has Atoll"
        return BackendError(f"host `{host}` has no `{python}`: {_last(words)}", reason="no_python", hint=hint, **about)
    if "No module named" in words and "atoll" in words:
        hint = f"install the same version of Atoll for `{python}` on the host, or set `python` to another interpreter"
        text = f"host `{host}`: `{python}` has no Atoll, or another version of it: {_last(words)}"
        return BackendError(text, reason="no_atoll", hint=hint, **about)
    text = f"host `{host}`: the command of Atoll ended with {failed.code}: {_last(words)}"
    return BackendError(text, reason="host_failed", **about)


def _of_ssh(host: str, words: str, about: Mapping[str, Any]) -> AtollError:
    """ssh itself failed: the key of the host, the login, or the connection."""
    low = words.lower()
    if "identification has changed" in low:
        hint = (
            f"if the host was installed again, delete its old key with `ssh-keygen -R '{_key_name(host)}'` and log in "
            f"once with `ssh {_arguments(host)}` to compare and accept the new one; otherwise another machine "
            "answers in its place"
        )
        return AuthError(
            f"host `{host}` has another host key than before", reason="host_key_changed", hint=hint, **about
        )
    if "host key verification failed" in low or "host key is known for" in low:
        login = f"ssh {_arguments(host)}"
        hint = f"log in once with `{login}` in a terminal, compare the fingerprint with that of the host, accept it"
        return AuthError(f"the key of host `{host}` is not known here", reason="host_key_unknown", hint=hint, **about)
    if "permission denied" in low or "too many authentication failures" in low:
        login = f"ssh -o BatchMode=yes {_arguments(host)} true"
        hint = f"`{login}` has to work: load the key into the agent, or set `identity_file`"
        return AuthError(f"host `{host}` refuses the login: {_last(words)}", reason="login", hint=hint, **about)
    if "bad configuration option" in low or "bad owner or permissions" in low or "unsupported option" in low:
        return BackendError(f"ssh cannot connect to host `{host}`: {_last(words)}", reason="ssh_config", **about)
    text = f"host `{host}` cannot be reached: {_last(words) or 'the connection was lost'}"
    is_sent = not low.startswith(("ssh: connect to host", "ssh: could not resolve hostname"))
    return BackendUnavailable(text, reason="connection" if is_sent else NOT_CONNECTED, **about)


def _arguments(address: str) -> str:
    """The arguments with which `ssh` logs in to a host."""
    host = parsed(address)
    if host is None:
        return address
    user = f"{host.user}@" if host.user else ""
    return f"-p {host.port} {user}{host.name}" if host.port else f"{user}{host.name}"


def _key_name(address: str) -> str:
    """The name of a host in the file of known keys."""
    host = parsed(address)
    if host is None:
        return address
    return host.name if host.port in (None, 22) else f"[{host.name}]:{host.port}"


def _last(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


# ── errors that a host reports ──────────────────────────────────────────────────────────────────────────────────────


def error_record(exc: AtollError) -> dict[str, Any]:
    """An error as JSON, for the launcher."""
    names = ("problems", "differences", "refusals", "left_running", "created", "retryable")
    more = {name: value for name in names if (value := getattr(exc, name, None)) is not None}
    kept = {name: list(value) if isinstance(value, tuple) else value for name, value in more.items()}
    plain = {"class": exc.code, "exit_code": exc.exit_code, "message": exc.message, "reason": exc.reason}
    return {**plain, "hint": exc.hint, **kept}


class HostRefused(Exception):
    """A host answered with an error; its text is what the host said."""


def reported(host: str, run_id: str, error: Mapping[str, Any], operation: str) -> AtollError:
    """The error that a host reported, with the name of the host in it. Raise it `from` a `HostRefused`."""
    kind, words = str(error.get("class", "")), str(error.get("message", ""))
    text, hint, reason = f"host `{host}`: {words}", error.get("hint"), str(error.get("reason", ""))
    about: dict[str, Any] = {"executor": EXECUTOR, "operation": operation, "hint": hint}
    if kind == Conflict.__name__:
        return Conflict(run_id, [f"host `{host}`: {line}" for line in error.get("differences", ())])
    if kind in (InvalidSpec.__name__, Unsupported.__name__):
        return InvalidSpec(f"run `{run_id}`", [_of_host(host, line) for line in error.get("problems", ())], hint=hint)
    if kind == RunNotFound.__name__:
        return RunNotFound(text, reason=reason, **about)
    if kind == CapacityError.__name__:
        return CapacityError(text, reason=reason, **about)
    if kind == SubmitError.__name__:
        return SubmitError(text, left_running=error.get("left_running", ()), created=[host], executor=EXECUTOR)
    if kind == StopFailed.__name__:
        refusals = {f"{host}: {name}": why for name, why in dict(error.get("refusals", {})).items()}
        return StopFailed(f"run `{run_id}`", refusals, executor=EXECUTOR)
    if error.get("exit_code") == StoreError.exit_code:
        return StoreError(text, reason=reason, hint=hint)
    if error.get("exit_code") == ConfigError.exit_code:
        return ConfigError(text, reason=reason, hint=hint)
    raised = BackendUnavailable if error.get("retryable") else BackendError
    return raised(text, reason=reason, **about)


def _of_host(host: str, problem: str) -> str:
    """The problem with its host, and the field still first: `gpu=…: host gpu1: …`."""
    field, found, rest = problem.partition(": ")
    return f"{field}: host `{host}`: {rest}" if found else f"hosts: host `{host}`: {problem}"
