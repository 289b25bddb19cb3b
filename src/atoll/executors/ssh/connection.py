"""Every call to a host: one `ssh` process with a constant remote command, bounded in time, repeated while it may help.

The request is JSON on the standard input of the remote command and its answer is JSON on the standard output, so
nothing of a run is part of a command line. The remote command does not depend on the run: the interpreter, the module
`atoll.executors.ssh.host` and a verb. Each line of an answer begins with `MARK`, because the login shell of a user may
print lines of its own. The last line has `ok` or `error`; without it, the answer is incomplete and the call failed.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import atoll
from atoll._time import Clock, Deadline, backoff
from atoll.errors import BackendError, ConfigError
from atoll.executors.ssh.errors import EXECUTOR, HostRefused, SshFailed, reported, translated
from atoll.executors.ssh.hosts import Host
from atoll.executors.ssh.protocol import MARK, PROTOCOL, versions_problem
from atoll.executors.ssh.request import ssh_command
from atoll.executors.ssh.settings import SshSettings

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_MOST_WORDS = 20_000
_END_S = 5.0
_INTERRUPTED_S = 120.0
"""How long an interrupted start waits for the end of its call."""

log = logging.getLogger("atoll.executors")
OnOpen = Callable[[subprocess.Popen[bytes]], None]


class Tries:
    """The tries of one call: a failure that may pass is followed by a pause and another try, until the patience ends.

    The patience begins with the first failure, so there is a second try even if the first one took long.
    """

    def __init__(self, patience_s: float, clock: Clock) -> None:
        self._patience_s, self._clock = patience_s, clock
        self._deadline: Deadline | None = None
        self._pauses = backoff(_FIRST_PAUSE_S, factor=2.0, cap_s=_LONGEST_PAUSE_S, jitter=0.5)

    def another(self, error: BackendError) -> bool:
        """Whether to try again; pauses if so."""
        self._deadline = self._deadline or Deadline(self._patience_s, self._clock)
        if not error.retryable or self._deadline.is_past:
            return False
        log.info("retry after: %s", error.message)
        self._deadline.sleep(next(self._pauses))
        return True


class Hosts:
    """The hosts of one user's settings."""

    def __init__(self, settings: SshSettings, clock: Clock) -> None:
        self.settings, self.clock = settings, clock

    def tries(self) -> Tries:
        return Tries(self.settings.patience_s, self.clock)

    def call(
        self,
        host: Host,
        verb: str,
        run_id: str,
        body: dict[str, Any],
        *,
        timeout_s: float | None = None,
        must_end: bool = False,
        on_retry: Callable[[BackendError], None] | None = None,
    ) -> dict[str, Any]:
        """The answer of a host. An error that may pass is retried for `patience_s`, and `on_retry` is called each time.

        With `must_end`, an interrupt waits for the end of the call, because the host acts on it all the same.
        """
        limit_s, tries = self.settings.timeout_s if timeout_s is None else timeout_s, self.tries()
        while True:
            try:
                lines = [*self._exchange(host, verb, body, limit_s, must_end=must_end)]
                return self._answer(host, verb, run_id, lines[-1])
            except BackendError as exc:
                if not tries.another(exc):
                    raise
                if on_retry is not None:
                    on_retry(exc)

    def stream(
        self,
        host: Host,
        verb: str,
        run_id: str,
        body: dict[str, Any],
        *,
        silence_s: float | None,
        on_open: OnOpen | None = None,
    ) -> Iterator[dict[str, Any]]:
        """The lines of an answer as they arrive; one try. The last one is the answer itself.

        `on_open` gets the process: another thread may kill it, which ends the stream.
        """
        for line in self._exchange(host, verb, body, silence_s, keeps_input=True, on_open=on_open):
            yield self._answer(host, verb, run_id, line) if is_last(line) else line

    def _answer(self, host: Host, verb: str, run_id: str, line: dict[str, Any]) -> dict[str, Any]:
        if problem := versions_problem(str(host), line, is_start=verb in ("check", "start")):
            raise problem from HostRefused(json.dumps(line)[:1000])
        if "ok" in line:
            return dict(line["ok"])
        error = dict(line["error"])
        raise reported(str(host), run_id, error, verb) from HostRefused(str(error.get("message")))

    def _exchange(
        self,
        host: Host,
        verb: str,
        body: dict[str, Any],
        silence_s: float | None,
        *,
        must_end: bool = False,
        keeps_input: bool = False,
        on_open: OnOpen | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Send the request; yields the lines of the answer, and raises if the last is missing. Translates failures.

        The host may be silent for at most `silence_s`.
        """
        request = json.dumps({"protocol": PROTOCOL, "atoll": atoll.__version__, **body}).encode() + b"\n"
        try:
            with _ssh(ssh_command(host, self.settings, verb), must_end=must_end) as process:
                if on_open is not None:
                    on_open(process)
                args = (process.stdin, request, keeps_input)
                threading.Thread(target=_feed, args=args, daemon=True, name="atoll-ssh").start()
                words, line = bytearray(), None
                for raw in _lines(process, silence_s, words):
                    if (line := _parsed(raw)) is not None:
                        yield line
                        if is_last(line):
                            return
                raise _failure(host, process, words)
        except _Silent as exc:
            failed = SshFailed(str(host), None, f"no answer within {silence_s:g} s")
            raise translated(failed, verb, self.settings.python) from exc
        except SshFailed as failed:
            raise translated(failed, verb, self.settings.python) from failed
        except FileNotFoundError as exc:
            hint = "install OpenSSH's client, such as Debian's package `openssh-client`"
            raise ConfigError("this machine has no program `ssh`", reason="no_ssh", hint=hint) from exc
        except OSError as exc:
            raise BackendError(f"cannot start `ssh`: {exc}", executor=EXECUTOR, operation=verb) from exc


class _Silent(Exception):
    """The host has sent nothing for too long."""


def is_last(line: dict[str, Any]) -> bool:
    """Whether a line ends an answer."""
    return "ok" in line or "error" in line


@contextmanager
def _ssh(command: list[str], *, must_end: bool) -> Iterator[subprocess.Popen[bytes]]:
    """An ssh process in a session of its own, so that Ctrl-C in a terminal reaches only this process."""
    log.debug("call %s", " ".join(command))
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
    except KeyboardInterrupt:
        if must_end:
            _drain(process, _INTERRUPTED_S)
        raise
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            with suppress(OSError):  # the request may not be written yet
                if stream is not None:
                    stream.close()


def _drain(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Read what comes until the process ends, at most for this long."""
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            threading.Thread(target=_read_all, args=(stream,), daemon=True, name="atoll-ssh").start()
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _read_all(stream: IO[bytes]) -> None:
    with suppress(OSError, ValueError):
        while stream.read(65536):
            pass


def _feed(stream: IO[bytes] | None, request: bytes, keeps_open: bool) -> None:
    """Write the request; a process that has ended says why on its standard error.

    A host ends a stream when its standard input is closed, so that one is left open.
    """
    assert stream is not None
    with suppress(OSError, ValueError):
        stream.write(request)
        stream.flush()
    if not keeps_open:
        with suppress(OSError, ValueError):
            stream.close()


def _lines(process: subprocess.Popen[bytes], silence_s: float | None, words: bytearray) -> Iterator[bytes]:
    """Lines of the standard output until its end; the standard error goes to `words`. Raises `_Silent`."""
    assert process.stdout is not None
    assert process.stderr is not None
    rest: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stderr, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(silence_s)
            if not ready:
                raise _Silent
            for key, _ in ready:
                block = os.read(key.fd, 1 << 16)
                if not block:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stderr:
                    words += block[: max(0, _MOST_WORDS - len(words))]
                else:
                    *whole, last = block.split(b"\n")
                    if whole:
                        whole[0], rest = b"".join([*rest, whole[0]]), []
                    rest.append(last)
                    yield from whole


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """A line of the answer; None if a login shell, or something else on the host, has printed it."""
    if not raw.startswith(MARK):
        return None
    try:
        found = json.loads(raw.removeprefix(MARK))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _failure(host: Host, process: subprocess.Popen[bytes], words: bytearray) -> SshFailed:
    """Why there is no answer, or only a part of one."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    if not process.returncode:
        return SshFailed(str(host), None, "the answer ended before it was complete")
    return SshFailed(str(host), process.returncode, words.decode("utf-8", "backslashreplace"))
