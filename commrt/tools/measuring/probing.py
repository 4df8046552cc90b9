# SPDX-License-Identifier: Apache-2.0
"""Measure for ``commrt probe`` what a cluster file says: links of each kind, adding, quantizing.

Collective, between other exchanges of the world: the communication thread runs the timed rounds,
and its caller waits. Adding and quantizing are timed on the calling thread. Where there are GPUs,
the world is connected to them, and messages go from one GPU to another through NCCL. `probed` makes
the world, in forked processes if no launcher started several.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed import PrefixStore

from commrt.algorithms import direct, halving_doubling
from commrt.errors import UsageError
from commrt.kernels.dispatch import adding
from commrt.kernels.quantize_dispatch import adding_quantized, dequantizing, quantizing
from commrt.pricing.cluster import Between, Cluster, Link
from commrt.program import program
from commrt.quantizer import Int4
from commrt.runtime.executor import bind
from commrt.runtime.init import init
from commrt.runtime.world import World
from commrt.schedule import COPY, Schedule, Step
from commrt.store.addresses import host_identity
from commrt.store.launcher import Launch
from commrt.store.records import gather
from commrt.testing.workers import run_workers
from commrt.transport.protocol import Tag

FEW_NBYTES = 1 << 10
ROUNDS = {1 << 10: 20, 1 << 14: 20, 1 << 16: 20, 1 << 18: 6, 1 << 20: 3, 1 << 22: 3}
"""The number of rounds in a row, by the bytes of a message."""
SERIES = 5
"""Each series has all sizes, so that a passing disturbance affects all of them alike."""
TIMED_NUMEL = 1 << 18
"""Values that are added, and quantized, to see how long that takes."""
Rings = Sequence[Sequence[int]]


class Line(NamedTuple):
    """The time of an exchange as a line over its bytes."""

    latency_s: float
    bytes_per_s: float


def ring_shift(rings: Rings, ranks: int) -> Schedule:
    """Return a schedule in which each rank sends a third of the buffer to the next of its ring.

    >>> print(ring_shift([(0, 2), (1, 3, 4)], 5))
    ring_shift: 5 ranks, 3 chunks
      0  copy  0->2 [0:1)  2->0 [2:3)  1->3 [0:1)  3->4 [1:2)  4->1 [2:3)
    """
    src = np.array([rank for ring in rings for rank in ring])
    dst = np.array([rank for ring in rings for rank in (*ring[1:], ring[0])])
    # A rank must not send the chunk that it receives; the last one of an odd ring is both the
    # sender and the receiver.
    lo = np.array(
        [2 if rank == ring[-1] else place % 2 for ring in rings for place, rank in enumerate(ring)]
    )
    return Schedule("ring_shift", ranks, 3, lambda: iter([Step.of(src, dst, lo, lo + 1, COPY)]))


def ranks_per_host(hosts: Sequence[str]) -> int:
    """Return the number of ranks on each host, given the host of each rank.

    Raises `UsageError` unless all hosts have as many, and the ranks fill one host after the other.

    >>> [ranks_per_host(list(hosts)) for hosts in ("aaaa", "aabb", "abc")]
    [4, 2, 1]
    """
    per_host = hosts.count(hosts[0])
    runs = [hosts[begin : begin + per_host] for begin in range(0, len(hosts), per_host)]
    firsts = [run[0] for run in runs]
    if len({*firsts}) != len(runs) or any(list(run) != [run[0]] * per_host for run in runs):
        places = [[*dict.fromkeys(hosts)].index(host) for host in hosts]
        raise UsageError(
            f"ranks lie on hosts as {places}: a cluster file has as many on each, and fills one"
            " after the other; start them so"
        )
    return per_host


def probed(launch: Launch | None, workers: int, timeout_s: float) -> Cluster:
    """Return what the ranks of `launch` measure; without several, what `workers` local ones do.

    Makes a world for it, and closes it.
    """

    def measured() -> Cluster:
        with init(timeout_s) as world:
            return probe(world)

    return (
        measured() if launch is not None and launch.size > 1 else run_workers(workers, measured)[0]
    )


def probe(world: World) -> Cluster:
    """Measure the links of `world`, of two ranks or more.

    Collective; takes seconds, and all ranks return the same.
    """
    per_host = ranks_per_host(_hosts(world))
    across = [list(range(place, world.size, per_host)) for place in range(per_host)]
    inside = [list(range(first, first + per_host)) for first in range(0, world.size, per_host)]
    within = _measure(world, inside) if per_host > 1 else None
    pair = (
        _measure(world, [inside[0][:2]])
        if per_host > 2 and "shared" in world.transport.kind
        else None
    )
    alone = _measure(world, across[:1]) if world.size > per_host else None
    shared = _measure(world, across) if alone is not None and per_host > 1 else alone
    # A kind of link that does not exist is never used: let it be like the other one.
    far = cast("Line", alone or within)
    near = cast("Line", within or alone)
    link = Link(1e6 * near.latency_s, near.bytes_per_s / 1e9)
    if pair is not None:  # ranks that share memory share its bandwidth
        link = Link(
            link.latency_us,
            max(pair.bytes_per_s, near.bytes_per_s) / 1e9,
            per_host * near.bytes_per_s / 1e9,
        )
    return _measured_cluster(world, per_host, link, far, shared)


def _measured_cluster(
    world: World, per_host: int, within: Link, far: Line, shared: Line | None
) -> Cluster:
    """Measure what else the file says, and return all; the link between hosts is `far`, or `shared`
    if all ranks use it at once.
    """
    of_host_bytes_per_s = per_host * shared.bytes_per_s if shared is not None else far.bytes_per_s
    nics = max(round(of_host_bytes_per_s / far.bytes_per_s), 1)
    device = _connect_device(world)
    add_s_per_byte = sum(all_gather(world, _add_s_per_byte(device))) / world.size
    code_s_per_byte = sum(all_gather(world, _code_s_per_byte(device))) / world.size
    way = "NCCL" if device.type == "cuda" else world.transport.kind
    return Cluster(
        name="probed",
        about=f"Measured by commrt probe: {world.size} ranks, {per_host} per host, {way}.",
        gpus_per_node=per_host,
        within=Link(
            _rounded(within.latency_us),
            _rounded(within.gbytes_per_s),
            None if within.bus_gbytes_per_s is None else _rounded(within.bus_gbytes_per_s),
        ),
        between=Between(
            _rounded(1e6 * (shared or far).latency_s),
            _rounded(of_host_bytes_per_s / nics / 1e9),
            nics,
        ),
        nodes=1 if world.size == per_host else None,
        message_us=_rounded(_message_us(world)),
        reduce_gbytes_per_s=_rounded(1e-9 / add_s_per_byte),
        code_gbytes_per_s=_rounded(1e-9 / code_s_per_byte),
    )


def _rounded(value: float) -> float:
    """Return `value` with the three digits that a measurement tells."""
    return float(f"{value:.3g}")


def _measure(world: World, rings: Rings) -> Line:
    """Fit a line through the times of messages of all sizes: the medians of the slowest rank.

    All rings over one kind of link run at the same time, since in schedules all ranks are busy too,
    and share network cards and cores. Many rounds follow each other, since in schedules the slowest
    neighbour counts again and again. So the latency contains what the runtime and the host take for
    an exchange.
    """
    timers = {nbytes: _timer(world, ring_shift(rings, world.size), nbytes) for nbytes in ROUNDS}
    times_s: dict[int, list[float]] = {nbytes: [] for nbytes in ROUNDS}
    for number in range(SERIES + 1):
        for nbytes, timer in timers.items():
            world.agree(f"probe {nbytes} {number}")
            times_s[nbytes].append(world.comm_thread.submit(timer).result())
    takes_part = any(world.rank in ring for ring in rings)
    mine_s = [median(series[1:]) if takes_part else 0.0 for series in times_s.values()]
    return fit_line(list(ROUNDS), [max(all_gather(world, each)) for each in mine_s])


def _timer(world: World, schedule: Schedule, nbytes: int) -> Callable[[], float]:
    """Return a task for the communication thread: seconds of a round with chunks of `nbytes`."""
    buffer = world.transport.allocate(
        schedule.chunks * nbytes // 4, torch.float32, _connect_device(world)
    )
    bound = bind(program(schedule, world.rank), buffer, world.transport)
    rounds = ROUNDS[nbytes]

    def timed() -> float:
        begin_s = perf_counter()
        for number in range(rounds):
            bound.run(Tag(number, "probe"))
        world.transport.wait()
        return (perf_counter() - begin_s) / rounds

    return timed


def _message_us(world: World) -> float:
    """Return the time of a further message in a step, if all ranks exchange with all others."""
    if world.size < 3:
        return 0.0
    ring = [list(range(world.size))]
    alone = _timer(world, ring_shift(ring, world.size), FEW_NBYTES)
    all_at_once = _timer(world, direct.all_gather(world.size), FEW_NBYTES)
    excess_s = []
    for number in range(SERIES + 1):
        world.agree(f"probe messages {number}")
        excess_s.append(
            world.comm_thread.submit(all_at_once).result()
            - world.comm_thread.submit(alone).result()
        )
    slowest_s = max(all_gather(world, median(excess_s[1:])))
    return max(1e6 * slowest_s / (2 * world.size - 4), 0.0)


def fit_line(nbytes: Sequence[int], times_s: Sequence[float]) -> Line:
    """Return the line with the least relative errors: short messages count as much as long ones.

    >>> fit_line([1_000, 2_000, 1_000_000], [0.002, 0.003, 1.001])
    Line(latency_s=0.001, bytes_per_s=1000000.0)
    """
    sizes = np.array(nbytes, float)
    times = np.array(times_s)
    parts = np.stack([1 / times, sizes / times], axis=1)
    latency_s, s_per_byte = np.linalg.lstsq(parts, np.ones(len(times)))[0].tolist()
    if latency_s < 0 or s_per_byte <= 0:
        latency_s = 0.0
        s_per_byte = float(times[-1] / sizes[-1])
    return Line(float(f"{latency_s:.6g}"), float(f"{1 / s_per_byte:.6g}"))


def all_gather(world: World, value: float) -> list[float]:
    """Return the values of all ranks. Collective."""
    values = torch.zeros(world.size, dtype=torch.float64)
    values[world.rank] = value
    world.run(halving_doubling.all_reduce(world.size), values)
    return values.tolist()


def _connect_device(world: World) -> torch.device:
    """Connect and return this rank's GPU, or the CPU where there is none: where gradients lie."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    world.connect(device)
    return device


