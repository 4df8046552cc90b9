# SPDX-License-Identifier: Apache-2.0
"""Measure the host's time for a step where nothing has to be moved: ``python bench/host_times.py --gossip 8 256 1024``.

One rank trains a small model, as one of so many ranks, over a transport on which each message that it receives is the
one that it sends. What is left is commrt's own work. Cells are times of a thread's CPU per step, in microseconds: the
median, and in brackets the 90th percentile and the longest. `attach` is the wall time of one call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from statistics import median, quantiles
from time import perf_counter, thread_time
from unittest import mock

import torch
from null_transport import NullTransport
from torch import nn
from torch.distributed import HashStore

import commrt
from commrt.runtime.consistency import ConsistencyCheck
from commrt.runtime.world import World
from commrt.schedule import Algorithm
from commrt.transport.protocol import Exchange, P2PGroup, Tag, capture_nothing, share_nothing, zeros

RANK = 3
TENSORS, NUMEL, BUCKETS = 16, 64, 2
WARMUP, STEPS = 12, 240
GOSSIPS: dict[str, Callable[[], Algorithm]] = {
    "gossip": commrt.Gossip,
    "gossip, rotate=False": lambda: commrt.Gossip(rotate=False),
    "gossip, within=4": lambda: commrt.Gossip(within=4),
    "gossip of gradients": lambda: commrt.Gossip(payload="gradients"),
}


class Mirror(NullTransport):
    """A transport that receives what it sends, so that headers agree; it moves nothing between ranks."""

    timeout_s = 60.0
    can_move_receives = False
    allocate_shared = staticmethod(zeros)
    capture = staticmethod(capture_nothing)
    share = staticmethod(share_nothing)

    def bind(self, group: P2PGroup) -> Exchange:
        """Return an exchange that copies sends to receives of the same size."""
        pairs = [
            (mine.data, theirs.data)
            for mine, theirs in zip(group.sends, group.recvs, strict=False)
            if mine.data.shape == theirs.data.shape
        ]

        def run(_: Tag) -> None:
            for source, target in pairs:
                target.copy_(source)

        return run


def agreed(_: object, claim: object, ranks: Iterable[int], *__: object, **___: object) -> dict[int, object]:
    """Return that all of `ranks` claim what this rank does, in place of `ConsistencyCheck._gather`."""
    return dict.fromkeys(ranks, claim)


def alone(ranks: int) -> World:
    """Return the world of one of `ranks` ranks."""
    return World(Mirror(RANK, ranks), HashStore(), RANK)


def model_of() -> nn.ParameterList:
    """Return parameters that travel in `BUCKETS` buckets."""
    return nn.ParameterList([nn.Parameter(torch.zeros(NUMEL)) for _ in range(TENSORS)])


class Loop:
    """A training loop, with commrt if there is an algorithm."""

    def __init__(self, world: World, algorithm: Algorithm | None) -> None:
        self.world, self.model = world, model_of()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.attach_s = 0.0
        if algorithm is not None:
            begin_s = perf_counter()
            cap_mb = 4 * TENSORS * NUMEL / BUCKETS / 2**20 * 1.02
            commrt.attach(self.model, self.optimizer, algorithm, world=world, bucket_cap_mb=cap_mb)
            self.attach_s = perf_counter() - begin_s

    def step(self) -> tuple[float, float]:
        """Return the seconds of CPU that a step took on this thread and on that of communication."""
        loss, before_s = torch.stack([param.sum() for param in self.model]).sum(), self._on_comm_thread()
        begin_s = thread_time()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end_s = thread_time()
        return end_s - begin_s, self._on_comm_thread() - before_s

    def _on_comm_thread(self) -> float:
        return self.world.comm_thread.submit(thread_time).result()


def cell(times_s: Sequence[float], less_s: float) -> str:
    """Return median, 90th percentile and maximum of `times_s` in us, each without `less_s`."""
    found = (median(times_s), quantiles(times_s, n=10)[-1], max(times_s))
    middle, high, most = (f"{1e6 * max(each - less_s, 0.0):.0f}" for each in found)
    return f"{middle} ({high}, {most})"


def rows_of(algorithms: dict[str, Callable[[], Algorithm]], counts: Sequence[int]) -> list[list[str]]:
    """Return a row for each algorithm and rank count."""
    found = []
    for name, make in algorithms.items():
        for ranks in counts:
            with mock.patch.object(ConsistencyCheck, "_gather", agreed), alone(ranks) as world:
                plain, ours = Loop(world, None), Loop(world, make())
                for loop in WARMUP * (plain, ours):
                    loop.step()
                pairs = [(plain.step(), ours.step()) for _ in range(STEPS)]
                here, there = ([[pair[kind][thread] for pair in pairs] for kind in (0, 1)] for thread in (0, 1))
                training, communication = cell(here[1], median(here[0])), cell(there[1], median(there[0]))
                found.append([name, str(ranks), f"{1e3 * ours.attach_s:.1f} ms", training, communication])
    return found


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return aligned columns."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *body)
    )


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gossip", type=int, nargs="+", metavar="RANKS", help="a step of gossip among so many ranks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head = ("step of", "ranks", "attach", "training thread, us", "communication thread, us")
    print(table(head, rows_of(GOSSIPS, options.gossip or ())))


if __name__ == "__main__":
    main()
