"""Wall, CPU, bytes and requests of one exchange: ours over each store, gloo, and the naive one; in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from wire.arms import can_recycle
from wire.fitting import groups
from wire.memory import available_bytes
from wire.report import Row, median, ratio
from wire.server import Traffic, WireServer
from wire.team import Plan, Round, Team, alternate

AGAINST_GLOO: dict[str, tuple[float, float | None]] = {
    "file": (1.0, None),
    "small": (1.0, None),
    "recycled": (0.7, 0.5),
    "wire": (3.0, 2.2),
}
NAMES = {
    "file": "file, new files",
    "small": "file, new files, 4 KiB pages",
    "recycled": "file, recycled files",
    "wire": "HTTP",
    "naive": "the naive exchange",
    "gloo": "gloo",
}
NAIVE_WALL: dict[int, tuple[float, float]] = {2: (2.5, 3), 4: (2.5, 4), 8: (5, 8)}
NAIVE_CPU = {2: 4.0, 4: 5.0, 8: 8.0}
BYTES_MUST = 1.005


def wall_rows(
    folder: Path,
    plain: Path | None,
    server: WireServer | None,
    replicas: int,
    mib: int,
    repeat: int,
    tuning: dict[str, Any],
) -> Iterator[Row]:
    endpoints = {"wire": server.uri("walls")} if server else {}
    for arms in _groups(plain, server, replicas, mib):
        with ExitStack() as stack:
            # Folders of their own: what one group leaves is gone before the next one begins.
            mine = Path(stack.enter_context(TemporaryDirectory(dir=folder)))
            small = Path(stack.enter_context(TemporaryDirectory(dir=plain))) if plain else None
            yield from _rows(Plan(replicas, mib << 18, arms, mine, endpoints, tuning, plain=small), server, repeat)


def _rows(plan: Plan, server: WireServer | None, repeat: int) -> Iterator[Row]:
    replicas, mib = plan.replicas, plan.elements >> 18
    # The naive exchange has processes of its own: `keep_freed_memory` of our arms would speed it up too.
    plans = [replace(plan, arms=tuple(arm for arm in plan.arms if arm != "naive"))]
    plans += [replace(plan, arms=("naive",))] if "naive" in plan.arms else []
    with ExitStack() as stack:
        teams = [stack.enter_context(Team(each)) for each in plans]
        seen = alternate({arm: mine for team in teams for arm, mine in team.warm_up().items()}, repeat)
        at_server: Traffic | None = None
        if server and "wire" in plan.arms:
            server.traffic()
            seen["wire"].append(teams[0].round("wire"))
            at_server = server.traffic()
    for kind in AGAINST_GLOO:
        if kind in seen:
            must, aim = AGAINST_GLOO[kind]
            yield _against(f"{NAMES[kind]} / gloo", seen[kind], seen["gloo"], replicas, mib, must, aim)
    if "naive" in seen:
        yield from _naive_rows(seen, replicas, mib)
    for kind in ("file", "wire"):
        if kind in seen:
            yield from _byte_rows(NAMES[kind], seen[kind][-1], replicas, mib)
    if at_server is not None:
        yield from _server_rows(at_server, replicas, mib)


def _groups(plain: Path | None, server: WireServer | None, replicas: int, mib: int) -> list[tuple[str, ...]]:
    """The ways to average that are compared side by side."""
    arms = ["gloo", "file", *(["small"] if plain else []), *(["recycled"] if can_recycle() else [])]
    arms += ["wire"] if server else []
    if server and find_spec("boto3") is None:
        print("boto3 is not installed, so the naive exchange is left out", flush=True)
    elif server:
        arms.append("naive")
    found = groups(tuple(arms), replicas, mib << 20, available_bytes())
    for arm in arms:
        if not any(arm in group for group in found):
            print(f"N={replicas} {mib} MiB: {NAMES[arm]} does not fit in memory, left out", flush=True)
    if len(found) > 1:
        print(f"N={replicas} {mib} MiB: not all fit in memory, so each is compared with gloo alone", flush=True)
    return found


def _against(
    what: str, ours: list[Round], theirs: list[Round], replicas: int, mib: int, must: float, aim: float | None
) -> Row:
    mine, other = [r.wall_s for r in ours], [r.wall_s for r in theirs]
    cpu = ratio([r.cpu_s for r in ours], [r.cpu_s for r in theirs])
    note = f"{median(mine):.3f} / {median(other):.3f} s, fastest of each {min(mine) / min(other):.2f}, CPU {cpu:.2f}"
    return Row(what, replicas, mib, ratio(mine, other), must, aim, note=note, samples={"ours": mine, "theirs": other})


def _naive_rows(seen: dict[str, list[Round]], replicas: int, mib: int) -> Iterator[Row]:
    for what, limits, pick in (
        ("wall", NAIVE_WALL.get(replicas), lambda r: r.wall_s),
        ("CPU", (NAIVE_CPU[replicas], None) if replicas in NAIVE_CPU else None, lambda r: r.cpu_s),
    ):
        naive, ours = [pick(r) for r in seen["naive"]], [pick(r) for r in seen["wire"]]
        must, aim = limits or (None, None)
        note = f"{median(naive):.3f} / {median(ours):.3f} s"
        samples = {"ours": ours, "theirs": naive}
        yield Row(f"naive / HTTP, {what}", replicas, mib, ratio(naive, ours), must, aim, True, note, samples)


def _byte_rows(name: str, seen: Round, replicas: int, mib: int) -> Iterator[Row]:
    """Bytes over the ideal and requests, of the replica that had most."""
    facts = [turn.facts for turn in seen.turns]
    size = mib << 20
    up, down = max(f["up"] for f in facts), max(f["down"] for f in facts)
    note = f"{facts[0]['mode']}, {facts[0]['chunks']} chunks of {facts[0]['chunk_bytes'] / 2**20:g} MiB"
    yield Row(f"{name}: bytes up / S", replicas, mib, up / size, BYTES_MUST, note=note)
    yield Row(f"{name}: bytes down / ideal", replicas, mib, down / ideal_down(replicas, size), BYTES_MUST)
    most = max(facts, key=lambda f: sum(f["requests"].values()) - f["misses"])
    bound = request_bound(replicas, most["chunks"])
    text = ", ".join(f"{count} {verb}" for verb, count in sorted(most["requests"].items()))
    note = f"{text}, less {most['misses']} GETs that missed; bound {bound}; {most['retries']} retries"
    found = sum(most["requests"].values()) - most["misses"]
    yield Row(f"{name}: requests / bound", replicas, mib, found / bound, 1.0, note=note)
    misses = median([f["misses"] for f in facts])
    yield Row(f"{name}: GETs that missed", replicas, mib, misses, note=_phases(facts))


def _server_rows(seen: Traffic, replicas: int, mib: int) -> Iterator[Row]:
    """The same bytes as the server counted them, over all replicas; with HTTP headers in the note."""
    size = mib << 20
    ideal = ideal_down(replicas, size)
    headers = f"with HTTP headers {seen.whole_up / replicas / size:.4f}"
    yield Row("HTTP: up / S at the server", replicas, mib, seen.body_up / replicas / size, BYTES_MUST, note=headers)
    headers = f"with HTTP headers {seen.whole_down / replicas / ideal:.4f}"
    yield Row(
        "HTTP: down / ideal at the server", replicas, mib, seen.body_down / replicas / ideal, BYTES_MUST, note=headers
    )


def ideal_down(replicas: int, size: int) -> float:
    return 2 * (replicas - 1) / replicas * size


def request_bound(replicas: int, chunks: int) -> int:
    """The most requests of one replica, besides GETs that find nothing yet.

    Each chunk up once and a share of the means; contributions to that share and the other means down; the offer, the
    others' offers, the commit (looked for, made, read back), the claim (looked for, listed), and the events.
    """
    share = -(-chunks // replicas)
    return chunks + share + (replicas - 1) * share + (chunks - chunks // replicas) + 2 * replicas + 8


def _phases(facts: list[dict[str, Any]]) -> str:
    names = sorted({name for f in facts for name in f["seconds"]})
    return "seconds by phase: " + ", ".join(
        f"{name} {median([f['seconds'].get(name, 0.0) for f in facts]):.3f}" for name in names
    )
