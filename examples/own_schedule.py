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
from commrt import ADD, COPY, Schedule, ScheduleError, Step
from commrt.cli.draw import draw_schedule
from commrt.cli.mnist import lenet, load
from commrt.cluster import Cluster
from commrt.collective import all_reduce
from commrt.simulate import Pricing


@lru_cache  # the same object for the same answer: programs are bound once per object
def swing(p: int) -> Schedule:
    """Sum over all ranks, everywhere, in 2 log2(p) steps; 2(p - 1)/p of the buffer sent per rank; p a power of two."""
    if p & (p - 1):
        raise ScheduleError(f"Swing pairs all ranks in each step, which {p} ranks cannot: take a power of two")
    rank = np.arange(p)
    ahead = [sum((-2) ** i for i in range(step + 1)) for step in range(p.bit_length() - 1)]  # 1, -1, 3, -5, 11, ...
    partner = [np.where(rank % 2, rank - far, rank + far) % p for far in ahead]
    mine = [rank[:, None]]  # mine[s][r]: the chunks that rank r still has to do with in step s; at last only its own
    for other in reversed(partner):
        mine.insert(0, np.hstack([mine[0], mine[0][other]]))  # it keeps the first half, and the partner the second
    exchanges = list(zip(partner, mine[1:], strict=True))

    def steps() -> Iterator[Step]:
        for other, kept in exchanges:  # reduce-scatter: give the partner what it keeps
            yield Step.of(*flat(rank[:, None], other[:, None], kept[other], kept[other] + 1), ADD)
        for other, kept in reversed(exchanges):  # all-gather: the same way back
            yield Step.of(*flat(rank[:, None], other[:, None], kept, kept + 1), COPY)

    return Schedule("swing", p, p, steps)


def flat(*columns: np.ndarray) -> list[np.ndarray]:
    """One transfer per entry of `columns`, broadcast against each other."""
    return [column.ravel() for column in np.broadcast_arrays(*columns)]


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
    for nbytes in (1e4, 1e6, 1e8):
        ways = {"ring": commrt.Ring(), "halving-doubling": commrt.HalvingDoubling(), "swing": Swing()}
        prices = {name: Pricing(way.schedule(0, 64), cluster).price(nbytes).seconds for name, way in ways.items()}
        told = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in prices.items())
        print(f"64 ranks of {cluster.name}, {nbytes:.0e} bytes: {told}")
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
        if torch.cuda.is_available():
            torch.cuda.set_device(world.local_rank)
            device = torch.device("cuda", world.local_rank)
        else:
            torch.set_num_threads(1)  # ranks of one machine share its cores
            device = torch.device("cpu")
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
