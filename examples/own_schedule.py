# SPDX-License-Identifier: Apache-2.0
"""Write your own all-reduce as data; prove it, price it on a cluster, draw it, run it on real
processes, train with it.

::

    torchrun --nproc-per-node 4 examples/own_schedule.py --cluster ethernet-25g --draw swing.svg

The example is Swing (De Sensi, Bonato, Saam and Hoefler, "Swing: Short-cutting Rings for Higher
Bandwidth Allreduce", NSDI 2024). It sends as many bytes as the ring in 2 log2(p) steps, between
ranks that are nearer on a ring than those of halving-doubling.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from mnist.dataset import lenet, load
from torch.nn.functional import cross_entropy

import commrt
from commrt import ADD, COPY, Schedule, Step, UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.price import Pricing
from commrt.proof.spec import all_reduce
from commrt.tools.pictures.drawing import draw_schedule


@lru_cache  # commrt binds a program once per object, so return the same one
def swing(p: int) -> Schedule:
    """Return an all-reduce in 2 log2(p) steps, where a rank sends 2(p - 1)/p of the buffer; p is a
    power of two.
    """
    if p & (p - 1):
        raise UsageError(
            f"Swing pairs all ranks in each step, which {p} ranks cannot: take a power of two"
        )
    rank = np.arange(p)
    # 1, -1, 3, -5, 11, ...
    ahead = [sum((-2) ** i for i in range(step + 1)) for step in range(p.bit_length() - 1)]
    # (partner [p], chunks [p, n] that each rank keeps): half as many after each exchange
    exchanges = []
    kept = rank[:, None]  # after the last exchange a rank keeps its own chunk
    for far in reversed(ahead):
        partner = np.where(rank % 2, rank - far, rank + far) % p
        exchanges.insert(0, (partner, kept))
        kept = np.hstack([kept, kept[partner]])  # before an exchange it also has the partner's

    def steps() -> Iterator[Step]:
        # reduce-scatter: each rank sends the chunks that its partner keeps
        for partner, kept in exchanges:
            given = kept[partner]
            yield Step.of(
                src=rank[:, None], dst=partner[:, None], lo=given, hi=given + 1, combine=ADD
            )
        for partner, kept in reversed(exchanges):  # all-gather: the same exchanges in reverse
            yield Step.of(
                src=rank[:, None], dst=partner[:, None], lo=kept, hi=kept + 1, combine=COPY
            )

    return Schedule("swing", p, p, steps)


@dataclass(frozen=True)
class Swing:
    """Swing as an algorithm for `attach`."""

    def schedule(self, step: int, ranks: int) -> Schedule:
        """Return the same schedule in every step."""
        return swing(ranks)


def look(cluster: Cluster, picture: str | None) -> None:
    """Prove, price and draw the schedule, without running it."""
    print(swing(4))
    for p in (2, 4, 8, 16, 64):
        # raises a counter-example if it is wrong
        cost = commrt.prove(swing(p), all_reduce(ranks=p, chunks=p)).traffic
        print(
            f"{p:2d} ranks: proven; {cost.steps} steps, {float(cost.bytes_per_rank):.2f} buffers"
            " sent per rank"
        )
    # Cluster files have nodes and racks, but not the links of a ring or torus, for which Swing was
    # made.
    ways = {"ring": commrt.Ring(), "halving-doubling": commrt.HalvingDoubling(), "swing": Swing()}
    for megabytes in (0.01, 1.0, 100.0):
        prices = {
            name: Pricing(way.schedule(0, 64), cluster).price(1e6 * megabytes)
            for name, way in ways.items()
        }
        told = ", ".join(f"{name} {1e3 * price.seconds:.3g} ms" for name, price in prices.items())
        print(f"64 ranks of {cluster.name}, {megabytes:g} MB: {told}")
    if picture:
        draw_schedule(swing(8)).savefig(picture)


def main() -> None:
    """Prove, price, draw and run the schedule, then train with it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cluster",
        default="ethernet-25g",
        help="a cluster that ships with commrt, or a .toml file",
    )
    parser.add_argument(
        "--draw", metavar="FILE", help="draw a picture (.svg, .png); needs matplotlib"
    )
    parser.add_argument("--steps", type=int, default=50, help="training steps")
    options = parser.parse_args()

    with commrt.init() as world:
        device = world.device
        if world.rank == 0:
            look(Cluster.named(options.cluster), options.draw)

        # a row for each rank
        values = torch.randn(world.size, 1000, generator=torch.Generator().manual_seed(0))
        buffer = values[world.rank].clone()
        world.run(swing(world.size), buffer)
        torch.testing.assert_close(buffer, values.sum(dim=0))
        if world.rank == 0:
            print(f"{world.size} ranks: ran, and every element is the sum")

        train, _ = load()
        model = lenet(seed=0).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        replica = commrt.attach(model, optimizer, Swing())  # proves it again, for these ranks
        draw = torch.Generator().manual_seed(world.rank)
        for _ in range(options.steps):
            chosen = torch.randint(len(train.digits), (32,), generator=draw)
            optimizer.zero_grad()
            loss = cross_entropy(
                model(train.pixels[chosen].to(device)), train.digits[chosen].to(device)
            )
            loss.backward()
            optimizer.step()
        equal = replica.replicas_equal()
        if world.rank == 0:
            print(
                f"trained {options.steps} steps: loss {loss.item():.2f}, replicas bitwise equal:"
                f" {equal}"
            )


if __name__ == "__main__":
    main()
