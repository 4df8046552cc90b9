# SPDX-License-Identifier: Apache-2.0
"""How a kind of call travels: in slices of a wire, whose programs are bound to memory once.

A *wire* is a row of *slots*. A slot holds a piece that moves as a whole: a rank's share in an
all-gather, say, or the whole buffer in a broadcast. A call of any size travels through one wire of
fixed size, in slices, one after the other; a slot may be empty in the last ones. So schedules are
bound to memory once per size, whatever tensors come, and on a CPU the wire fits the cache. All
ranks have the same slots at the same places, of the same sizes, whatever the layout of their
tensors: multiples of 16 elements, or bytes of what only moves. But only the two ends of a transfer
know its size in an all-to-all. There a slot has exactly that size, so two ends that differ notice
it, and is empty at other ranks.

`CallEngine` alone makes plans, and runs them. Nothing here moves data or sees a caller's tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.c10d.call import Kind
from commrt.kernels.dispatch import combining
from commrt.kernels.layout import GRANULE, padded
from commrt.pricing.selection import Selection
from commrt.pricing.slices import WIRE_NBYTES, slice_nbytes
from commrt.program import chunk_bounds, member_program
from commrt.runtime.executor import BoundProgram, Scratch, bind
from commrt.runtime.prepared import Prepared
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.transport.channel import SMALL_NBYTES

LANDING_NUMEL = 1 << 15
"""Elements of a slice from which receiving into the caller's memory takes less than a copy."""


class Copy(NamedTuple):
    """A part of the wire, and the elements of a row of a call that are copied from or to it."""

    wire: Tensor
    row: int
    elements: slice


class Part(NamedTuple):
    """What a slice of a kind of call needs."""

    program: BoundProgram
    put: Sequence[Copy]
    """From this rank's rows to the wire, before the program runs."""
    take: Sequence[Copy]
    """From the wire to this rank's rows, after it."""
    land: Sequence[tuple[Tensor, Copy]]
    """Receives of the program that go straight to the caller's rows, and the copy that it saves.

    Between calls they point to that copy's part of the wire.
    """


class Plan(NamedTuple):
    """How all calls of a kind travel."""

    schedule: str
    number: int
    """32 bits that tell this kind of call from others, on all ranks."""
    numel: int
    parts: Sequence[Part]


class _Bound(NamedTuple):
    program: BoundProgram
    wire: Tensor
    """[sum of the sizes of all slots]"""


class CallPlanner:
    """Makes the plans of one group. On the thread that runs its calls, one plan at a time.

    It has the wire's memory from the world's transport, and keeps the bound programs.
    """

    def __init__(self, world: World, selection: Selection) -> None:
        self._world = world
        self._selection = selection
        self._memory = Scratch(self._allocate)
        # programs that plans share; their schedules were proven when they were chosen
        self._programs = Prepared[_Bound](world)

    def plan(self, kind: Kind) -> Plan:
        """Return the plan of a kind: the same on all ranks, but for where pieces lie in rows."""
        slot_nbytes = slice_nbytes(kind.collective, self._world.size, kind.device.type)
        schedule = self._selection.choose(
            kind.collective, kind.root, min(kind.piece_nbytes, slot_nbytes)
        )
        number = zlib.crc32(f"{kind} {schedule.name} {kind.divisor} {kind.is_scaled}".encode())
        slot_numel = slot_nbytes // kind.wire_dtype.itemsize
        begins = range(0, max(kind.sizes, default=0), slot_numel)
        parts = [self._part(schedule, kind, first, slot_numel) for first in begins]
        return Plan(schedule.name, number, sum(kind.sizes), parts)

    def _part(self, schedule: Schedule, kind: Kind, first: int, slot_numel: int) -> Part:
        """Return what the slice needs that has at most `slot_numel` elements of each piece, from
        its element `first` on.
        """
        sizes = tuple([min(max(size - first, 0), slot_numel) for size in kind.sizes])
        shape = tuple(map(padded, sizes)) if kind.is_known else sizes
        starts = [*accumulate(shape, initial=0)]  # of slots, on the wire
        key = schedule, shape, kind.operation, kind.wire_dtype, kind.device
        bound = self._programs.known(*key)
        if bound is None:
            bound = self._programs.keep(self._bind(*key), *key)
        program, wire = bound
        lands = (
            kind.divisor == 1
            and shape == sizes
            and starts[-1] >= LANDING_NUMEL
            and kind.device.type == "cpu"
            and self._world.transport.can_move_receives
        )
        landings = sorted(program.landings, key=lambda each: each.begin) if lands else []
        put = list[Copy]()
        for slot, row, begin in kind.put:
            start = starts[slot]
            put.append(_copy(wire, row, start, start + sizes[slot], begin + first - start))
        take = list[Copy]()
        land = list[tuple[Tensor, Copy]]()
        for slot, row, begin in kind.take:
            start = starts[slot]
            end = start + sizes[slot]
            ahead = begin + first - start
            for target, low, high in landings:
                if start <= low < high <= end:  # only what lies between landings is copied
                    take.append(_copy(wire, row, start, low, ahead))
                    land.append((target, _copy(wire, row, low, high, ahead)))
                    start = high
            take.append(_copy(wire, row, start, end, ahead))
        return Part(program, put, [each for each in take if each.wire.numel()], land)

    def _bind(
        self,
        schedule: Schedule,
        shape: Sequence[int],
        operation: str | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Bound:
        """Return a program for slots of the sizes `shape`, and the wire that it runs on."""
        world = self._world
        mine = member_program(schedule, range(world.size), world.rank, world.size)
        bounds = [0]
        chunks_per_slot = schedule.chunks // len(shape)
        for size in shape:
            bounds += [
                bounds[-1] + bound for bound in chunk_bounds(size, chunks_per_slot, GRANULE)[1:]
            ]
        wire = self._memory.row(bounds[-1], dtype, device, "wire")
        streams = world.comm_thread.streams
        add = None if operation is None else combining(operation)
        program = bind(mine, wire, world.transport, self._memory, streams, bounds=bounds, add=add)
        return _Bound(program, wire)

    def _allocate(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return so much that it seldom has to grow, since programs bound to what was too small
        keep that.

        A group of small calls alone opens no file for its memory.
        """
        enough = (
            SMALL_NBYTES if nbytes <= SMALL_NBYTES else 2 * max(nbytes, WIRE_NBYTES[device.type])
        )
        return self._world.transport.allocate(enough, dtype, device)


def _copy(wire: Tensor, row: int, begin: int, end: int, ahead: int) -> Copy:
    """Return the copy of elements [begin, end) of the wire, whose places in a row are `ahead`."""
    return Copy(wire[begin:end], row, slice(begin + ahead, end + ahead))
