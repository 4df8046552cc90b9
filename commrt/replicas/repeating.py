# SPDX-License-Identifier: Apache-2.0
"""A bucket's whole step remembered by its device, and repeated by one call; where that cannot be, the reason.

NCCL wants all ranks of a transfer to remember it together, and to repeat it together. So whether a step is repeated
depends on nothing that one rank has alone: neither on where its gradients lie nor on which it has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from commrt.runtime.executor import BoundProgram
from commrt.transport.protocol import Exchange, Moment, Transport
from commrt.wire.buckets import Bucket

__all__ = ["Repetition"]

KEPT = 16
"""Schedules of which what was remembered is kept; as many as the engine keeps bound."""
BY_CALLS = 2
"""Steps with a schedule before it is remembered: peers meet in them, and one that never comes back costs nothing."""
FIRST = f"the first {BY_CALLS} steps with a schedule are carried call by call"
NOT_HERE = "gradients are on a CPU, which queues nothing"
NOTHING_QUEUED = "the transport waits for its transfers, so there is nothing to repeat"

Agree = Callable[[bool], Sequence[int]]
"""Tells all who take part whether this rank refused, and returns the ranks that did."""


@dataclass(slots=True, eq=False)
class _Memory:
    programs: Sequence[BoundProgram]
    """Of all buckets."""
    steps: int = 0
    """Carried call by call."""
    latest: int | None = None
    """The last of them."""
    exchanges: Sequence[Exchange] = ()
    """Of all buckets, once they are remembered."""


class Repetition:
    """Of the `buckets` of a model, in steps all of which use one list of programs, one for each bucket."""

    def __init__(self, buckets: Sequence[Bucket], transport: Transport) -> None:
        self._buckets, self._transport = buckets, transport
        self._memories: OrderedDict[int, _Memory] = OrderedDict()  # by the identity of lists, which they keep
        self._latest: _Memory | None = None
        self._refusal = None if all(bucket.repeatable for bucket in buckets) else NOT_HERE
        self.reasons: dict[int, str] = {}
        """By bucket, why the latest step was carried call by call; none if it was repeated."""

    def carry(self, bucket: Bucket, programs: Sequence[BoundProgram], scale: float, moment: Moment) -> bool:
        """Pack, exchange and unpack by one call, and return True; False if the caller must do it."""
        memory = self._latest = self._of(programs)
        reason = self._refusal or (None if memory.exchanges else FIRST)
        if reason is not None or bucket.repeatable is None:
            memory.steps += memory.latest != moment.step
            memory.latest = moment.step
            self.reasons[bucket.index] = reason or NOT_HERE
            return False
        self.reasons.pop(bucket.index, None)
        bucket.aim(bucket.repeatable, scale)
        memory.exchanges[bucket.index](moment)
        bucket.repeated(bucket.repeatable)
        return True

    def _of(self, programs: Sequence[BoundProgram]) -> _Memory:
        memory = self._memories.setdefault(id(programs), _Memory(programs))
        self._memories.move_to_end(id(programs))
        if len(self._memories) > KEPT:
            self._memories.popitem(last=False)
        return memory

    @property
    def is_due(self) -> bool:
        """True if what the latest step did is to be remembered; the same on all who took part."""
        latest = self._latest
        return latest is not None and not (self._refusal or latest.exchanges) and latest.steps >= BY_CALLS

    def remember(self, agree: Agree) -> None:
        """Let the device see what the latest step queued; collective, with nothing else going on in this process."""
        if self._latest is None:
            return
        exchanges = self._seen_by_device(self._latest.programs)
        if refused := agree(self._refusal is not None):
            self._refusal = self._refusal or f"the device of rank {refused[0]} refused: ask that rank why"
        else:
            self._latest.exchanges = exchanges

    def _seen_by_device(self, programs: Sequence[BoundProgram]) -> list[Exchange]:
        """One for each bucket; fewer, and a refusal, if that cannot be."""
        exchanges: list[Exchange] = []
        try:
            for bucket, program in zip(self._buckets, programs, strict=True):
                if (exchange := self._transport.capture(_work(bucket, program), program.group)) is None:
                    self._refusal = NOTHING_QUEUED
                    break
                exchanges.append(exchange)
        except RuntimeError as error:
            self._refusal = f"the device refused: {error}"
        return exchanges


def _work(bucket: Bucket, program: BoundProgram) -> Callable[[], None]:
    launches = bucket.repeatable
    if launches is None:
        raise ValueError(NOT_HERE)
    launches.load()

    def work() -> None:
        launches.pack_aimed()
        program.run(Moment(-1, bucket.index))
        launches.unpack_aimed()

    return work
