# SPDX-License-Identifier: Apache-2.0
"""Carry a bucket's whole step by one launch of a device graph; where that cannot be, say why.

NCCL wants all ranks of a transfer to capture it together, and to replay it together. So whether a step is replayed
must not depend on what one rank has alone: neither on where its gradients lie nor on which it has. In peers' memory a
rank may do by calls what others do by graphs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from commrt.buckets.gradient_bucket import GradientBucket
from commrt.runtime.executor import BoundProgram
from commrt.transport.protocol import Exchange, Tag, Transport

__all__ = ["StepGraphs"]

KEPT = 16
"""Schedules whose graphs are kept; as many as the engine keeps bound."""
BY_CALLS = 2
"""Steps before a schedule is captured: peers connect in them, and a schedule that never comes back costs nothing."""
FIRST = f"the first {BY_CALLS} steps with a schedule are carried call by call"
NO_KERNEL = "plain torch packs the gradients, on a CPU or of a dtype without a Triton kernel: no graph can do that"
NOT_WHOLE = "this rank lacks gradients of this step: what others have is unpacked from their memory before they go on"
NOTHING_QUEUED = "the transport waits for its transfers, so there is nothing to repeat"

Agree = Callable[[bool], Sequence[int]]
"""Tells all members whether this rank refused, and returns the ranks that did."""


@dataclass(slots=True, eq=False)
class _Schedule:
    """What is known of one schedule."""

    programs: Sequence[BoundProgram]
    """One per bucket."""
    steps: int = 0
    """Carried call by call."""
    latest: int | None = None
    """The last of them."""
    replays: Sequence[Exchange] = ()
    """One per bucket, once captured."""


class StepGraphs:
    """The device graphs of a model's `buckets`; a step uses one list of programs, one program for each bucket."""

    def __init__(self, buckets: Sequence[GradientBucket], transport: Transport) -> None:
        self._buckets, self._transport = buckets, transport
        self._schedules: OrderedDict[int, _Schedule] = OrderedDict()  # by the identity of lists, which they keep alive
        self._latest: _Schedule | None = None
        self._refusal = None if all(bucket.repeatable for bucket in buckets) else NO_KERNEL
        self.reasons: dict[int, str] = {}
        """By bucket, why the latest step was carried call by call; nothing for buckets that were replayed."""

    def carry(self, bucket: GradientBucket, programs: Sequence[BoundProgram], scale: float, tag: Tag) -> bool:
        """Pack, exchange and unpack by one launch, and return True; False if the caller must do it."""
        schedule = self._latest = self._known(programs)
        reason = self._refusal or (None if schedule.replays else FIRST)
        if reason is not None or bucket.repeatable is None:
            schedule.steps += schedule.latest != tag.step
            schedule.latest = tag.step
            self.reasons[bucket.index] = reason or NO_KERNEL
            return False
        if programs[bucket.index].elsewhere and not bucket.is_whole:
            self.reasons[bucket.index] = NOT_WHOLE
            return False
        self.reasons.pop(bucket.index, None)
        bucket.prepare_replay(bucket.repeatable, scale)
        schedule.replays[bucket.index](tag)
        bucket.finish_replay(bucket.repeatable)
        return True

    def _known(self, programs: Sequence[BoundProgram]) -> _Schedule:
        schedule = self._schedules.setdefault(id(programs), _Schedule(programs))
        self._schedules.move_to_end(id(programs))
        if len(self._schedules) > KEPT:
            self._schedules.popitem(last=False)
        return schedule

    @property
    def is_due(self) -> bool:
        """True if the schedule of the latest step is to be captured; the same on all members."""
        latest = self._latest
        return latest is not None and not (self._refusal or latest.replays) and latest.steps >= BY_CALLS

    def capture(self, agree: Agree) -> None:
        """Capture the schedule of the latest step; collective, with nothing else going on in this process."""
        if self._latest is None:
            return
        replays = self._captured(self._latest.programs)
        if refused := agree(self._refusal is not None):
            self._refusal = self._refusal or f"the device of rank {refused[0]} refused: ask that rank why"
        else:
            self._latest.replays = replays

    def _captured(self, programs: Sequence[BoundProgram]) -> list[Exchange]:
        """Return one replay per bucket; fewer, and set a refusal, if that cannot be."""
        replays: list[Exchange] = []
        try:
            for bucket, program in zip(self._buckets, programs, strict=True):
                if (replay := self._transport.capture(_work(bucket, program), program.group)) is None:
                    self._refusal = NOTHING_QUEUED
                    break
                replays.append(replay)
        except RuntimeError as error:
            self._refusal = f"the device refused: {error}"
        return replays


def _work(bucket: GradientBucket, program: BoundProgram) -> Callable[[], None]:
    launches = bucket.repeatable
    if launches is None:
        raise ValueError(NO_KERNEL)
    tag, parts = Tag(-1, bucket.index), program.elsewhere
    launches.load(parts)

    def work() -> None:
        launches.pack_aimed()
        program.run(tag)
        bucket.queue_unpack(launches, parts)
        program.finish(tag)

    return work
