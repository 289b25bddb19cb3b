"""The time and cost of rounds through an object store, computed before a run starts. Pure: nothing is measured.

    estimate(Setting(params=8e9, replicas=16, inner_steps=100, step_time_s=2.0, bandwidth_bytes_s=25e9 / 8))

The model: the network of a replica and the latency of the store are the limits. With updates of S bytes, B bytes a
second and L seconds for a request, fetching whole updates takes 2 L + (N-1) S/B; scatter-reduce takes
4 L + 2 (N-1)/N S/B if everything overlaps, and S/B more if one phase waits for the other. Encoding, summing and slow
replicas add to this. Transfer between a bucket and machines of its region is free; a few stored rounds cost little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil
from typing import Any

from atoll.errors import InvalidSpec
from atoll.rounds import codecs
from atoll.rounds.tuning import CHUNK_MULTIPLE, Grid, Tuning, default_chunk

AS_OF = "2026-11"
MODES = ("auto", "whole", "scatter")
CONNECTION_BYTES_S = 100e6
"""The approximate throughput of one connection to a cloud store."""
MOST_REPLICAS = 1024
_MOST_PARAMS = 1e16
_OFFER_BYTES, _CHECK_BYTES, _COMMIT_BYTES, _SEAT_BYTES = 600, 19, 500, 200
_INLINE_BYTES, _LIST_FROM = Tuning().inline_bytes, Tuning().list_from


@dataclass(frozen=True)
class Prices:
    """One service: the price of one request of each kind, in dollars."""

    name: str
    put: float
    get: float
    list: float
    """DELETE is free everywhere."""
    puts_per_s: int
    """Writes a second for one prefix before the service has adapted to more."""
    source: str

    def dollars(self, puts: float, gets: float, lists: float) -> float:
        return puts * self.put + gets * self.get + lists * self.list


SERVICES = (
    Prices(
        "S3", 5e-6, 4e-7, 5e-6, 3_500,
        "Standard, us-east-1 (docs): $0.005 per 1 000 PUT or LIST, $0.0004 per 1 000 GET; 3 500 writes/s on a prefix",
    ),
    Prices(
        "GCS", 5e-6, 4e-7, 5e-6, 1_000,
        "Standard, one region (from memory): $0.005 per 1 000 class A, $0.0004 class B; 1 000 writes/s at first (docs)",
    ),
    Prices(
        "Azure", 5.5e-6, 4.4e-7, 5.5e-6, 20_000,
        "Blob hot LRS (from memory): about $0.055 per 10 000 writes or lists, $0.0044 reads; 20 000 requests/s",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """The inputs of the estimate. Sizes are in elements and bytes, times in seconds."""

    params: float
    replicas: int
    inner_steps: int = 100
    step_time_s: float = 1.0
    bandwidth_bytes_s: float = 25e9 / 8
    """Of one replica, each way."""
    codec: str = codecs.DEFAULT_CODEC
    mean_codec: str | None = None
    latency_s: float = 0.1
    """One small request to the store."""
    chunk: int | None = None
    """Elements."""
    mode: str = "auto"
    connections: int | None = None
    """None: as many as fill the network."""
    fragments: int = 1
    delay: int = 0
    """Optimizer steps that continue while a fragment is exchanged."""

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise InvalidSpec("estimate", problems)
        codecs.row_of(self.codec)
        codecs.row_of(self.means)

    @property
    def effective_bytes_s(self) -> float:
        """The throughput of the network, or of the connections if that is less."""
        most = float("inf") if self.connections is None else self.connections * CONNECTION_BYTES_S
        return min(self.bandwidth_bytes_s, most)

    @property
    def means(self) -> str:
        """The codec of published means: the given one, or the one that training chooses."""
        return self.mean_codec or codecs.recommended_mean(self.codec)

    @cached_property
    def grid(self) -> Grid:
        """The chunks of one fragment."""
        size = ceil(self.params / self.fragments)
        return Grid(size, self.chunk or default_chunk(size))


@dataclass(frozen=True)
class Exchange:
    """One exchange for one replica. Records are small objects: offers, commit, claims."""

    mode: str
    update_bytes: int
    mean_bytes: int
    chunks: int
    bytes_up: float
    bytes_down: float
    bulk_puts: float
    bulk_gets: float
    record_puts: float
    record_gets: float
    record_lists: float
    pipelined_s: float
    """If everything overlaps, as in Atoll."""
    phased_s: float
    """If uploading, averaging and fetching wait for each other."""

    @property
    def requests(self) -> float:
        return self.bulk_puts + self.bulk_gets + self.record_puts + self.record_gets + self.record_lists

    def dollars(self, prices: Prices, replicas: int, *, bulk_only: bool = False) -> float:
        """The price of the requests of all replicas."""
        kept = 0.0 if bulk_only else 1.0
        puts, gets = self.bulk_puts + kept * self.record_puts, self.bulk_gets + kept * self.record_gets
        return replicas * prices.dollars(puts, gets, kept * self.record_lists)


@dataclass(frozen=True)
class Throughput:
    """The times of a round in training."""

    compute_s: float
    """Inner steps from one exchange to the next."""
    exchange_s: float
    exposed_s: float
    """The part of the exchange in which training waits."""

    @property
    def round_s(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def exposed_share(self) -> float:
        return self.exposed_s / self.round_s if self.round_s else 0.0

    @property
    def hidden_share(self) -> float:
        return 1.0 - self.exposed_s / self.exchange_s if self.exchange_s else 1.0


@dataclass(frozen=True)
class Estimate:
    """The estimate. One round is one exchange, of the whole model or of one fragment."""

    setting: Setting
    exchange: Exchange
    pace: Throughput
    """With the given setting: streaming if there are fragments or a delay."""
    blocking: Throughput
    """The same rounds if training waits for each."""
    notes: tuple[str, ...]

    @property
    def rounds_per_hour(self) -> float:
        return 3600 / self.pace.round_s

    def dollars(self, prices: Prices) -> tuple[float, float]:
        """The price for all replicas: of one round, and of an hour."""
        per_round = self.exchange.dollars(prices, self.setting.replicas)
        return per_round, per_round * self.rounds_per_hour

    def to_json(self) -> dict[str, Any]:
        paces = {
            name: {**asdict(pace), "round_s": pace.round_s, "exposed_share": pace.exposed_share,
                   "hidden_share": pace.hidden_share}
            for name, pace in (("pace", self.pace), ("blocking", self.blocking))
        }  # fmt: skip
        costs = {
            p.name: {"per_round": self.dollars(p)[0], "per_hour": self.dollars(p)[1], "source": p.source}
            for p in SERVICES
        }
        exchange = {**asdict(self.exchange), "requests": self.exchange.requests}
        return {
            "setting": asdict(self.setting),
            "exchange": exchange,
            **paces,
            "dollars": costs,
            "prices_as_of": AS_OF,
            "notes": list(self.notes),
        }


def estimate(setting: Setting) -> Estimate:
    """The time and cost of rounds with this setting."""
    exchange = planned_exchange(setting)
    stride_s = setting.inner_steps // setting.fragments * setting.step_time_s
    took = exchange.pipelined_s
    blocking = Throughput(stride_s, took, took)
    pace = Throughput(stride_s, took, max(0.0, took - setting.delay * setting.step_time_s))
    return Estimate(setting, exchange, pace, blocking, tuple(_notes(setting, exchange, pace)))


def planned_exchange(setting: Setting) -> Exchange:
    """The exchange of one fragment: in the given mode, or in the faster one; whole updates if both are equal."""
    sizes = encoded_bytes(setting.grid, setting.codec), encoded_bytes(setting.grid, setting.means)
    if setting.mode != "auto":
        return exchange_of(setting, setting.mode, *sizes)
    if sizes[0] <= _INLINE_BYTES or setting.replicas == 2:
        return exchange_of(setting, "whole", *sizes)
    return min((exchange_of(setting, mode, *sizes) for mode in ("whole", "scatter")), key=lambda e: e.pipelined_s)


def exchange_of(setting: Setting, mode: str, update_bytes: int, mean_bytes: int) -> Exchange:
    """The model of one exchange of one vector whose encoded sizes are known."""
    n, chunks, rate = setting.replicas, len(setting.grid), setting.effective_bytes_s
    others = (n - 1) / n
    if mode == "whole":
        trips, up, down = 2, float(update_bytes), float((n - 1) * update_bytes)
        puts, gets = float(chunks), float((n - 1) * chunks)
    else:
        trips, up, down = 4, others * update_bytes + mean_bytes / n, others * (update_bytes + mean_bytes)
        puts, gets = float(chunks), 2 * others * chunks
    if mode == "whole" and update_bytes <= _INLINE_BYTES:
        puts = gets = 0.0  # the update is inside the offer
    before_s = update_bytes / rate
    offer, commit = _OFFER_BYTES + _CHECK_BYTES * chunks, _COMMIT_BYTES + _SEAT_BYTES * n
    return Exchange(
        mode=mode,
        update_bytes=update_bytes,
        mean_bytes=mean_bytes,
        chunks=chunks,
        bytes_up=up + offer + commit / n,
        bytes_down=down + (n - 1) * offer + commit,
        bulk_puts=puts,
        bulk_gets=gets,
        record_puts=2 + 1 / n,  # an offer, the record of the round, and one commit for all
        record_gets=n - 1 + 4.0,  # offers; the commit, the claim of the rank, and one read before the commit exists
        record_lists=1 / n + (2.0 if n > _LIST_FROM else 0.0),
        pipelined_s=trips * setting.latency_s + down / rate,
        phased_s=trips * setting.latency_s + before_s + down / rate,
    )


def encoded_bytes(grid: Grid, name: str) -> int:
    """The encoded size of a vector, the sum over its chunks."""
    if not len(grid):
        return 0
    whole, last = (codecs.encoded_bytes(name, count) for count in (grid.chunk, grid.count(len(grid) - 1)))
    return whole * (len(grid) - 1) + last


def _notes(setting: Setting, exchange: Exchange, pace: Throughput) -> Iterator[str]:
    needed = ceil(setting.bandwidth_bytes_s / CONNECTION_BYTES_S)
    if setting.connections is not None and setting.connections < needed:
        yield f"{setting.connections} connections do not fill the network: at 100 MB/s each it takes {needed}"
    per_s = setting.replicas * exchange.bulk_puts / exchange.pipelined_s
    slow = [f"{p.name} {p.puts_per_s}" for p in SERVICES if per_s > p.puts_per_s]
    if slow:
        yield (
            f"all replicas together write {per_s:.0f} objects a second; at first a service takes fewer for one prefix "
            f"({', '.join(slow)}): expect retries while it adapts, or use larger chunks"
        )
    if setting.replicas - 1 > 4 * needed:
        trips = ceil((setting.replicas - 1) / max(32, needed))
        yield f"reading {setting.replicas - 1} offers takes about {trips * setting.latency_s:.1f} s more"
    stride_s = setting.inner_steps // setting.fragments * setting.step_time_s
    if setting.delay and pace.exchange_s > stride_s:
        yield "an exchange takes longer than the inner steps between two of them: a part of it is always exposed"


def _problems(s: Setting) -> Iterator[str]:
    if not 1 <= s.params <= _MOST_PARAMS:
        yield f"params={s.params:g}: a number from 1 to {_MOST_PARAMS:g}"
    if not 2 <= s.replicas <= MOST_REPLICAS:
        yield f"replicas={s.replicas}: from 2 to {MOST_REPLICAS}"
    if s.mode not in MODES:
        yield f"mode={s.mode}: one of {', '.join(MODES)}"
    for name, least in (("step_time_s", 0.0), ("latency_s", 0.0)):
        if not getattr(s, name) >= least:
            yield f"{name}={getattr(s, name):g}: not below {least:g}"
    if not s.bandwidth_bytes_s > 0:
        yield f"bandwidth_bytes_s={s.bandwidth_bytes_s:g}: above 0"
    if s.connections is not None and s.connections < 1:
        yield f"connections={s.connections}: from 1"
    if s.chunk is not None and (s.chunk < 1 or s.chunk % CHUNK_MULTIPLE):
        bytes_ = f"{4 * s.chunk} bytes, not a multiple of {4 * CHUNK_MULTIPLE}"
        yield f"chunk={s.chunk}: a multiple of {CHUNK_MULTIPLE} values; these are {bytes_}"
    yield from _stream_problems(s)


def _stream_problems(s: Setting) -> Iterator[str]:
    if s.inner_steps < 1 or s.fragments < 1:
        yield f"inner_steps={s.inner_steps}, fragments={s.fragments}: whole numbers from 1"
    elif s.inner_steps % s.fragments:
        yield f"fragments={s.fragments}: inner_steps={s.inner_steps} is not a multiple of it"
    elif not 0 <= s.delay <= s.inner_steps // s.fragments:
        yield f"delay={s.delay}: from 0 to inner_steps / fragments = {s.inner_steps // s.fragments}"
