# SPDX-License-Identifier: Apache-2.0
"""Binds schedules to the wires of buckets, as messages or as memory that peers of a host read.

It sends nothing itself, but that all ranks show each other their memory (`let_peers_read`). On the
communication thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.step_graph import BoundStep
from commrt.program import Program, member_program
from commrt.runtime.executor import BoundProgram, RunnableProgram, Scratch, bind, scratch_numel
from commrt.runtime.generation import Members
from commrt.runtime.reading import bind_reading
from commrt.runtime.wire import QuantizedWire
from commrt.runtime.wire_carrier import ValuesOnWire, carrier_of
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.transport.protocol import Window


class Binding:
    """The memory of `buckets`, as programs use it; all programs share scratch memory.

    Of buckets it reads what their constructors set, and loads kernels that unpack from there.
    """

    def __init__(self, world: World, buckets: Sequence[GradientBucket], *, unpacks: bool) -> None:
        """With `unpacks`, sums may stay in peers' memory where kernels can unpack from there."""
        self._world = world
        self._buckets = buckets
        self._unpacks = unpacks
        self._scratch = Scratch(world.transport.allocate)
        # by bucket, where peers read it; only `let_peers_read` fills it
        self._windows: dict[int, Window] = {}

    def let_peers_read(self) -> None:
        """Let GPUs of this host read the buckets, in place of messages: for ranks that all take
        part in every step. Collective.
        """
        shown = [bucket for bucket in self._buckets if bucket.quantized is None]
        windows = self._world.transport.share([bucket.wire for bucket in shown])
        self._windows = {
            bucket.index: window for bucket, window in zip(shown, windows, strict=False)
        }

    def bind(
        self, schedule: Schedule, members: Members, quantizer: QuantizedWire | None
    ) -> BoundStep:
        """Return the programs of this rank, one per bucket."""
        mine = member_program(schedule, members, self._world.rank, self._world.size)
        if any(mine.peers & window.peers.keys() for window in self._windows.values()):
            return BoundStep([self._bind_reading(mine, bucket) for bucket in self._buckets])
        return BoundStep(self._bind_messages(mine, quantizer))

    def _bind_messages(
        self, mine: Program, quantizer: QuantizedWire | None
    ) -> Sequence[RunnableProgram]:
        transport = self._world.transport
        streams = self._world.comm_thread.streams
        heads = [
            bucket.wire[: bucket.head_numel] if bucket.quantized else bucket.wire
            for bucket in self._buckets
        ]
        cuts = [_cut(bucket, mine) for bucket in self._buckets]
        for wire, bounds in zip(heads, cuts, strict=True):  # so that all share the largest
            self._scratch.row(scratch_numel(mine, wire.numel(), bounds), wire.dtype, wire.device)
        programs = [
            bind(mine, wire, transport, self._scratch, streams, bounds=bounds)
            for wire, bounds in zip(heads, cuts, strict=True)
        ]
        if quantizer is None:
            return programs
        values = [
            ValuesOnWire(head, bucket.wire[bucket.head_numel :], bucket.residual)
            for head, bucket in zip(programs, self._buckets, strict=True)
        ]
        device = values[0].values.device

        def allocate(_: str, nbytes: int) -> Tensor:
            return transport.allocate(nbytes, torch.uint8, device)

        return carrier_of(quantizer).bind_values(mine, quantizer, values, transport, allocate)

    def _bind_reading(self, mine: Program, bucket: GradientBucket) -> BoundProgram:
        """Return the program in peers' memory, from which kernels unpack where they can."""
        window = self._windows[bucket.index]
        launches = bucket.repeatable
        all_near = mine.peers <= window.peers.keys()
        is_unpacked = self._unpacks and bucket.unpacks_wire
        unpacks_there = launches is not None and is_unpacked and all_near
        bound = bind_reading(
            mine,
            bucket.wire,
            window,
            self._world.transport,
            bounds=_cut(bucket, mine),
            copied=bucket.head_numel if unpacks_there else None,
            scratch=self._scratch,
        )
        if launches is not None and bound.peer_parts:
            launches.load(bound.peer_parts)  # before anything waits on the device
        return bound


def _cut(bucket: GradientBucket, mine: Program) -> Sequence[int] | None:
    """Return the bounds of the chunks of `bucket`: between tiles where kernels unpack, with windows
    or without.
    """
    if bucket.repeatable is None or bucket.quantized is not None:
        return None
    return bucket.repeatable.cut(mine.chunks)
