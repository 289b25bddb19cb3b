"""Tables and colours as plain text: aligned, cut to the width of the terminal, safe to print. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ANSI = {"good": "32", "bad": "31", "warn": "33", "busy": "36", "lost": "35", "dim": "2", "bold": "1", "": ""}
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-_])")
_GAP = "  "
_LEAST_FLEXIBLE = 12


@dataclass(frozen=True)
class Cell:
    """A piece of text and how it looks; `style` is a word of `ANSI`."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Column:
    """A column. On a narrow terminal a flexible one gives way, and after that spare ones go."""

    title: str
    is_right: bool = False
    is_flexible: bool = False
    is_spare: bool = False


@dataclass(frozen=True)
class Table:
    """Columns and rows of cells, before anybody decided how wide the terminal is."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def without_empty_columns(self) -> Table:
        """Leave out columns in which no row says anything."""
        kept = [i for i in range(len(self.columns)) if i == 0 or any(row[i].text for row in self.rows)]
        return self._only(kept)

    def fitted(self, width: int) -> Table:
        """The table without as many columns as it takes to fit: empty ones first, then spare ones from the right."""
        table = self if self._least_width() <= width else self.without_empty_columns()
        while table._least_width() > width:
            spare = [i for i, column in enumerate(table.columns) if column.is_spare]
            if not spare:
                break
            table = table._only([i for i in range(len(table.columns)) if i != spare[-1]])
        return table

    def natural_widths(self) -> list[int]:
        """How wide each column would like to be."""
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
    """The table as lines. With `width`, columns give way so that lines fit."""
    if width is not None:
        width -= len(indent)
        table = table.fitted(width)
    widths = _widths(table, width)
    head = [Cell(column.title, "dim") for column in table.columns]
    lines = (_line(row, table.columns, widths, colour) for row in (head, *table.rows))
    return "\n".join((indent + line).rstrip() for line in lines)


def styled(text: str, style: str, *, colour: bool) -> str:
    """The text in a style, or as it is where there are no colours."""
    code = ANSI[style]
    return f"\x1b[{code}m{text}\x1b[0m" if colour and code and text else text


def pairs_text(pairs: Iterable[tuple[str, str | Cell]], *, colour: bool = False, indent: str = "  ") -> str:
    """Names and values, the values aligned."""
    rows = [(name, value if isinstance(value, Cell) else Cell(value)) for name, value in pairs]
    width = max((display_width(name) for name, _ in rows), default=0)
    lines = (
        f"{indent}{styled(name.ljust(width), 'dim', colour=colour)}{_GAP}{styled(v.text, v.style, colour=colour)}"
        for name, v in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def one_line(text: str) -> str:
    """What a terminal would show of the last line: no escapes, no control characters, the part after the last \\r."""
    shown = [part for part in _ESCAPES.sub("", text).replace("\t", " ").splitlines() if part.strip()]
    last = shown[-1].strip() if shown else ""
    return "".join(c if c.isprintable() else "·" for c in last)


def display_width(text: str) -> int:
    """Columns the text takes: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, width: int) -> str:
    """The text, or its beginning and an ellipsis."""
    if display_width(text) <= width:
        return text
    taken, used = [], 0
    for character in text:
        used += display_width(character)
        if used > width - 1:
            break
        taken.append(character)
    return "".join(taken).rstrip() + "…" if width > 0 else ""


def _widths(table: Table, room: int | None) -> list[int]:
    """How wide each column is; flexible ones share what is missing, each in proportion to what it has."""
    natural = table.natural_widths()
    if room is None:
        return natural
    missing = sum(natural) + len(_GAP) * (len(natural) - 1) - room
    flexible = [i for i, column in enumerate(table.columns) if column.is_flexible]
    for i in sorted(flexible, key=lambda i: -natural[i]):
        given = min(max(0, missing), max(0, natural[i] - _LEAST_FLEXIBLE))
        natural[i] -= given
        missing -= given
    return natural


def _line(row: Sequence[Cell], columns: Sequence[Column], widths: Sequence[int], colour: bool) -> str:
    parts = []
    for cell, column, width in zip(row, columns, widths, strict=True):
        text = cut(cell.text, width)
        space = " " * (width - display_width(text))
        shown = styled(text, cell.style, colour=colour)
        parts.append(space + shown if column.is_right else shown + space)
    return _GAP.join(parts).rstrip()
