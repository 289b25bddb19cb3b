"""How fast N replicas average an array through a store, against gloo, the naive exchange, bare sockets and a model.

All of it interleaved in one run; ratios are what counts. Every result is checked, so a wrong one fails the benchmark.

    python benchmarks/exchange.py [--replicas 2,4,8] [--mib 64,256] [--repeat 9] [--only walls,memory,cpu,latency]

Our arms have `Tuning(keep_freed_memory=True)`; `--default-allocator` leaves that off.

Files, and what the server has, are in a tmpfs with large pages, mounted for this run only; that takes root. New files
in a tmpfs as it comes, with pages of 4 KiB, have a row of their own.

The rows over HTTP need nginx with Lua, on Debian: `apt-get install nginx-light libnginx-mod-http-ndk
libnginx-mod-http-lua`. Without it they are left out.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from wire.distance import latency_rows  # noqa: E402
from wire.pages import large_pages  # noqa: E402
from wire.report import MARKDOWN_HEAD, Row, machine  # noqa: E402
from wire.server import INSTALL, WireServer, missing_parts  # noqa: E402
from wire.sockets import cpu_rows  # noqa: E402
from wire.space import memory_rows  # noqa: E402
from wire.walls import wall_rows  # noqa: E402

SMALLEST_MIB = 64


@dataclass(frozen=True)
class Selection:
    replicas: list[int]
    mib: list[int]
    repeat: int
    only: list[str]
    folder: Path
    plain: Path | None
    """A folder without large pages, if the other one has them."""
    is_wired: bool
    tuning: dict[str, Any]


def walls(asked: Selection) -> Iterator[Row]:
    """Wall, CPU, bytes and requests of every way to average, for each N and size."""
    for replicas in asked.replicas:
        for mib in asked.mib:
            with _scratch(asked) as (folder, server), _small(asked) as plain:
                yield from wall_rows(folder, plain, server, replicas, mib, asked.repeat, asked.tuning)


def memory(asked: Selection) -> Iterator[Row]:
    """Peak of the resident memory over the two arrays, at two sizes."""
    replicas = min(max(asked.replicas), 4)
    for mib in sorted({min(asked.mib), max(asked.mib)}):
        with _scratch(asked) as (folder, server):
            yield from memory_rows(folder, server, replicas, mib, asked.tuning)


def cpu(asked: Selection) -> Iterator[Row]:
    """Client CPU per GB of one stream against a bare socket."""
    for body_mib, count in ((64, 4), (16, 16), (4, 64)) if max(asked.mib) >= 64 else ((1, 2),):
        with _scratch(asked) as (_, server):
            if server is None:
                return
            yield from cpu_rows(server, body_mib, count, asked.repeat)


def latency(asked: Selection) -> Iterator[Row]:
    """A store that is 100 ms away and gives 100 MB/s to each connection."""
    if asked.is_wired:
        replicas, mib = min(max(asked.replicas), 4), min(min(asked.mib), 64)
        yield from latency_rows(asked.folder, replicas, mib, asked.repeat, asked.tuning)


SECTIONS: dict[str, Callable[[Selection], Iterator[Row]]] = {
    "walls": walls, "memory": memory, "cpu": cpu, "latency": latency,
}  # fmt: skip


class _scratch:  # noqa: N801 - used like a function
    """A fresh folder in memory, and a server in it if there can be one."""

    def __init__(self, asked: Selection) -> None:
        self._asked, self._open = asked, ExitStack()

    def __enter__(self) -> tuple[Path, WireServer | None]:
        folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(dir=self._asked.folder)))
        if not self._asked.is_wired:
            return folder, None
        return folder, self._open.enter_context(WireServer(folder / "server"))

    def __exit__(self, *error: object) -> None:
        self._open.close()


@contextmanager
def _small(asked: Selection) -> Iterator[Path | None]:
    """A fresh folder in memory without large pages, if the other one has them."""
    if asked.plain is None:
        yield None
        return
    with tempfile.TemporaryDirectory(dir=asked.plain) as folder:
        yield Path(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=_numbers, default=[2, 4, 8])
    parser.add_argument("--mib", type=_numbers, default=[64])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS))
    parser.add_argument(
        "--folder", type=Path, default=Path("/dev/shm"), help="where files are; in memory, or it is slow"
    )
    parser.add_argument(
        "--default-allocator", action="store_true", help="as `Tuning()`, without `keep_freed_memory=True`"
    )
    parser.add_argument("--markdown", type=Path, help="write the rows here as a table")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    given = parser.parse_args()
    if unknown := set(given.only) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and folders go also then
    missing = missing_parts()
    if missing:
        print(f"{missing}, so rows over HTTP are left out; to have them: {INSTALL}")
    if min(given.mib) < SMALLEST_MIB:
        print(f"What must be is for arrays from {SMALLEST_MIB} MiB on; smaller ones take as long as their requests do.")
    print(machine(), flush=True)
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=given.folder) as folder,
        large_pages(large := Path(folder) / "large") as trouble,
    ):
        if trouble:
            print(f"{trouble}, so files have the pages of {given.folder}", flush=True)
        plain = Path(folder) if trouble is None else None
        tuning = {"keep_freed_memory": not given.default_allocator}
        asked = Selection(given.replicas, given.mib, given.repeat, given.only, large, plain, missing is None, tuning)
        for name in given.only:
            for row in SECTIONS[name](asked):
                rows.append(row)
                print(row.line(), flush=True)
                _write(rows, given.json, given.markdown)  # after every row: a long run may be cut short
    return 0


def _write(rows: list[Row], as_json: Path | None, as_markdown: Path | None) -> None:
    if as_markdown:
        as_markdown.write_text("\n".join([MARKDOWN_HEAD, *(row.markdown() for row in rows)]) + "\n")
    if as_json:
        text = {"machine": machine(), "command": sys.argv, "rows": [row.to_json() for row in rows]}
        as_json.write_text(json.dumps(text, indent=1))


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 2,4,8") from exc


if __name__ == "__main__":
    sys.exit(main())
