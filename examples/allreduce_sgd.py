"""Data-parallel training in plain torch: every replica has its own data, and gradients are averaged through a store.

    python examples/allreduce_sgd.py                  # three replicas on this machine
    python examples/allreduce_sgd.py --every 20       # the same with DiLoCo: they meet every 20 steps only

`ObjectStoreAllReduce` is all it takes from Atoll inside the loop; how the replicas were started does not matter to it.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional

import atoll
from atoll.training.allreduce import ObjectStoreAllReduce, make_diloco_outer_loop


def examples(rank: int, step: int, count: int = 32) -> tuple[Tensor, Tensor]:
    """Points on two spirals, and which spiral each is on. Every rank draws others."""
    generator = torch.Generator().manual_seed(1_000_000 * rank + step)
    spiral = torch.randint(0, 2, (count,), generator=generator)
    angle = 6 * torch.rand(count, generator=generator)
    turned = angle + torch.pi * spiral
    points = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 3
    return points + 0.05 * torch.randn(count, 2, generator=generator), spiral


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def train(ctx: atoll.ReplicaContext, *, steps: int = 100, every: int = 1, lr: float = 0.01) -> dict:
    torch.set_num_threads(1)
    torch.manual_seed(ctx.rank)  # replicas begin differently on purpose
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    with ObjectStoreAllReduce(ctx.store, ctx.rank, ctx.world_size, round_id=ctx.run_id) as ar:
        outer = make_diloco_outer_loop(model, ar) if every > 1 else None
        if outer is None:
            ar.broadcast(list(model.parameters()), "start")
        else:
            outer.agree()
        for step in range(1, steps + 1):
            points, spiral = examples(ctx.rank, step)
            loss = functional.cross_entropy(model(points), spiral)
            optimizer.zero_grad()
            loss.backward()
            if outer is None:
                ar.allreduce_coalesced([parameter.grad for parameter in model.parameters()], "gradients")
            optimizer.step()
            if outer is not None and step % every == 0:
                outer()
            ctx.log(round_no=step // every, rounds_total=max(1, steps // every), loss=loss.item())
        error_rate = 1 - accuracy(model)
        mean_error = ar.allreduce(torch.tensor(error_rate), "error").item()
        counters = ar.counters

    state = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return {
        "error": mean_error,
        "weights": hashlib.sha256(state).hexdigest()[:12],
        "requests": counters.requests.total(),
        "megabytes": (counters.bytes_up + counters.bytes_down) / 1e6,
    }


def accuracy(model: nn.Module) -> float:
    points, spiral = examples(rank=999, step=0, count=1000)
    with torch.no_grad():
        return (model(points).argmax(dim=1) == spiral).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=1, help="optimizer steps between two meetings")
    parser.add_argument("--store", help="a folder or a bucket; a temporary folder if left out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args = {"steps": options.steps, "every": options.every}
        run = atoll.launch(f"{__file__}:train", replicas=options.replicas, store=options.store or folder, args=args)
        run.wait(600)
        found = run.result().raise_for_failures().values
    for rank, one in enumerate(found):
        print(f"replica {rank}: error {one['error']:.3f}, weights {one['weights']}, "
              f"{one['requests']} requests, {one['megabytes']:.1f} MB")  # fmt: skip
    assert len({one["weights"] for one in found}) == 1, "replicas differ"


if __name__ == "__main__":
    main()
