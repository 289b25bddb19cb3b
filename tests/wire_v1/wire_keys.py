"""Every key of the fixture taken apart and built again by the code that owns key names."""

from __future__ import annotations

from wire_means import ENDED, NAME, SPACES, WORLD_SIZE

from atoll.keys import RunKeys, bundle, index_key
from atoll.rounds.keys import RoundKeys
from atoll.rounds.named.keys import NamedKeys


def canonical(key: str, run_id: str = "") -> str:
    """The key as today's code spells it; an error if it cannot read it."""
    if key.startswith("allreduce/"):
        return _named(key)
    if key.startswith("bundles/"):
        return bundle(key.removeprefix("bundles/").removesuffix(".tar.gz"))
    if key.startswith("index/"):
        return next(index_key(run) for run in ("launched", "failed run", "cancelled") if index_key(run) == key)
    if key.startswith(RoundKeys(run_id).prefix):
        return _of_rounds(key, RoundKeys(run_id))
    return _of_run(key, RunKeys(run_id))


def _of_run(key: str, keys: RunKeys) -> str:
    kind, *rest = key.removeprefix(keys.prefix).split("/")
    match kind:
        case "run.json":
            return keys.run()
        case "launch":
            return {"intent.json": keys.intent, "handle.json": keys.handle, "cancelled.json": keys.cancelled}[rest[0]]()
        case "outcome":
            return keys.outcome(*keys.parse_outcome(key))
        case "result":
            return keys.result(*map(int, rest[0].split(".")[:2]))
        case "beat":
            return keys.beat(int(rest[0].split(".")[0]))
        case "checkpoints":
            return keys.checkpoint(*keys.parse_checkpoint(key))
        case "logs":
            return keys.log_chunk(*keys.parse_log_chunk(key))
    raise ValueError(key)


def _of_rounds(key: str, keys: RoundKeys) -> str:
    kind, *rest = key.removeprefix(keys.prefix).split("/")
    match kind:
        case "agreement.json":
            return keys.agreement()
        case "claims":
            rank, incarnation, has_left = keys.parse_claim(key)
            return (keys.departure if has_left else keys.claim)(rank, incarnation)
        case "rounds":
            return _of_a_round(key, keys, *rest)
        case "commits":
            return keys.commit(keys.parse_commit(key))
        case "snapshots":
            return keys.snapshot(keys.parse_snapshot(key))
        case "blobs":
            return keys.blob(*keys.parse_blob(key), int(rest[1]))
        case "acks":
            return keys.ack(int(rest[0].split(".")[0]))
        case "events":
            return keys.events(*keys.parse_events(key))
        case "metrics":
            return keys.metrics(*keys.parse_metrics(key))
    raise ValueError(key)


def _of_a_round(key: str, keys: RoundKeys, round_no: str, kind: str, *rest: str) -> str:
    match kind:
        case "offer":
            return keys.offer(*keys.parse_offer(key))
        case "update":
            rank, incarnation = rest[0].split(".")
            return keys.update(int(round_no), int(rank), int(incarnation), int(rest[1]))
        case "mean":
            return keys.mean(int(round_no), rest[0], int(rest[1]))
    raise ValueError(key)


def _named(key: str) -> str:
    every = [NamedKeys(space, WORLD_SIZE) for space in (*SPACES, ENDED)]
    [keys] = [keys for keys in every if key.startswith(keys.prefix)]
    if key.startswith(keys.seats_prefix()):
        session, rank, has_left = keys.parse_seat(key)
        if rank is None:
            return keys.floor(session)
        return (keys.goodbye if has_left else keys.seat)(session, rank)
    session, rank = keys.parse_part(key)
    nonce, generation = key.split("/")[4].partition("-")[2], int(key.split("/")[6].split(".")[0])
    return keys.part(session, nonce, NAME, generation, rank)
