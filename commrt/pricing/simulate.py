# SPDX-License-Identifier: Apache-2.0
"""The price of a schedule on a cluster: when each rank is done, if each step's messages share what they share.

A transfer begins when both of its ranks have done their step before, and takes the latency of its way, and then as
long as the narrowest place on the way needs for all that passes there in the same step. A rank is done with a step
when all that it sends and receives in it has arrived, and what is to be added up has been.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from commrt.errors import UsageError
from commrt.flaws import require_sound
from commrt.pricing.cluster import Cluster
from commrt.schedule import ADD, MIX, IntArray, Schedule, Step

__all__ = ["Phase", "Price", "Pricing", "Seconds", "all_reduce_bound_s", "exchange_bound_s"]

Seconds = NDArray[np.float64]
"""[ranks], since the first of them began."""
TOGETHER_S = 1e-12
"""Ranks that are apart by less begin together: sums are rounded."""


class Price(NamedTuple):
    """What an exchange takes."""

    finish_s: Seconds
    steps: int

    @property
    def seconds(self) -> float:
        """Until the last rank is done."""
        return float(self.finish_s.max())


@dataclass(frozen=True, slots=True, eq=False)
class _Pattern:
    """Who sends how much to whom in a step; many steps of a schedule have the same."""

    src: IntArray
    dst: IntArray
    latency_s: Seconds
    """[transfers], like the others."""
    s_per_byte: Seconds
    """Of a chunk's bytes, until all that shares the narrowest place has passed."""
    adds: bool
    """Something is added up or mixed; else all is copied."""
    adding_s_per_byte: Seconds | None
    """[ranks]: of a chunk's bytes, for all that a rank has to add up when it is there; None if that takes no time."""
    is_one_each: bool
    """No rank sends twice, and none receives twice."""

    def play(self, clock_s: Seconds, chunk_nbytes: float) -> Seconds:
        """When each rank is done that was ready at `clock_s`."""
        begin_s = np.maximum(clock_s[self.src], clock_s[self.dst])
        sent_s = begin_s + (self.latency_s + self.s_per_byte * chunk_nbytes)
        after_s = clock_s.copy()
        if self.is_one_each:
            after_s[self.src] = sent_s
            after_s[self.dst] = np.maximum(after_s[self.dst], sent_s)
        else:
            np.maximum.at(after_s, self.src, sent_s)
            np.maximum.at(after_s, self.dst, sent_s)
        return after_s if self.adding_s_per_byte is None else after_s + self.adding_s_per_byte * chunk_nbytes

    def play_often(self, clock_s: Seconds, chunk_nbytes: float, times: int) -> Seconds:
        """As so many steps that follow each other.

        Once a step takes all ranks as long it does so for ever: who all begin later by as much all end later by it.
        """
        for played in range(1, times + 1):
            after_s = self.play(clock_s, chunk_nbytes)
            took_s = after_s - clock_s
            if np.ptp(took_s) <= 1e-12 * took_s[0]:
                return after_s + (times - played) * took_s
            clock_s = after_s
        return clock_s


class Pricing:
    """Of one schedule on one cluster, for any number of bytes.

    Cost: each different step is looked at once, O(transfers); then O(ranks) for each step and price.
    """

    def __init__(self, schedule: Schedule, cluster: Cluster) -> None:
        cluster.require_room(schedule.ranks)
        self.schedule, self.cluster = schedule, cluster
        runs = (list(group) for _, group in groupby(_patterns(schedule, cluster), key=id))
        self._runs = [(run[0], len(run)) for run in runs]
        self._line: _Line | None = None

    def price(self, nbytes: float, start_s: ArrayLike = 0.0) -> Price:
        """Of a buffer of `nbytes` on each rank, where ranks begin at `start_s` [ranks] or all together."""
        if not 0 <= nbytes < inf:
            raise UsageError(f"{nbytes:g} bytes cannot be exchanged: give the size of the buffer")
        clock_s = np.array(np.broadcast_to(np.asarray(start_s, dtype=np.float64), self.schedule.ranks))
        if self._line is not None and nbytes <= self._line.nbytes and np.ptp(clock_s) < TOGETHER_S:
            return Price(clock_s + self._line.finish_s(nbytes), self.steps)
        return Price(self._played(nbytes, clock_s), self.steps)

    def _played(self, nbytes: float, clock_s: Seconds) -> Seconds:
        chunk_nbytes = nbytes / self.schedule.chunks
        for pattern, times in self._runs:
            clock_s = pattern.play_often(clock_s, chunk_nbytes, times)
        return clock_s

    @property
    def steps(self) -> int:
        """Of the schedule."""
        return sum(times for _, times in self._runs)

    def phases(self, nbytes: float) -> list[Phase]:
        """Runs of steps in which the same ranks send each other as much, for ranks that begin together."""
        clock_s, found, begin_s = np.zeros(self.schedule.ranks), list[Phase](), 0.0
        for pattern, times in self._runs:
            clock_s = pattern.play_often(clock_s, nbytes / self.schedule.chunks, times)
            found.append(Phase(times, pattern.adds, begin_s, float(clock_s.max())))
            begin_s = found[-1].end_s
        return found

    def straighten(self, nbytes: float) -> None:
        """Find prices up to `nbytes` at once from now on, for ranks that begin together, where they lie on a line.

        They are a convex function of the bytes, a maximum of sums: it is a line if the middle lies on it.
        """
        together_s = np.zeros(self.schedule.ranks)
        none_s, half_s, all_s = (self._played(part * nbytes, together_s) for part in (0.0, 0.5, 1.0))
        if np.allclose(half_s, (none_s + all_s) / 2, rtol=1e-9, atol=0.0):
            self._line = _Line(nbytes, none_s, all_s)


