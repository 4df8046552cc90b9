# SPDX-License-Identifier: Apache-2.0
"""How NCCL cuts a group of sends and receives into kernel plans, and whether ranks then wait for each other for ever.

A group may be too large for one kernel. NCCL then launches several, one after the other: its *plans*. Each rank cuts
its own calls, so a send may be in a plan that waits for the plan of its receive. The rules are those of ``enqueue.cc``:

- calls become *works*: round r sends to one peer and receives from another, at the same distance, and an *epoch* is one
  pass over all rounds, which takes the next call of each peer;
- a work is cut in parts for several channels, by its bytes, and joins the last *batch* of each, or begins a new one;
- a plan ends where its batches would not fit into the arguments of a kernel.

NCCL 2.29.7 and later go on with the round where a plan ended; earlier ones begin each plan with round 0 (`GOES_ON`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

__all__ = ["Call", "Plan", "Rules", "cut", "find_cycle"]

BATCH_NBYTES, ARGUMENTS_NBYTES, WORKS_PER_BATCH, REACH = 16, 4096 - 32, 8, 63
"""A batch refers to works of a plan that are so far apart; for others it is continued, at the price of one more."""
GOES_ON, ONE_EPOCH, ONE_ROW_OF_ROUNDS = 22907, 22902, 22809
"""The versions since which a plan goes on with the round of the one before, and a batch has works of one epoch only,
and of 8 consecutive rounds only."""


class Call(NamedTuple):
    """A send or a receive of a rank's group."""

    peer: int
    is_send: bool
    nbytes: int


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides where a group is cut; the same on all ranks."""

    version: int = 23007
    channels: int = 32
    """A power of two."""
    channels_per_peer: int = 32
    """A power of two."""
    ranks_per_node: int | None = None
    """None for ranks of one node."""
    arguments_nbytes: int = ARGUMENTS_NBYTES
    """Room for batches."""

    def parts(self, nbytes: int, ranks: int) -> int:
        """Return the number of channels that a call of `nbytes` uses."""
        usual = self.channels_per_peer
        while usual * ranks > self.channels and usual > 1:
            usual //= 2
        smallest, largest = (1 << 16, 1 << 24) if self.ranks_per_node is None else (1 << 16, 1 << 17)
        parts = max(1, min(usual, -(-nbytes // smallest)))
        while -(-nbytes // parts) > largest and parts <= self.channels_per_peer // 2:
            parts *= 2
        return parts

    def first_channel(self, number: int) -> int:
        """Return the channel of the first part of a work of round `number`."""
        base = number if self.ranks_per_node is None else number // gcd(8, self.ranks_per_node)
        bits = self.channels.bit_length() - 1
        return int(f"{base % self.channels:0{bits}b}"[::-1], 2) if bits else 0

    def rounds(self, ranks: int) -> dict[tuple[int, int], int]:
        """Return the round of each distance, which is one in groups of ranks and one within a group."""
        size = ranks if self.ranks_per_node is None else gcd(8, self.ranks_per_node)
        groups = ranks // size
        power, distance, distances = 1 << (groups - 1).bit_length(), 0, []
        for step in range(power):
            distance = (distance + step) % power
            distances += [distance] if distance < groups else []
        return {(far, near): place * size + near for place, far in enumerate(distances) for near in range(size)}


@dataclass(slots=True)
class _Batch:
    calls: list[int]
    epoch: int
    rounds: list[int]
    begin: int
    """The number of the first work that it can refer to."""


@dataclass(slots=True)
class Plan:
    """A kernel: its batches by channel, which each channel does one after the other."""

    channels: dict[int, list[_Batch]] = field(default_factory=dict)
    batches: int = 0
    works: int = 0

    @property
    def calls(self) -> set[int]:
        """The indices of its calls."""
        return {call for batches in self.channels.values() for batch in batches for call in batch.calls}

    def add(self, parts_of: Mapping[int, int], epoch: int, number: int, rules: Rules) -> None:
        """Add a work of round `number`: calls, and in how many parts each is cut."""
        begin = rules.first_channel(number)
        for part in range(max(parts_of.values())):
            batches = self.channels.setdefault((begin + part) % rules.channels, [])
            if not batches or not _joins(batches[-1], epoch, number, rules):
                batches.append(_Batch([], epoch, [], self.works))
                self.batches += 1
            elif self.works - batches[-1].begin > REACH:
                batches[-1].begin = self.works
                self.batches += 1
            batches[-1].calls += (call for call, parts in parts_of.items() if part < parts)
            batches[-1].rounds.append(number)
        self.works += 1


def _joins(batch: _Batch, epoch: int, number: int, rules: Rules) -> bool:
    """Return True if a work of round `number` joins `batch`."""
    row = rules.version >= ONE_ROW_OF_ROUNDS and any(number // 8 != other // 8 for other in batch.rounds)
    other_epoch = rules.version >= ONE_EPOCH and batch.epoch != epoch
    return not (row or other_epoch or number in batch.rounds or len(batch.rounds) == WORKS_PER_BATCH)


def cut(rank: int, ranks: int, calls: Sequence[Call], rules: Rules) -> list[Plan]:
    """Return the plans of the group `calls` of `rank`, in order; calls with itself wait for nobody, and are in none."""
    rounds: dict[int, tuple[deque[int], deque[int]]] = {}
    numbers, size = rules.rounds(ranks), ranks if rules.ranks_per_node is None else gcd(8, rules.ranks_per_node)
    for index, call in enumerate(calls):
        begin, end = (rank, call.peer) if call.is_send else (call.peer, rank)
        far, near = (end // size - begin // size) % (ranks // size), (end - begin) % size
        if call.peer != rank:
            rounds.setdefault(numbers[far, near], (deque(), deque()))[call.is_send].append(index)
    order, plans, epoch, place = sorted(rounds), [Plan()], 0, 0
    while any(map(any, map(_lengths, rounds.values()))):
        if place == len(order):
            epoch, place = epoch + 1, 0
        heads = [queue[0] for queue in rounds[order[place]] if queue]
        room = (plans[-1].batches + rules.channels_per_peer) * BATCH_NBYTES <= rules.arguments_nbytes
        if heads and not room:
            plans.append(Plan())
            epoch, place = (epoch, place) if rules.version >= GOES_ON else (epoch + 1, 0)
            continue
        if heads:
            parts_of = {head: rules.parts(calls[head].nbytes, ranks) for head in heads}
            plans[-1].add(parts_of, epoch, order[place], rules)
            for queue in rounds[order[place]]:
                if queue:
                    queue.popleft()
        place += 1
    return plans


def _lengths(queues: tuple[deque[int], deque[int]]) -> tuple[int, int]:
    return len(queues[0]), len(queues[1])


Place = tuple[int, int, int, int]
"""(rank, plan, channel, batch)."""


def find_cycle(groups: Sequence[Sequence[Call]], rules: Rules) -> list[str] | None:
    """Return a circle of plans that wait for each other if rank r makes the calls ``groups[r]``; None if all end.

    A call ends when its other end has begun too: it is counted on no buffer. Raises `ValueError` for a call without its
    other end.
    """
    return _Run(groups, rules).circle()


class _Run:
    """Plans that run side by side, each rank's in order."""

    def __init__(self, groups: Sequence[Sequence[Call]], rules: Rules) -> None:
        self._groups, self._other = groups, _matched(groups)
        self._plans = [cut(rank, len(groups), calls, rules) for rank, calls in enumerate(groups)]
        self._begun: dict[_End, Place] = {}  # and not met
        self._left: dict[Place, int] = {}  # ends of a batch that have not met theirs
        self._channels_left: dict[tuple[int, int], int] = {}  # of a plan
        self._next: deque[Place] = deque()
        for rank in range(len(groups)):
            self._begin_plan(rank, 0)
        while self._next:
            self._begin(self._next.popleft())

    def _begin_plan(self, rank: int, number: int) -> None:
        if number < len(self._plans[rank]):
            channels = self._plans[rank][number].channels
            self._channels_left[rank, number] = len(channels)
            self._next.extend((rank, number, channel, 0) for channel in channels)

    def _begin(self, place: Place) -> None:
        rank, plan, channel, batch = place
        calls = self._plans[rank][plan].channels[channel][batch].calls
        self._left[place] = len(calls)
        for call in calls:
            other_rank, other_call = self._other[rank, call]
            there = self._begun.pop((other_rank, other_call, channel), None)
            if there is None:
                self._begun[rank, call, channel] = place
            else:
                self._end_one(there)
                self._end_one(place)

    def _end_one(self, place: Place) -> None:
        rank, plan, channel, batch = place
        self._left[place] -= 1
        if self._left[place]:
            return
        if batch + 1 < len(self._plans[rank][plan].channels[channel]):
            self._next.append((rank, plan, channel, batch + 1))
            return
        self._channels_left[rank, plan] -= 1
        if not self._channels_left[rank, plan]:
            self._begin_plan(rank, plan + 1)

    def circle(self) -> list[str] | None:
        """Return a circle of ends that have begun and wait, each for what the next one holds up."""
        if not self._begun:
            return None
        waiting = {place[:2]: end for end, place in self._begun.items()}  # one of each plan that runs
        seen: list[tuple[int, int]] = []
        rank_plan = next(iter(waiting))
        while rank_plan not in seen:
            seen.append(rank_plan)
            other_rank = self._other[waiting[rank_plan][:2]][0]
            rank_plan = next(each for each in waiting if each[0] == other_rank)
        return [self._text(*waiting[each]) for each in seen[seen.index(rank_plan) :]]

    def _text(self, rank: int, call: int, channel: int) -> str:
        other_rank, other_call = self._other[rank, call]
        plan, others = self._begun[rank, call, channel][1], self._plans[other_rank]
        there = next(number for number, each in enumerate(others) if other_call in each.calls)
        now = max(number for one, number in self._channels_left if one == other_rank)
        what = "sends to" if self._groups[rank][call].is_send else "receives from"
        return (
            f"rank {rank} in plan {plan} {what} rank {other_rank}, which does so in plan {there} and is in plan {now}"
        )


_End = tuple[int, int, int]
"""(rank, call, channel)."""


def _matched(groups: Sequence[Sequence[Call]]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the other end of each (rank, call): the k-th send to a rank meets the k-th receive there."""
    ends: dict[tuple[int, int], tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
    for rank, calls in enumerate(groups):
        for index, call in enumerate(calls):
            pair = (rank, call.peer) if call.is_send else (call.peer, rank)
            ends.setdefault(pair, ([], []))[call.is_send].append((rank, index))
    matched = {}
    for (source, target), (recvs, sends) in ends.items():
        if len(recvs) != len(sends):
            raise ValueError(
                f"rank {source} sends {len(sends)} times to rank {target}, which receives {len(recvs)} times"
            )
        for one, other in zip(recvs, sends, strict=True):
            matched[one], matched[other] = other, one
    return matched
