# SPDX-License-Identifier: Apache-2.0
"""What the links of a running world can do: its ranks pass messages on in circles; through the times a line is laid.

All circles of one kind turn at the same time, since in schedules all ranks are busy too, and share what they share:
network cards, and here perhaps cores; many turns follow each other, since in schedules the slowest of neighbours counts
again and again. So latencies contain what the runtime and the host take for an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import PrefixStore

from commrt.algorithms import halving_doubling
from commrt.cluster import Between, Cluster, Link
from commrt.errors import UsageError
from commrt.executor import bind
from commrt.kernels.reduce import reduce_into
from commrt.program import program
from commrt.schedule import COPY, Schedule, Step
from commrt.transport.meeting import host_identity
from commrt.transport.protocol import Moment
from commrt.world import World

__all__ = ["Circles", "gathered", "layout", "probe", "turn"]

SMALL_NBYTES = 1 << 10
LARGE_NBYTES = (1 << 20, 4 << 20)
SERIES = 5
TURNS = {SMALL_NBYTES: 20, **dict.fromkeys(LARGE_NBYTES, 3)}
"""In a row, by the size of messages."""
Circles = Sequence[Sequence[int]]


class Line(NamedTuple):
    """Time of an exchange, as a line over its bytes."""

    latency_s: float
    bytes_per_s: float


def turn(circles: Circles, ranks: int) -> Schedule:
    """Each rank gives the next of its circle a third of the buffer, all at the same time.

    >>> print(turn([(0, 2), (1, 3, 4)], 5))
    turn: 5 ranks, 3 chunks
      0  copy  0->2 [0:1)  2->0 [2:3)  1->3 [0:1)  3->4 [1:2)  4->1 [2:3)
    """
    src = np.array([rank for circle in circles for rank in circle])
    dst = np.array([rank for circle in circles for rank in (*circle[1:], circle[0])])
    # What a rank sends is not what it receives, also where a circle closes.
    lo = np.array([2 if rank == circle[-1] else place % 2 for circle in circles for place, rank in enumerate(circle)])
    return Schedule("turn", ranks, 3, lambda: iter([Step.of(src, dst, lo, lo + 1, COPY)]))


def layout(hosts: Sequence[str]) -> int:
    """How many ranks there are on each host; raises `UsageError` if there are not as many on each, one after the other.

    >>> layout(["a", "a", "b", "b"])
    2
    """
    per_host = hosts.count(hosts[0])
    runs = [hosts[begin : begin + per_host] for begin in range(0, len(hosts), per_host)]
    firsts = [run[0] for run in runs]
    if len({*firsts}) != len(runs) or any(list(run) != [run[0]] * per_host for run in runs):
        places = [[*dict.fromkeys(hosts)].index(host) for host in hosts]
        raise UsageError(
            f"ranks lie on hosts as {places}: a cluster file has as many on each, and fills one after the other; start "
            "them so"
        )
    return per_host


def probe(world: World) -> Cluster:
    """Measure `world`; collective, some seconds, and the same result on every rank."""
    if world.size < 2:
        raise UsageError("one rank has no links: start two or more, with a launcher or --workers")
    per_host = layout(_hosts(world))
    across = [list(range(place, world.size, per_host)) for place in range(per_host)]
    inside = [list(range(first, first + per_host)) for first in range(0, world.size, per_host)]
    within = _line(world, inside) if per_host > 1 else None
    alone = _line(world, across[:1]) if world.size > per_host else None
    shared = _line(world, across) if alone is not None and per_host > 1 else alone
    return _cluster(world, per_host, within, alone, shared)


def _cluster(world: World, per_host: int, within: Line | None, alone: Line | None, shared: Line | None) -> Cluster:
    """Where there is no link of a kind, nothing goes through it, and it is as the other."""
    far, near = alone or within, within or alone
    if far is None or near is None:
        raise UsageError("no two ranks were found")
    together_bytes_per_s = per_host * shared.bytes_per_s if shared is not None else far.bytes_per_s
    nics = max(round(together_bytes_per_s / far.bytes_per_s), 1)
    adding_s = _mean(world, _adding_s_per_byte())
    return Cluster(
        name="probed",
        about=f"Measured by commrt probe: {world.size} ranks, {per_host} per host, {world.transport.kind}.",
        gpus_per_node=per_host,
        within=Link(1e6 * near.latency_s, near.bytes_per_s / 1e9),
        between=Between(1e6 * (shared or far).latency_s, together_bytes_per_s / nics / 1e9, nics),
        nodes=None if alone is not None else 1,
        reduce_gbytes_per_s=1e-9 / adding_s,
    )


def _line(world: World, circles: Circles) -> Line:
    """Through the times of small and large messages, the slowest rank's."""
    sizes = [SMALL_NBYTES, *LARGE_NBYTES]
    times_s = [_time_s(world, circles, nbytes) for nbytes in sizes]
    slope = (times_s[-1] - times_s[1]) / (sizes[-1] - sizes[1])
    slope = slope if slope > 0 else times_s[-1] / sizes[-1]
    return Line(max(times_s[0] - slope * sizes[0], 0.0), 1 / slope)


def _time_s(world: World, circles: Circles, nbytes: int) -> float:
    """Of a turn among others; of the slowest rank the median."""
    buffer, turns = torch.zeros(3 * nbytes // 4), TURNS[nbytes]
    bound = bind(program(turn(circles, world.size), world.rank), buffer, world.transport)

    def often() -> float:
        begin_s = perf_counter()
        for number in range(turns):
            bound.run(Moment(number, "probe"))
        return (perf_counter() - begin_s) / turns

    times_s = []
    for number in range(SERIES + 1):
        world.agree(f"probe {nbytes} {number}")
        times_s.append(world.lane.submit(often).result())
    mine = any(world.rank in circle for circle in circles)
    return max(gathered(world, median(times_s[1:]) if mine else 0.0))


def gathered(world: World, value: float) -> list[float]:
    """Of all ranks."""
    values = torch.zeros(world.size, dtype=torch.float64)
    values[world.rank] = value
    world.run(halving_doubling.all_reduce(world.size), values)
    return values.tolist()


def _mean(world: World, value: float) -> float:
    return sum(gathered(world, value)) / world.size


def _adding_s_per_byte() -> float:
    own, received = torch.zeros(1 << 18), torch.zeros(1 << 18)
    return _best_s(lambda: reduce_into(own, [received])) / received.nbytes


def _best_s(work: Callable[[], Tensor | None]) -> float:
    times_s = []
    for _ in range(10):
        begin_s = perf_counter()
        work()
        times_s.append(perf_counter() - begin_s)
    return median(times_s)


def _hosts(world: World) -> list[str]:
    shelf = PrefixStore("probe", world.store)
    shelf.set(str(world.rank), host_identity() or f"rank {world.rank}")
    world.agree("hosts")
    return [shelf.get(str(rank)).decode() for rank in range(world.size)]
