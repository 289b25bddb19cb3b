"""What is in a bundle, in words: the manifest printed before an upload, and what makes a folder too big. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SHOWN = 5
_DOMINATES = 0.9


@dataclass(frozen=True)
class Manifest:
    """What a bundle holds. `text()` is for people."""

    digest: str
    count: int
    """Files and links."""
    size_bytes: int
    """Of the content; `packed_bytes` is what is sent."""
    packed_bytes: int
    largest: tuple[tuple[str, int], ...]
    """The five largest files and their sizes, largest first."""
    source: str = "walk"
    """`git` if git named the files, `walk` if the ignore files alone decided."""
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """A few lines to print before the upload."""
        by = "git" if self.source == "git" else "the ignore files"
        sizes = f"{size_text(self.size_bytes)}, {size_text(self.packed_bytes)} packed"
        head = f"bundle {self.digest[:12]}: {count_text(self.count)}, {sizes}, chosen by {by}"
        rows = [f"  {size_text(size):>10}  {printable(name)}" for name, size in self.largest]
        return "\n".join([head, *rows, *(f"  note: {printable(note)}" for note in self.notes)])


@dataclass(frozen=True)
class Share:
    """A file or folder and what it adds to the bundle; the name of a folder ends with `/`."""

    name: str
    size_bytes: int
    count: int

    def text(self) -> str:
        files = f"  ({count_text(self.count)})" if self.name.endswith("/") else ""
        return f"{size_text(self.size_bytes):>10}  {printable(self.name)}{files}"


def largest_files(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The five largest, largest first; equal ones by name."""
    return tuple(sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN])


def biggest_shares(sizes: Mapping[str, int], *, by_count: bool = False) -> list[Share]:
    """The five files or folders to leave out first, none inside another.

    A folder stands for what is in it, unless one thing in it is nearly all of it: then that thing is named.
    """
    shares, inside = _shares(sizes)

    def weight(share: Share) -> int:
        return share.count if by_count else share.size_bytes

    def heaviest(names: Sequence[str]) -> list[Share]:
        return sorted((shares[name] for name in names), key=lambda share: (-weight(share), share.name))

    def narrowed(share: Share) -> Share:
        while share.name in inside:
            largest = heaviest(inside[share.name])[0]
            if weight(largest) < _DOMINATES * weight(share):
                break
            share = largest
        return share

    return [narrowed(share) for share in heaviest(inside[""])[:_SHOWN]]


def _shares(sizes: Mapping[str, int]) -> tuple[dict[str, Share], dict[str, list[str]]]:
    """Every file and folder by name, and what is directly inside each folder; the root is the empty name."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    inside: dict[str, list[str]] = defaultdict(list)
    for path, size in sizes.items():
        parts = path.split("/")
        above = ""
        for name in [*("/".join(parts[:depth]) + "/" for depth in range(1, len(parts))), path]:
            if name not in totals:
                inside[above].append(name)
            totals[name][0] += size
            totals[name][1] += 1
            above = name
    return {name: Share(name, *total) for name, total in totals.items()}, dict(inside)


def size_text(size_bytes: int) -> str:
    """Such as `512 B` or `1.5 MiB`."""
    power = min((max(size_bytes, 1).bit_length() - 1) // 10, 4)
    return f"{size_bytes / 1024**power:.1f} {'KMGT'[power - 1]}iB" if power else f"{size_bytes} B"


def count_text(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """The text with control characters and broken unicode written out, so that a file name cannot garble a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
