"""The output of a command: tables and colours as plain text, `Output` for stdout and stderr, the JSON envelope.

Data goes to stdout, messages for people to stderr; with `--json`, stdout has only JSON lines. A line of a stream has
`event`; the last line of every command is the envelope, which has `ok` and `exit_code`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from atoll.errors import AtollError
from atoll.terminal_text import shown_text, without_escapes

ANSI = {"good": "32", "bad": "31", "warn": "33", "busy": "36", "lost": "35", "dim": "2", "bold": "1", "": ""}
_GAP = "  "
_LEAST_FLEXIBLE = 12
SCHEMA = "atoll/1"


@dataclass(frozen=True)
class Cell:
    """A text and its style, a key of `ANSI`."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Column:
    """A column. On a narrow terminal flexible columns are cut first, then spare ones are dropped."""

    title: str
    is_right: bool = False
    is_flexible: bool = False
    is_spare: bool = False


@dataclass(frozen=True)
class Table:
    """Columns and rows of cells, independent of the width of the terminal."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def without_empty_columns(self) -> Table:
        """The table without the columns that are empty in every row."""
        kept = [i for i in range(len(self.columns)) if i == 0 or any(row[i].text for row in self.rows)]
        return self._only(kept)

    def fitted(self, width: int) -> Table:
        """The table with as few columns dropped as necessary: empty ones first, then spare ones from the right."""
        table = self if self._least_width() <= width else self.without_empty_columns()
        while table._least_width() > width:
            spare = [i for i, column in enumerate(table.columns) if column.is_spare]
            if not spare:
                break
            table = table._only([i for i in range(len(table.columns)) if i != spare[-1]])
        return table

    def natural_widths(self) -> list[int]:
        """The width of the longest text of each column."""
        return [
            max([display_width(column.title), *(display_width(row[i].text) for row in self.rows)])
            for i, column in enumerate(self.columns)
        ]

    def _least_width(self) -> int:
        least = (
            min(width, _LEAST_FLEXIBLE) if column.is_flexible else width
            for width, column in zip(self.natural_widths(), self.columns, strict=True)
        )
        return sum(least) + len(_GAP) * (len(self.columns) - 1)

    def _only(self, kept: Sequence[int]) -> Table:
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return Table(tuple(self.columns[i] for i in kept), rows)


def table_text(table: Table, *, width: int | None = None, colour: bool = False, indent: str = "") -> str:
    """The table as lines; with `width`, cut to fit."""
    if width is not None:
        width -= len(indent)
        table = table.fitted(width)
    widths = _widths(table, width)
    head = [Cell(column.title, "dim") for column in table.columns]
    lines = (_line(row, table.columns, widths, colour) for row in (head, *table.rows))
    return "\n".join((indent + line).rstrip() for line in lines)


def styled(text: str, style: str, *, colour: bool) -> str:
    """The text in a style; unchanged without colours."""
    code = ANSI[style]
    return f"\x1b[{code}m{text}\x1b[0m" if colour and code and text else text


def pairs_text(pairs: Iterable[tuple[str, str | Cell]], *, colour: bool = False, indent: str = "  ") -> str:
    """One line per name and value, with aligned values."""
    rows = [(name, value if isinstance(value, Cell) else Cell(value)) for name, value in pairs]
    width = max((display_width(name) for name, _ in rows), default=0)
    lines = (
        f"{indent}{styled(name.ljust(width), 'dim', colour=colour)}{_GAP}{styled(v.text, v.style, colour=colour)}"
        for name, v in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def one_line(text: str) -> str:
    """The last line as a terminal shows it: the part after the last \\r, without escapes and control characters."""
    shown = [part for part in without_escapes(text).replace("\t", " ").splitlines() if part.strip()]
    last = shown[-1].strip() if shown else ""
    return "".join(c if c.isprintable() else "·" for c in last)


def display_width(text: str) -> int:
    """The columns that a text takes: wide characters take two, combining characters none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, width: int) -> str:
    """The text; if it is wider than `width`, its beginning and an ellipsis."""
    if display_width(text) <= width:
        return text
    taken, used = [], 0
    for character in text:
        used += display_width(character)
        if used > width - 1:
            break
        taken.append(character)
    return "".join(taken).rstrip() + "…" if width > 0 else ""


def _widths(table: Table, total: int | None) -> list[int]:
    """The width of each column. To fit into `total`, flexible columns shrink, the widest first."""
    widths = table.natural_widths()
    if total is None:
        return widths
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - total
    flexible = [i for i, column in enumerate(table.columns) if column.is_flexible]
    for i in sorted(flexible, key=lambda i: -widths[i]):
        removed = min(max(0, excess), max(0, widths[i] - _LEAST_FLEXIBLE))
        widths[i] -= removed
        excess -= removed
    return widths


