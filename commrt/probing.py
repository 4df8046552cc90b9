# SPDX-License-Identifier: Apache-2.0
"""What the links of a running world can do: its ranks swap messages, and a line is laid through the times.

All pairs of one kind swap at the same time, since in schedules all ranks are busy too, and share what they share:
network cards, and here perhaps cores. So latencies contain what the runtime and the host take for an exchange.
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

__all__ = ["Pairs", "gathered", "layout", "probe", "swaps"]

SMALL_NBYTES = 1 << 10
LARGE_NBYTES = (1 << 20, 4 << 20)
REPEATS = {SMALL_NBYTES: 30, **dict.fromkeys(LARGE_NBYTES, 5)}
Pairs = Sequence[tuple[int, int]]


class Line(NamedTuple):
    """Time of an exchange, as a line over its bytes."""

    latency_s: float
    bytes_per_s: float


def swaps(pairs: Pairs, ranks: int) -> Schedule:
    """Two ranks of each pair give each other half of the buffer, all at the same time.

    >>> print(swaps([(0, 2)], 3))
    swap: 3 ranks, 2 chunks
      0  copy  0->2 [0:1)  2->0 [1:2)
    """
    first, second = (np.array([pair[end] for pair in pairs]) for end in (0, 1))
    src, dst = np.concatenate((first, second)), np.concatenate((second, first))
    lo = np.repeat([0, 1], len(pairs))
    return Schedule("swap", ranks, 2, lambda: iter([Step.of(src, dst, lo, lo + 1, COPY)]))


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
    within = _line(world, _pairs(world.size, per_host, 1)) if per_host > 1 else None
    alone = _line(world, _pairs(world.size, per_host, per_host, [0])) if world.size > per_host else None
    shared = _line(world, _pairs(world.size, per_host, per_host)) if alone is not None and per_host > 1 else alone
    return _cluster(world, per_host, within, alone, shared)


def _cluster(world: World, per_host: int, within: Line | None, alone: Line | None, shared: Line | None) -> Cluster:
    """Where there is no link of a kind, nothing goes through it, and it is as the other."""
    far, near = alone or within, within or alone
    if far is None or near is None:
        raise UsageError("no pair of ranks was found")
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


def _pairs(ranks: int, per_host: int, distance: int, places: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Ranks so far apart, each once; of each host those at `places`."""
    group = 2 * distance
    firsts = [rank for rank in range(ranks) if rank % group < distance and rank + distance < ranks]
    inside = distance < per_host
    chosen = [rank for rank in firsts if places is None or rank % per_host in places]
    return [(rank, rank + distance) for rank in chosen if not inside or rank // per_host == (rank + 1) // per_host]


def _line(world: World, pairs: Pairs) -> Line:
    """Through the times of small and large messages, the slowest pair's."""
    sizes = [SMALL_NBYTES, *LARGE_NBYTES]
    times_s = [_time_s(world, pairs, nbytes) for nbytes in sizes]
    slope = (times_s[-1] - times_s[1]) / (sizes[-1] - sizes[1])
    slope = slope if slope > 0 else times_s[-1] / sizes[-1]
    return Line(max(times_s[0] - slope * sizes[0], 0.0), 1 / slope)


def _time_s(world: World, pairs: Pairs, nbytes: int) -> float:
    buffer = torch.zeros(2 * nbytes // 4)
    bound = bind(program(swaps(pairs, world.size), world.rank), buffer, world.transport)
    mine = _swaps(pairs, world.rank)

    def often() -> list[float]:
        times_s = []
        for number in range(REPEATS[nbytes] + 2):
            begin_s = perf_counter()
            bound.run(Moment(number, "probe"))
            times_s.append(perf_counter() - begin_s)
        return times_s[2:]

    world.agree(f"probe {nbytes}")
    times_s = world.lane.submit(often).result()
    return max(gathered(world, median(times_s) if mine else 0.0))


def _swaps(pairs: Pairs, rank: int) -> bool:
    """True if it swaps."""
    return any(rank in pair for pair in pairs)


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
