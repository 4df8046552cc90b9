# SPDX-License-Identifier: Apache-2.0
"""How NCCL cuts a group of sends and receives into kernel plans, and whether ranks then wait for each other for ever.

A group may be too large for one kernel. NCCL then launches several, one after the other: its *plans*. Each rank cuts
its own calls, so a send may be in a plan that waits for the plan of its receive. The rules are those of ``enqueue.cc``:

- calls become *works*: round r sends to one peer and receives from another, at the same distance, and an *epoch* is one
  pass over all rounds, which takes the next call of each peer;
- a work is cut in parts for several channels, by its bytes, and joins the last *batch* of each, or begins a new one;
- a plan ends where its batches would not fit into the arguments of a kernel.

NCCL 2.29.7 and later go on with the round where a plan ended; earlier ones begin each plan with round 0 (`GOES_ON`).

Over InfiniBand with PXN, which are NCCL's defaults there, receives may also wait for each other
(`Rules.shares_connections`). This was read in NCCL 2.30.7:

- ``ncclTopoGetNetDev``: all ranks of a host send to a rank by the same local proxy, and so by one connection a channel;
- ``ProxyAppend`` of ``proxy.cc``: a rank's receives of one batch and channel become one operation of its proxy;
- ``recvProxyProgress`` of ``transport/net.cc``: those of one connection are posted as one *multi-receive*, of up to 8;
- ``ncclIbIsend`` of ``transport/net_ib/p2p.cc``: nothing is sent until all senders of a multi-receive have come.

This is a model: messages travel whole, and no buffer takes what nobody receives yet. It knows neither the room for
works nor what is in flight from earlier groups.
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

    version: int = GOES_ON
    channels: int = 32
    """A power of two."""
    channels_per_peer: int = 32
    """A power of two. From 2.29.2 on NCCL halves it over several nodes while its product with ranks / 8 exceeds
    `channels`, unless the option nChannelsPerNetPeer is set; `Rules` does not."""
    ranks_per_node: int | None = None
    """None for ranks of one node."""
    shares_connections: bool = False
    """Between nodes, all receives of a batch from one node end together. True for InfiniBand with PXN; False for TCP,
    or with NCCL_NET_SHARED_COMMS=0 or NCCL_PXN_DISABLE=1."""
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

    def connection(self, source: int, target: int) -> int:
        """Return a number that is the same for all ranks which share `source`'s connection to `target`."""
        size = self.ranks_per_node
        if size is None or not self.shares_connections or source // size == target // size:
            return source
        return -1 - source // size

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

    A call ends when its other end has begun too, and both ends of all calls in its multi-receive: it is counted on no
    buffer. Raises `ValueError` for a call without its other end.
    """
    return _Run(groups, rules).circle()


class _Run:
    """Plans that run side by side, each rank's in order."""

    def __init__(self, groups: Sequence[Sequence[Call]], rules: Rules) -> None:
        self._groups, self._rules, self._other = groups, rules, _matched(groups)
        self._plans = [cut(rank, len(groups), calls, rules) for rank, calls in enumerate(groups)]
        self._begun: dict[_End, Place] = {}  # and not ended
        self._left: dict[Place, int] = {}  # ends of a batch that have not ended
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
        rank, _, channel, _ = place
        ends = [(rank, call, channel) for call in self._calls(place)]
        self._left[place] = len(ends)
        self._begun |= dict.fromkeys(ends, place)
        for end in ends:
            together = self._together(end) if end in self._begun else []
            if all(each in self._begun for each in together):
                for each in together:
                    self._end_one(self._begun.pop(each))

    def _calls(self, place: Place) -> list[int]:
        rank, plan, channel, batch = place
        return self._plans[rank][plan].channels[channel][batch].calls

    def _together(self, end: _End) -> list[_End]:
        """Return both ends of the message of `end`, then of the others of its multi-receive once that has begun."""
        rank, call, channel = end
        there = (*self._other[rank, call], channel)
        recv = there if self._groups[rank][call].is_send else end
        others = self._multi_receive(recv) if recv in self._begun else []
        return [end, there] + [each for other in others for each in (other, (*self._other[other[:2]], channel))]

    def _multi_receive(self, recv: _End) -> list[_End]:
        """Return the other receives of the batch of `recv` over the same connection."""
        rank, call, channel = recv
        peers = {each: self._groups[rank][each] for each in self._calls(self._begun[recv])}
        connection = self._rules.connection(peers.pop(call).peer, rank)
        return [
            (rank, each, channel)
            for each, (peer, is_send, _) in peers.items()
            if not is_send and self._rules.connection(peer, rank) == connection
        ]

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
        seen: list[_End] = []
        end = next(iter(self._begun), None)
        while end and end not in seen:
            seen.append(end)
            end = self._holds_up(self._missing(end))
        return [self._text(each) for each in seen[seen.index(end) :]] if end else None

    def _missing(self, end: _End) -> _End:
        """Return an end for which `end` waits."""
        return next(each for each in self._together(end) if each not in self._begun)

    def _holds_up(self, missing: _End) -> _End:
        """Return an end that must end before `missing` begins: of an earlier batch of its channel, or earlier plan."""
        return min((end for end in self._begun if end[0] == missing[0]), key=lambda end: end[2] != missing[2])

    def _text(self, end: _End) -> str:
        rank, call, _ = end
        missing = self._missing(end)
        peer, is_send, _ = self._groups[rank][call]
        beside = f" together with rank {missing[0]}" if missing[:2] != self._other[rank, call] else ""
        what = "sends to" if is_send else "receives from"
        return (
            f"rank {rank} in {_name(self._begun[end])} {what} rank {peer}{beside},"
            f" which does so in {_name(self._place(missing))} and is in {_name(self._begun[self._holds_up(missing)])}"
        )

    def _place(self, end: _End) -> Place:
        rank, call, channel = end
        places = (
            (rank, number, channel, batch)
            for number, plan in enumerate(self._plans[rank])
            for batch in range(len(plan.channels.get(channel, [])))
        )
        return next(place for place in places if call in self._calls(place))


def _name(place: Place) -> str:
    _, plan, channel, batch = place
    return f"plan {plan}, channel {channel}, batch {batch}"


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
