"""Where a command's words go: data on stdout, talk on stderr, or JSON on stdout. One `Output` per command."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import IO, Any

from atoll.cli.envelope import dumps, envelope, event
from atoll.cli.text import styled


class Output:
    """The two streams of a command, and whether a person or a program reads them."""

    def __init__(self, command: str, *, is_json: bool = False, environ: Mapping[str, str] | None = None) -> None:
        self.command, self.is_json = command, is_json
        self._environ = os.environ if environ is None else environ
        self._data: Any = None

    @classmethod
    def for_arguments(cls, argv: list[str]) -> Output:
        """Known before the arguments are parsed, so that even a mistake in them is reported in the right form."""
        ours = argv[: argv.index("--")] if "--" in argv else argv
        command = next((word for word in ours if not word.startswith("-")), "")
        return cls(command, is_json="--json" in ours)

    def say(self, text: str = "") -> None:
        """Talk, for people."""
        if not self.is_json:
            write(sys.stderr, text + "\n")

    def text(self, text: str) -> None:
        """Data, for people and pipes."""
        if not self.is_json:
            write(sys.stdout, text + "\n")

    def data(self, data: Any) -> None:
        """Data, for programs: what the envelope will hold."""
        self._data = data

    def event(self, name: str, data: Any) -> None:
        """One line of a stream, for programs."""
        if self.is_json:
            write(sys.stdout, dumps(event(self.command, name, data)) + "\n")

    def close(self, exit_code: int, error: Mapping[str, Any] | None = None) -> None:
        """The envelope, if a program is reading; then make sure that everything is out."""
        if self.is_json:
            write(sys.stdout, dumps(envelope(self.command, exit_code, self._data, error)) + "\n")
        sys.stdout.flush()
        sys.stderr.flush()

    def paint(self, text: str, style: str, *, on_stderr: bool = False) -> str:
        return styled(text, style, colour=self.has_colour(on_stderr=on_stderr))

    def has_colour(self, *, on_stderr: bool = False) -> bool:
        return not self._environ.get("NO_COLOR") and self._is_terminal(sys.stderr if on_stderr else sys.stdout)

    @property
    def is_live(self) -> bool:
        """Whether a person watches stderr on a terminal that can redraw."""
        return not self.is_json and self._is_terminal(sys.stderr)

    @property
    def is_screen(self) -> bool:
        """Whether a person watches stdout on a terminal that can redraw."""
        return not self.is_json and self._is_terminal(sys.stdout)

    @property
    def can_ask(self) -> bool:
        return self.is_live and sys.stdin is not None and sys.stdin.isatty()

    def width(self, *, on_stderr: bool = False) -> int | None:
        """Columns of the terminal; None where lines may be as long as they like."""
        stream = sys.stderr if on_stderr else sys.stdout
        if not stream.isatty():
            return None
        import shutil

        return shutil.get_terminal_size().columns

    def _is_terminal(self, stream: IO[str]) -> bool:
        return stream.isatty() and self._environ.get("TERM") != "dumb"


def write(stream: IO[str], text: str) -> None:
    """Write as UTF-8 whatever the locale is."""
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        stream.write(text)
        return
    stream.flush()
    buffer.write(encoded(text))
    buffer.flush()


def encoded(text: str) -> bytes:
    """UTF-8; bytes that came in undecoded go out as they were, and what UTF-8 cannot say is escaped."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")
