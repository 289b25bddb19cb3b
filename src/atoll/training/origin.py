"""Gives a model the agreed weights of the run that its own run starts from (`atoll run --from RUN`)."""

from __future__ import annotations

import logging

import torch

from atoll.context import ReplicaContext
from atoll.errors import InvalidSpec
from atoll.rounds.keys import RoundKeys
from atoll.rounds.origin import read_origin
from atoll.training.model import ModelVector

log = logging.getLogger("atoll.training")
_SHOWN = 5


def load_origin(ctx: ReplicaContext, vector: ModelVector) -> None:
    """Set the live tensors to the weights of the other run, unless the replicas have agreed on weights already."""
    found = read_origin(ctx.store, RoundKeys(ctx.run_id, ctx.launch, ctx.rounds_of))
    if found is None:
        return
    origin, parts = found
    theirs = dict(zip((tensor.name for tensor in origin.tensors), zip(origin.tensors, parts, strict=True), strict=True))
    ours = [tensor for layout in vector.layouts for tensor in layout.tensors]
    problems = [f"{t.name}: run `{origin.run_id}` has no such tensor" for t in ours if t.name not in theirs]
    problems += [f"{name}: this model has no such tensor" for name in theirs if name not in {t.name for t in ours}]
    for tensor in ours:
        if tensor.name in theirs and theirs[tensor.name][0].shape != tensor.shape:
            there = list(theirs[tensor.name][0].shape)
            problems.append(f"{tensor.name}: shape {list(tensor.shape)}, in run `{origin.run_id}` {there}")
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise InvalidSpec(f"the model for the weights of run `{origin.run_id}`", [*problems[:_SHOWN], *more])
    given = []
    for tensor in ours:
        described, part = theirs[tensor.name]
        flat = torch.frombuffer(bytearray(part), dtype=getattr(torch, described.dtype)) if part else torch.empty(0)
        given.append(flat.view(tensor.shape))
    vector.load_live(given)
    log.info("rank %d starts from run %s after %d rounds", ctx.rank, origin.run_id, origin.round_no)
