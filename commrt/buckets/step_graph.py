# SPDX-License-Identifier: Apache-2.0
"""Carries a bucket's whole step by one launch of a device graph; where that cannot be, says why.

It touches gradients and wires as `GradientBucket` does; `StepGraphs` says which thread calls what.

NCCL wants all ranks of a transfer to capture it together, and to replay it together. So whether a
step is replayed must not depend on what one rank has alone: neither on where its gradients lie nor
on which it has. In peers' memory a rank may do by calls what others do by graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from commrt.buckets.gradient_bucket import GradientBucket
from commrt.kernels.packing import Repeatable
from commrt.runtime.executor import BoundProgram, RunnableProgram
from commrt.transport.protocol import Exchange, Tag, Transport

BY_CALLS = 2
"""Steps before a schedule is captured: peers connect in them, and a schedule that never comes back
costs nothing.
"""
FIRST = f"the first {BY_CALLS} steps with a schedule are carried call by call"
NO_KERNEL = (
    "plain torch packs the gradients, on a CPU or of a dtype without a Triton kernel: no graph can"
    " do that"
)
NOT_WHOLE = (
    "this rank lacks gradients of this step: what others have is unpacked from their memory before"
    " they go on"
)
NOTHING_QUEUED = "the transport waits for its transfers, so there is nothing to repeat"

Agree = Callable[[bool], Sequence[int]]
"""Tells all members whether this rank refused, and returns the ranks that did."""


@dataclass(slots=True, eq=False)
class BoundStep:
    """A schedule that is bound to the buckets, and the graphs that replay it.

    Only `StepGraphs` writes it, on the communication thread.
    """

    programs: Sequence[RunnableProgram]
    """One per bucket."""
    steps: int = 0
    """How many were carried call by call."""
    latest: int | None = None
    """The last of them."""
    replays: Sequence[Exchange] = ()
    """One per bucket, once captured."""


class StepGraphs:
    """The device graphs of a model's `buckets`.

    `carry` and `capture` run on the communication thread, or in place of it. Between steps the
    thread that ends a backward pass reads `is_due`, and the one that trains `reasons`.
    """

    def __init__(self, buckets: Sequence[GradientBucket], transport: Transport) -> None:
        self._buckets = buckets
        self._transport = transport
        self._latest: BoundStep | None = None  # what `carry` saw
        # why nothing can be captured; found here or by `capture`, for good
        self._refusal = None if all(bucket.repeatable for bucket in buckets) else NO_KERNEL
        self.reasons: dict[int, str] = {}
        """By bucket, why the latest step was carried call by call; nothing for buckets that were
        replayed.
        """

    def carry(self, bucket: GradientBucket, bound: BoundStep, scale: float, tag: Tag) -> bool:
        """Pack, exchange and unpack by one launch, and return True;
        False if the caller must do it.
        """
        self._latest = bound
        if self._refusal or not bound.replays:
            if bound.latest != tag.step:
                bound.steps += 1
                bound.latest = tag.step
            self.reasons[bucket.index] = self._refusal or FIRST
            return False
        if bound.programs[bucket.index].peer_parts and not bucket.is_whole:
            self.reasons[bucket.index] = NOT_WHOLE
            return False
        self.reasons.pop(bucket.index, None)
        launches = _launches(bucket)
        bucket.prepare_replay(launches, scale)
        bound.replays[bucket.index](tag)
        bucket.finish_replay(launches)
        return True

    @property
    def is_due(self) -> bool:
        """True if the schedule of the latest step is to be captured; the same on all members."""
        latest = self._latest
        return (
            latest is not None
            and not (self._refusal or latest.replays)
            and latest.steps >= BY_CALLS
        )

    def capture(self, agree: Agree) -> None:
        """Capture the schedule of the latest step; collective, with nothing else going on in this
        process.
        """
        bound = cast("BoundStep", self._latest)
        replays = self._capture_all(cast("Sequence[BoundProgram]", bound.programs))
        if refused := agree(self._refusal is not None):
            self._refusal = (
                self._refusal or f"the device of rank {refused[0]} refused: ask that rank why"
            )
        else:
            bound.replays = replays

    def _capture_all(self, programs: Sequence[BoundProgram]) -> list[Exchange]:
        """Return one replay per bucket; fewer, and set a refusal, if that cannot be."""
        replays: list[Exchange] = []
        try:
            for bucket, program in zip(self._buckets, programs, strict=True):
                replay = self._transport.capture(_work(bucket, program), program.group)
                if replay is None:
                    self._refusal = NOTHING_QUEUED
                    break
                replays.append(replay)
        except RuntimeError as error:
            self._refusal = f"the device refused: {error}"
        return replays


def _launches(bucket: GradientBucket) -> Repeatable:
    return cast("Repeatable", bucket.repeatable)  # without, `StepGraphs` refuses


def _work(bucket: GradientBucket, program: BoundProgram) -> Callable[[], None]:
    launches = _launches(bucket)
    tag = Tag(-1, bucket.index)
    parts = program.peer_parts
    launches.load(parts)

    def work() -> None:
        launches.pack_aimed()
        program.run(tag)
        if bucket.unpacks_wire:
            launches.unpack_aimed(parts)
        else:
            launches.compare_aimed()
        program.finish(tag)

    return work
