# SPDX-License-Identifier: Apache-2.0
"""What the links of a running world can do: its ranks pass messages on in circles; through the times a line is laid.

All circles of one kind turn at the same time, since in schedules all ranks are busy too, and share what they share:
network cards, and here perhaps cores; many turns follow each other, since in schedules the slowest of neighbours counts
again and again. So latencies contain what the runtime and the host take for an exchange. Where there are GPUs, messages
go from one to another through NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed import PrefixStore

from commrt.algorithms import halving_doubling
from commrt.errors import UsageError
from commrt.kernels.dispatch import adding
from commrt.pricing.cluster import Between, Cluster, Link
from commrt.program import program
from commrt.runtime.executor import bind
from commrt.runtime.world import World
from commrt.schedule import COPY, Schedule, Step
from commrt.transport.meeting import host_identity
from commrt.transport.protocol import Moment

__all__ = ["Circles", "fitted", "gathered", "layout", "probe", "turn"]

TURNS = {1 << 10: 20, 1 << 14: 20, 1 << 16: 20, 1 << 18: 6, 1 << 20: 3, 1 << 22: 3}
"""How many in a row, by the size of messages."""
SERIES = 5
"""Each with all sizes, so that what disturbs for a while disturbs them all alike."""
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
    device = _device(world)
    adding_s, way = _mean(world, _adding_s_per_byte(device)), "NCCL" if device.type == "cuda" else world.transport.kind
    return Cluster(
        name="probed",
        about=f"Measured by commrt probe: {world.size} ranks, {per_host} per host, {way}.",
        gpus_per_node=per_host,
        within=Link(1e6 * near.latency_s, near.bytes_per_s / 1e9),
        between=Between(1e6 * (shared or far).latency_s, together_bytes_per_s / nics / 1e9, nics),
        nodes=None if alone is not None else 1,
        reduce_gbytes_per_s=1e-9 / adding_s,
    )


def _line(world: World, circles: Circles) -> Line:
    """Through the times of messages of all sizes, the slowest rank's medians."""
    watches = {nbytes: _watch(world, circles, nbytes) for nbytes in TURNS}
    times_s: dict[int, list[float]] = {nbytes: [] for nbytes in TURNS}
    for number in range(SERIES + 1):
        for nbytes, watch in watches.items():
            world.agree(f"probe {nbytes} {number}")
            times_s[nbytes].append(world.lane.submit(watch).result())
    turns = any(world.rank in circle for circle in circles)
    mine_s = [median(series[1:]) if turns else 0.0 for series in times_s.values()]
    return fitted(list(TURNS), [max(gathered(world, each)) for each in mine_s])


def _watch(world: World, circles: Circles, nbytes: int) -> Callable[[], float]:
    """Seconds of a turn among others."""
    buffer = world.transport.allocate(3 * nbytes // 4, torch.float32, _device(world))
    bound = bind(program(turn(circles, world.size), world.rank), buffer, world.transport)
    turns = TURNS[nbytes]

    def often() -> float:
        begin_s = perf_counter()
        for number in range(turns):
            bound.run(Moment(number, "probe"))
        world.transport.wait()
        return (perf_counter() - begin_s) / turns

    return often


def fitted(nbytes: Sequence[int], times_s: Sequence[float]) -> Line:
    """The line that misses the times by the least, each in parts of itself, so that short messages count as well.

    >>> fitted([1_000, 2_000, 1_000_000], [0.002, 0.003, 1.001])
    Line(latency_s=0.001, bytes_per_s=1000000.0)
    """
    sizes, times = np.array(nbytes, float), np.array(times_s)
    parts = np.stack([1 / times, sizes / times], axis=1)
    latency_s, s_per_byte = np.linalg.lstsq(parts, np.ones(len(times)))[0].tolist()
    if latency_s < 0 or s_per_byte <= 0:
        latency_s, s_per_byte = 0.0, float(times[-1] / sizes[-1])
    return Line(float(f"{latency_s:.6g}"), float(f"{1 / s_per_byte:.6g}"))


def gathered(world: World, value: float) -> list[float]:
    """Of all ranks."""
    values = torch.zeros(world.size, dtype=torch.float64)
    values[world.rank] = value
    world.run(halving_doubling.all_reduce(world.size), values)
    return values.tolist()


def _mean(world: World, value: float) -> float:
    return sum(gathered(world, value)) / world.size


def _device(world: World) -> torch.device:
    """Where gradients would lie: on this rank's GPU, where there are GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    world.connect(device)
    return device


def _adding_s_per_byte(device: torch.device) -> float:
    own, received = (torch.zeros(1 << 18, device=device) for _ in range(2))
    add, times_s = adding(own, [received]), []
    for _ in range(10):
        begin_s = perf_counter()
        add()
        own[0].item()  # waits for a GPU
        times_s.append(perf_counter() - begin_s)
    return median(times_s) / received.nbytes


def _hosts(world: World) -> list[str]:
    shelf = PrefixStore("probe", world.store)
    shelf.set(str(world.rank), host_identity() or f"rank {world.rank}")
    world.agree("hosts")
    return [shelf.get(str(rank)).decode() for rank in range(world.size)]