class Phase(NamedTuple):
    """A part of a schedule."""

    steps: int
    adds: bool
    """What is received is added up or mixed; else it is copied."""
    begin_s: float
    end_s: float
    """Of the last rank."""


class _Line(NamedTuple):
    nbytes: float
    none_s: Seconds
    all_s: Seconds

    def finish_s(self, nbytes: float) -> Seconds:
        return self.none_s + (self.all_s - self.none_s) * (nbytes / self.nbytes)


def _patterns(schedule: Schedule, cluster: Cluster) -> Iterator[_Pattern]:
    known: dict[tuple[bytes, ...], _Pattern] = {}
    latest: tuple[IntArray, ...] = ()
    pattern = None
    for step in schedule.played():
        traits = step.src, step.dst, step.hi - step.lo, step.combine
        if pattern is None or not all(map(np.array_equal, traits, latest)):  # it seldom changes
            key = tuple(column.tobytes() for column in traits)
            if key not in known:
                known[key] = _pattern(require_sound(step, schedule), step.hi - step.lo, cluster, schedule.ranks)
            latest, pattern = traits, known[key]
        yield pattern


def _pattern(step: Step, chunks: IntArray, cluster: Cluster, ranks: int) -> _Pattern:
    src, dst = step.src, step.dst
    near = src // cluster.gpus_per_node == dst // cluster.gpus_per_node
    latency_us = np.where(near, cluster.within.latency_us, cluster.between.latency_us)
    adding = np.bincount(dst, np.where(np.isin(step.combine, (ADD, MIX)), chunks, 0), ranks).astype(np.float64)
    speed = cluster.reduce_gbytes_per_s
    moves = src != dst
    return _Pattern(
        src=src,
        dst=dst,
        latency_s=np.where(moves, latency_us * 1e-6, 0.0),
        s_per_byte=np.where(moves, _narrowest(src, dst, near, chunks.astype(np.float64), cluster), 0.0),
        adds=bool(adding.any()),
        adding_s_per_byte=None if speed is None or not adding.any() else 1e-9 / speed * adding,
        is_one_each=len(np.unique(src)) == len(src) and len(np.unique(dst)) == len(dst),
    )


def _narrowest(src: IntArray, dst: IntArray, near: NDArray[np.bool_], chunks: Seconds, cluster: Cluster) -> Seconds:
    """[transfers]: seconds per byte of a chunk, for all that passes the narrowest place of its way."""
    far = np.where(near, 0.0, chunks)
    inside = np.where(near, chunks, 0.0)
    port_s = _shared(src, dst, inside, 1, cluster.within.gbytes_per_s * 1e9)
    cards_s = _shared(src, dst, far, 1, cluster.rank_bytes_per_s)
    node_s = _shared(src, dst, far, cluster.gpus_per_node, cluster.node_bytes_per_s)
    slowest = np.where(near, port_s, np.maximum(cards_s, node_s))
    if cluster.racks is None:
        return slowest
    group = cluster.racks.nodes * cluster.gpus_per_node
    leaves = src // group != dst // group
    out = np.where(leaves, chunks, 0.0)
    return np.where(leaves, np.maximum(slowest, _shared(src, dst, out, group, cluster.rack_bytes_per_s)), slowest)


def _shared(src: IntArray, dst: IntArray, load: Seconds, group: int, bytes_per_s: float) -> Seconds:
    """[transfers]: what the busier of two places, that of the sender's group and the receiver's, needs for its load."""
    sender, receiver = src // group, dst // group
    leaving, coming = np.bincount(sender, load), np.bincount(receiver, load)
    busier: Seconds = np.maximum(leaving[sender], coming[receiver]) / bytes_per_s
    return busier


def all_reduce_bound_s(cluster: Cluster, ranks: int, nbytes: float) -> float:
    """No way of adding up `nbytes` on all ranks is faster: what a rank, a node and a rack must send, and one latency.

    Of k equal parts each sends at least 2 (k - 1) / k of the buffer, through all its ports together.
    """
    nodes = cluster.nodes_of(ranks)
    groups = 1 if cluster.racks is None else ceil(nodes / cluster.racks.nodes)
    per_rank = cluster.within.gbytes_per_s * 1e9 * (min(ranks, cluster.gpus_per_node) > 1)
    per_rank += cluster.rank_bytes_per_s * (nodes > 1)
    parts = [(ranks, per_rank), (nodes, cluster.node_bytes_per_s), (groups, cluster.rack_bytes_per_s)]
    sent_s = max((2 * (k - 1) / k * nbytes / bytes_per_s for k, bytes_per_s in parts if k > 1), default=0.0)
    return sent_s + _latency_s(cluster, ranks)


def exchange_bound_s(cluster: Cluster, ranks: int, nbytes: float) -> float:
    """No way of giving `nbytes` to another rank is faster, with as many partners on other nodes as ranks are there."""
    if ranks < 2:
        return 0.0
    speeds = [cluster.within.gbytes_per_s * 1e9] if cluster.gpus_per_node > 1 else []
    speeds += [cluster.rank_bytes_per_s] if cluster.nodes_of(ranks) > 1 else []
    return nbytes / max(speeds) + _latency_s(cluster, ranks)


def _latency_s(cluster: Cluster, ranks: int) -> float:
    """Of the shortest way that somebody has to go."""
    if ranks < 2:
        return 0.0
    far = cluster.nodes_of(ranks) > 1
    least = min(cluster.within.latency_us, cluster.between.latency_us) if far else cluster.within.latency_us
    return least * 1e-6
