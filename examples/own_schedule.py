# SPDX-License-Identifier: Apache-2.0
"""An all-reduce of your own: written as data, proven, priced on a cluster, drawn, run on real processes, trained with.

::

    torchrun --nproc-per-node 4 examples/own_schedule.py --cluster ethernet-25g --draw swing.svg    # or alone

The example is Swing (De Sensi, Bonato, Saam and Hoefler, "Swing: Short-cutting Rings for Higher Bandwidth Allreduce",
NSDI 2024): the ring's bytes in 2 log2(p) steps, between ranks that are nearer on a ring than halving-doubling's are.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import commrt
from commrt import ADD, COPY, Schedule, Step, UsageError
from commrt.cli.draw import draw_schedule
from commrt.cli.mnist import lenet, load
from commrt.collective import all_reduce
from commrt.pricing.cluster import Cluster
from commrt.pricing.simulate import Pricing


@lru_cache  # the same object for the same answer: programs are bound once per object
def swing(p: int) -> Schedule:
    """Sum over all ranks, everywhere, in 2 log2(p) steps; 2(p - 1)/p of the buffer sent per rank; p a power of two."""
    if p & (p - 1):
        raise UsageError(f"Swing pairs all ranks in each step, which {p} ranks cannot: take a power of two")
    rank = np.arange(p)
    ahead = [sum((-2) ** i for i in range(step + 1)) for step in range(p.bit_length() - 1)]  # 1, -1, 3, -5, 11, ...
    exchanges = []  # (the partner [p], the chunks [p, n] that each rank keeps): half as many after each
    kept = rank[:, None]  # after the last exchange, its own
    for far in reversed(ahead):
        partner = np.where(rank % 2, rank - far, rank + far) % p
        exchanges.insert(0, (partner, kept))
        kept = np.hstack([kept, kept[partner]])  # before it, also those that the partner goes on with

    def steps() -> Iterator[Step]:
        for partner, kept in exchanges:  # reduce-scatter: each gives the other what that one keeps
            given = kept[partner]
            yield Step.of(src=rank[:, None], dst=partner[:, None], lo=given, hi=given + 1, combine=ADD)
        for partner, kept in reversed(exchanges):  # all-gather: the same way back
            yield Step.of(src=rank[:, None], dst=partner[:, None], lo=kept, hi=kept + 1, combine=COPY)

    return Schedule("swing", p, p, steps)


@dataclass(frozen=True)
class Swing:
    """The same for `attach`."""

    def schedule(self, step: int, ranks: int) -> Schedule:
        """The same exchange in every step."""
        return swing(ranks)


def look(cluster: Cluster, picture: str | None) -> None:
    """What can be known without running it."""
    print(swing(4))
    for p in (2, 4, 8, 16, 64):
        cost = commrt.prove(swing(p), all_reduce(ranks=p, chunks=p)).traffic  # raises with a counter-example
        print(f"{p:2d} ranks: proven; {cost.steps} steps, {float(cost.bytes_per_rank):.2f} buffers sent per rank")
    # Cluster files know nodes and racks, but not the wires of a ring or torus, for which Swing was made.
    ways = {"ring": commrt.Ring(), "halving-doubling": commrt.HalvingDoubling(), "swing": Swing()}
    for megabytes in (0.01, 1.0, 100.0):
        prices = {name: Pricing(way.schedule(0, 64), cluster).price(1e6 * megabytes) for name, way in ways.items()}
        told = ", ".join(f"{name} {1e3 * price.seconds:.3g} ms" for name, price in prices.items())
        print(f"64 ranks of {cluster.name}, {megabytes:g} MB: {told}")
    if picture:
        draw_schedule(swing(8)).savefig(picture)


def main() -> None:
    """Look at it, run it, train with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="ethernet-25g", help="one that ships with commrt, or a .toml file")
    parser.add_argument("--draw", metavar="FILE", help="a picture (.svg, .png): needs matplotlib")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()

    with commrt.init() as world:
        device = world.device
        if world.rank == 0:
            look(Cluster.named(options.cluster), options.draw)

        values = torch.randn(world.size, 1000, generator=torch.Generator().manual_seed(0))  # a row for each rank
        buffer = values[world.rank].clone()
        world.run(swing(world.size), buffer)
        torch.testing.assert_close(buffer, values.sum(dim=0))
        if world.rank == 0:
            print(f"{world.size} ranks: ran, and every element is the sum")

        train, _ = load()
        model = lenet(seed=0).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        replica = commrt.attach(model, optimizer, Swing())  # proves it once more, for these ranks
        draw = torch.Generator().manual_seed(world.rank)
        for _ in range(options.steps):
            chosen = torch.randint(len(train.digits), (32,), generator=draw)
            optimizer.zero_grad()
            loss = cross_entropy(model(train.pixels[chosen].to(device)), train.digits[chosen].to(device))
            loss.backward()
            optimizer.step()
        equal = replica.replicas_equal()
        if world.rank == 0:
            print(f"trained {options.steps} steps: loss {loss.item():.2f}, replicas bitwise equal: {equal}")


if __name__ == "__main__":
    main()
