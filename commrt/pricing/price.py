# SPDX-License-Identifier: Apache-2.0
"""The price of a schedule on a cluster: when each rank is done, given which links messages share.

A transfer begins when both of its ranks have finished the step before. It takes the latency of its
path and the time of the busiest rank's further messages, and of further NCCL groups. Then it takes
as long as the busiest link of the path needs for all bytes of the same step. A rank has finished a
step when all that it sends and receives in it has arrived, and all that is to be added has been
added. Pure arithmetic: nothing runs, and nothing changes once it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from commrt.errors import UsageError
from commrt.nccl_groups import JOINED, group_count, nccl_groups
from commrt.pricing.cluster import Cluster
from commrt.schedule import ADD, MIX, IntArray, Schedule, Step, require_valid

Seconds = NDArray[np.float64]
"""[ranks], since the first rank began."""


class Price(NamedTuple):
    """The time that an exchange takes."""

    finish_s: Seconds
    steps: int

    @property
    def seconds(self) -> float:
        """Time until the last rank has finished."""
        return float(self.finish_s.max())


class Pricing:
    """The prices of one schedule on one cluster, for any number of bytes on the wire.

    A rank adds up at the cluster's speed, or takes `add_s_per_byte` for what it receives. Cost:
    O(transfers) once for each different step; then O(ranks) for each step and price.
    """

    def __init__(
        self, schedule: Schedule, cluster: Cluster, add_s_per_byte: float | None = None
    ) -> None:
        cluster.require_capacity(schedule.ranks)
        self.schedule = schedule
        self.cluster = cluster
        add_s = cluster.add_s(1.0) if add_s_per_byte is None else add_s_per_byte
        runs = (list(group) for _, group in groupby(_patterns(schedule, cluster, add_s), key=id))
        self.runs = [(run[0], len(run)) for run in runs]
        """Patterns, and how many steps have each before the next one begins."""

    def price(self, nbytes: float, start_s: ArrayLike = 0.0) -> Price:
        """Price a buffer of `nbytes` per rank; ranks begin at `start_s` ([ranks] or one number)."""
        if not 0 <= nbytes < inf:
            raise UsageError(f"{nbytes:g} bytes cannot be exchanged: give the size of the buffer")
        clock_s = np.array(
            np.broadcast_to(np.asarray(start_s, dtype=np.float64), self.schedule.ranks)
        )
        for pattern, times in self.runs:
            clock_s = pattern.play(clock_s, nbytes / self.schedule.chunks, times)
        return Price(clock_s, self.steps)

    @property
    def steps(self) -> int:
        """Number of steps of the schedule."""
        return sum(times for _, times in self.runs)


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """What ranks send each other in a step; many steps of a schedule have the same pattern."""

    src: IntArray
    """[transfers] the sender."""
    dst: IntArray
    """[transfers] the receiver."""
    latency_s: Seconds
    """[transfers] latency of the path, with what further messages take."""
    s_per_byte: Seconds
    """[transfers] time that the path's busiest link needs for all it carries, per byte of a chunk.
    """
    adding_s_per_byte: Seconds
    """[ranks] time to add all that a rank receives, per byte of a chunk."""
    adds: bool
    """True if any rank adds or mixes."""
    most_chunks: float
    """Chunks of the largest message."""
    groups_s: dict[float, float]
    """Time of further NCCL groups, by the most bytes of a message."""

    def play(self, clock_s: Seconds, chunk_nbytes: float, times: int) -> Seconds:
        """Return when each rank has finished `times` such steps, if it was ready at `clock_s`.

        Once a step takes all ranks equally long, every later one does: a common delay of all begins
        delays all ends.
        """
        for played in range(1, times + 1):
            after_s = self._step(clock_s, chunk_nbytes)
            took_s = after_s - clock_s
            if np.ptp(took_s) <= 1e-12 * took_s[0]:
                return after_s + (times - played) * took_s
            clock_s = after_s
        return clock_s

    def _groups_s(self, chunk_nbytes: float) -> float:
        return next(
            s for most, s in self.groups_s.items() if self.most_chunks * chunk_nbytes <= most
        )

    def _step(self, clock_s: Seconds, chunk_nbytes: float) -> Seconds:
        begin_s = np.maximum(clock_s[self.src], clock_s[self.dst])
        sent_s = begin_s + (
            self.latency_s + self.s_per_byte * chunk_nbytes + self._groups_s(chunk_nbytes)
        )
        after_s = clock_s.copy()
        np.maximum.at(after_s, self.src, sent_s)
        np.maximum.at(after_s, self.dst, sent_s)
        return after_s + self.adding_s_per_byte * chunk_nbytes


def _patterns(schedule: Schedule, cluster: Cluster, add_s_per_byte: float) -> Iterator[Pattern]:
    """Yield the pattern of each step; equal patterns are the same object."""
    known: dict[tuple[bytes, ...], Pattern] = {}
    latest: tuple[IntArray, ...] = ()
    pattern = None
    for step in schedule.checked_steps():
        traits = step.src, step.dst, step.hi - step.lo, step.combine
        # seldom: most steps equal the last one
        if pattern is None or not all(map(np.array_equal, traits, latest)):
            key = tuple(column.tobytes() for column in traits)
            if key not in known:
                known[key] = _pattern(
                    require_valid(step, schedule), cluster, schedule.ranks, add_s_per_byte
                )
            latest = traits
            pattern = known[key]
        yield pattern


def _pattern(step: Step, cluster: Cluster, ranks: int, add_s_per_byte: float) -> Pattern:
    src = step.src
    dst = step.dst
    chunks = (step.hi - step.lo).astype(np.float64)
    near = src // cluster.gpus_per_node == dst // cluster.gpus_per_node
    latency_us = np.where(near, cluster.within.latency_us, cluster.between.latency_us)
    added = np.bincount(
        dst, np.where(np.isin(step.combine, (ADD, MIX)), chunks, 0.0), ranks
    ).astype(np.float64)
    moves = src != dst
    latency_s = np.where(
        moves, (latency_us + _messages_us(src[moves], dst[moves], cluster, ranks)) * 1e-6, 0.0
    )
    s_per_byte = np.where(moves, _busiest_link(src, dst, near, chunks, cluster), 0.0)
    return Pattern(
        src=src,
        dst=dst,
        latency_s=latency_s,
        s_per_byte=s_per_byte,
        adding_s_per_byte=add_s_per_byte * added,
        adds=bool(added.any()),
        most_chunks=float(chunks.max(initial=0)),
        groups_s=_groups_s(step, ranks, cluster),
    )


def _groups_s(step: Step, ranks: int, cluster: Cluster) -> dict[float, float]:
    if not cluster.group_us:
        return {inf: 0.0}
    groups = nccl_groups(step.canonical(), ranks)
    return {most: (group_count(groups, most) - 1) * cluster.group_us * 1e-6 for most, _ in JOINED}


def _messages_us(src: IntArray, dst: IntArray, cluster: Cluster, ranks: int) -> float:
    """Return what the messages of the busiest rank take, besides one sent and one received."""
    most = int(
        (np.bincount(src, minlength=ranks) + np.bincount(dst, minlength=ranks)).max(initial=0)
    )
    return cluster.message_us * max(most - 2, 0)


def _busiest_link(
    src: IntArray, dst: IntArray, near: NDArray[np.bool_], chunks: Seconds, cluster: Cluster
) -> Seconds:
    """Return [transfers] the seconds per byte of a chunk at the busiest link of each path."""
    node = cluster.gpus_per_node
    rack = node if cluster.racks is None else node * cluster.racks.nodes
    links = [
        (near, 1, cluster.within.gbytes_per_s * 1e9),
        (near, node, cluster.bus_bytes_per_s),
        (~near, 1, cluster.rank_bytes_per_s),
        (~near, node, cluster.node_bytes_per_s),
        (src // rack != dst // rack, rack, cluster.rack_bytes_per_s),
    ]
    slowest: Seconds = np.maximum.reduce([_shared(src, dst, chunks, *link) for link in links])
    return slowest


def _shared(
    src: IntArray,
    dst: IntArray,
    chunks: Seconds,
    passes: NDArray[np.bool_],
    group: int,
    bytes_per_s: float,
) -> Seconds:
    """Return [transfers] the time of the busier group's port, if the transfer `passes` it."""
    if bytes_per_s == inf or not passes.any():
        return np.zeros(len(chunks))
    sender = src // group
    receiver = dst // group
    load = np.where(passes, chunks, 0.0)
    leaving = np.bincount(sender, load)
    coming = np.bincount(receiver, load)
    return np.where(passes, np.maximum(leaving[sender], coming[receiver]) / bytes_per_s, 0.0)