def _line(row: Sequence[Cell], columns: Sequence[Column], widths: Sequence[int], colour: bool) -> str:
    parts = []
    for cell, column, width in zip(row, columns, widths, strict=True):
        text = cut(cell.text, width)
        space = " " * (width - display_width(text))
        shown = styled(text, cell.style, colour=colour)
        parts.append(space + shown if column.is_right else shown + space)
    return _GAP.join(parts).rstrip()


def envelope(command: str, exit_code: int, data: Any, error: Mapping[str, Any] | None) -> dict[str, Any]:
    """The last line of a command with `--json`."""
    return {
        "schema": SCHEMA,
        "command": command,
        "ok": exit_code == 0,
        "exit_code": exit_code,
        "data": data,
        "error": error,
    }


def event(command: str, name: str, data: Any) -> dict[str, Any]:
    """One line of a stream."""
    return {"schema": SCHEMA, "command": command, "event": name, "data": data}


def error_record(error: AtollError) -> dict[str, Any]:
    """The `error` of an envelope: class name, message, hint, and the lists of single problems."""
    record: dict[str, Any] = {"code": error.code, "message": shown_text(error.message), "hint": error.hint}
    for name in ("problems", "differences", "left_running"):
        if found := getattr(error, name, None):
            record[name] = list(found)
    if refusals := getattr(error, "refusals", None):
        record["refusals"] = dict(refusals)
    return record


def dumps(value: Any) -> str:
    """One line of strict JSON in ASCII; NaN and infinities become strings, because JSON does not have them."""
    return json.dumps(_strict(value), allow_nan=False, default=str)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


class Output:
    """Stdout and stderr of one command, as text for people or as JSON for programs."""

    def __init__(self, command: str, *, is_json: bool = False, environ: Mapping[str, str] | None = None) -> None:
        self.command, self.is_json = command, is_json
        self._environ = os.environ if environ is None else environ
        self._data: Any = None

    @classmethod
    def for_arguments(cls, argv: list[str]) -> Output:
        """The output for these arguments, before they are parsed: errors in them are also reported as JSON."""
        own = argv[: argv.index("--")] if "--" in argv else argv
        command = next((argument for argument in own if not argument.startswith("-")), "")
        return cls(command, is_json="--json" in own)

    def say(self, text: str = "", style: str = "") -> None:
        """Print a message for people on stderr."""
        if not self.is_json:
            write(sys.stderr, self.paint(text, style, on_stderr=True) + "\n")

    def text(self, text: str) -> None:
        """Print data as text on stdout."""
        if not self.is_json:
            write(sys.stdout, text + "\n")

    def table_text(self, table: Table) -> str:
        """The table for stdout: in the width and with the colours of the terminal."""
        return table_text(table, width=self.width(), colour=self.has_colour())

    def data(self, data: Any) -> None:
        """Set the data of the envelope."""
        self._data = data

    def event(self, name: str, data: Any) -> None:
        """Print one JSON line of a stream."""
        if self.is_json:
            write(sys.stdout, dumps(event(self.command, name, data)) + "\n")

    def close(self, exit_code: int, error: Mapping[str, Any] | None = None) -> None:
        """Print the envelope with `--json`, then flush both streams."""
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
        """Whether stderr is a terminal that can redraw, and `--json` is not given."""
        return not self.is_json and self._is_terminal(sys.stderr)

    @property
    def is_screen(self) -> bool:
        """Whether stdout is a terminal that can redraw, and `--json` is not given."""
        return not self.is_json and self._is_terminal(sys.stdout)

    @property
    def can_ask(self) -> bool:
        return self.is_live and sys.stdin is not None and sys.stdin.isatty()

    def width(self, *, on_stderr: bool = False) -> int | None:
        """The columns of the terminal; None if the stream is not a terminal."""
        stream = sys.stderr if on_stderr else sys.stdout
        if not stream.isatty():
            return None
        import shutil

        return shutil.get_terminal_size().columns

    def _is_terminal(self, stream: IO[str]) -> bool:
        return stream.isatty() and self._environ.get("TERM") != "dumb"


def write(stream: IO[str], text: str) -> None:
    """Write as UTF-8, independent of the locale."""
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        stream.write(text)
        return
    stream.flush()
    buffer.write(encoded(text))
    buffer.flush()


def encoded(text: str) -> bytes:
    """The text as UTF-8. Bytes that could not be decoded are restored; other lone surrogates are escaped."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")