def _add_s_per_byte(device: torch.device) -> float:
    own, received = (torch.zeros(TIMED_NUMEL, device=device) for _ in range(2))
    return _typical_s(adding(own, [own, received]), own) / received.nbytes


def _code_s_per_byte(device: torch.device) -> float:
    """Return the mean time to quantize, add what codes stand for, and dequantize, per fp32 byte."""
    quantizer = Int4()
    values = torch.randn(TIMED_NUMEL, device=device)
    codes = torch.zeros(quantizer.nbytes(TIMED_NUMEL), dtype=torch.uint8, device=device)
    quantize = quantizing(values, codes, quantizer, torch.zeros_like(values))
    passes = (
        (lambda: quantize(0)),
        adding_quantized(values, [codes], quantizer),
        dequantizing(codes, values, quantizer),
    )
    return sum(_typical_s(each, values) for each in passes) / len(passes) / values.nbytes


def _typical_s(work: Callable[[], object], out: Tensor) -> float:
    """Return the median time of `work`, which writes to `out`."""
    times_s = []
    for _ in range(10):
        begin_s = perf_counter()
        work()
        out[0].item()  # waits for a GPU
        times_s.append(perf_counter() - begin_s)
    return median(times_s)


def _hosts(world: World) -> list[str]:
    here = host_identity() or f"rank {world.rank}"
    store = PrefixStore("probe", world.store)
    everyone = range(world.size)
    return [*gather(store, world.rank, everyone, here, world.timeout_s, json.loads).values()]
