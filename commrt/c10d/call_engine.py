# SPDX-License-Identifier: Apache-2.0
"""Runs the collectives of one process group, in order, on the communication thread of its world.

A call of any size travels through one wire of fixed size, slice by slice. So schedules are bound to memory once per
size, whatever tensors come. On a CPU the wire fits the cache, so copies to and from it cost little.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.c10d.call import Call, Kind, Slice, bounds_of
from commrt.errors import DeadlineExceeded, TransportError
from commrt.kernels.dispatch import combining
from commrt.pricing.selection import WIRE_NBYTES, Selection, slice_nbytes
from commrt.program import member_program
from commrt.runtime.executor import BoundProgram, bind, scratch_numel
from commrt.runtime.prepared import Members, Prepared
from commrt.runtime.recording import Recorder, within_range
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.threads.future import Future
from commrt.transport.protocol import Tag, point

__all__ = ["CallEngine"]

LANDING_NUMEL = 1 << 15
"""Elements of a slice from which receiving into the caller's memory takes less than a copy."""
SPREAD = 0x9E3779B1
"""Makes sequence numbers differ in many bits, so that a call of one number is taken for no call of another."""
KEPT = 256
"""Plans that are kept: those of the kinds seen last."""


class _Memory(NamedTuple):
    """What a program of a slice is bound for."""

    shape: tuple[int, ...]
    operation: str | None
    dtype: torch.dtype
    device: torch.device


class _Copy(NamedTuple):
    """A part of the wire, and elements [begin, end) of a row of a call that are copied from or to it."""

    wire: Tensor
    row: int
    begin: int
    end: int


class _Part(NamedTuple):
    """What a slice of a kind of call needs."""

    program: BoundProgram
    put: Sequence[_Copy]
    take: Sequence[_Copy]
    land: Sequence[tuple[Tensor, _Copy]]
    """Receives that go into the caller's rows, where that saves a copy, and the part of the wire they go to else."""


class _Plan(NamedTuple):
    """What all calls of one kind need."""

    schedule: str
    number: int
    """32 bits that tell this kind of call from others, on all ranks."""
    numel: int
    parts: Sequence[_Part]


class CallEngine:
    """The collectives of one group. All methods but `begin` run on the communication thread."""

    def __init__(self, world: World, selection: Selection, name: str) -> None:
        self._world, self._selection, self._name = world, selection, name
        self.timeout_s = world.timeout_s
        """Of calls that have none of their own."""
        self.begun = 0
        """Calls that have run, or begun to: the sequence number of the next one."""
        self._memory: dict[tuple[str, torch.device], Tensor] = {}
        self._prepared = Prepared(world, self._bind)  # its schedules were proven when they were chosen
        self._plan = lru_cache(KEPT)(self._new_plan)

    def begin(self, call: Call, *, waits: bool = False) -> Future[None]:
        """Run `call` after all earlier ones. Returns at once, or when it is done if the caller `waits` anyway."""
        device, comm_thread = call.kind.device, self._world.comm_thread
        if device.type == "cuda":
            self._world.connect(device)
            waits = False
        return (comm_thread.run if waits else comm_thread.submit)(partial(self._run, call))

    def _run(self, call: Call) -> None:
        number, transport, recorder = self.begun, self._world.transport, self._world.recorder
        self.begun += 1
        if call.timeout_s is not None:
            transport.timeout_s = call.timeout_s
        try:
            with torch.inference_mode():  # the caller's tensors may be made under it
                plan, collective = self._plan(call.kind), call.kind.traits.collective
                tag = Tag(number, collective, plan.number ^ (number * SPREAD & 0xFFFFFFFF))
                with within_range(recorder, collective, step=number, numel=plan.numel, schedule=plan.schedule):
                    for part in plan.parts:
                        _carry(part, call, tag, recorder)
                    for target, row in call.copies:
                        target.copy_(row.view(target.dtype).view(target.shape))
            if call.kind.device.type == "cuda":
                for row in (*call.put, *call.take):  # they may be freed on another stream
                    row.record_stream(torch.cuda.current_stream(row.device))
        except TransportError as error:
            limit = f", with a timeout of {transport.timeout_s:g} s" if isinstance(error, DeadlineExceeded) else ""
            error.what = f"{call.kind.traits}, sequence number {number} of group {self._name}{limit}: {error.what}"
            raise
        finally:
            if call.timeout_s is not None:
                transport.timeout_s = self.timeout_s

    def _new_plan(self, kind: Kind) -> _Plan:
        traits, size = kind.traits, self._world.size
        slot_nbytes = slice_nbytes(traits.collective, size, kind.device.type)
        schedule = self._selection.choose(traits.collective, traits.root, min(traits.nbytes, slot_nbytes))
        number = zlib.crc32(f"{traits} {schedule.name} {kind.divisor} {kind.is_scaled}".encode())
        slices = kind.slices(slot_nbytes // traits.wire_dtype.itemsize)
        return _Plan(schedule.name, number, sum(kind.sizes), [self._part(schedule, kind, each) for each in slices])

    def _part(self, schedule: Schedule, kind: Kind, part: Slice) -> _Part:
        traits, places = kind.traits, part.places
        memory = _Memory(part.shape, traits.operation, traits.wire_dtype, kind.device)
        program, wire = self._prepared.get(schedule, None, memory)
        lands = kind.divisor == 1 and part.shape == part.sizes and places[-1] >= LANDING_NUMEL
        landings = sorted(program.landings, key=lambda each: each.begin) if lands and self._can_land(kind) else []
        put, take, land = [], [], []
        for slot, row, first in kind.put:
            put.append(_copy(wire, row, places[slot], places[slot] + part.sizes[slot], first + part.lo))
        for slot, row, first in kind.take:
            begin, stop, ahead = places[slot], places[slot] + part.sizes[slot], first + part.lo - places[slot]
            for target, lo, hi in landings:
                if begin <= lo < hi <= stop:
                    take.append(_copy(wire, row, begin, lo, begin + ahead))
                    land.append((target, _copy(wire, row, lo, hi, lo + ahead)))
                    begin = hi
            take.append(_copy(wire, row, begin, stop, begin + ahead))
        return _Part(program, put, [each for each in take if each.begin < each.end], land)

    def _can_land(self, kind: Kind) -> bool:
        return kind.device.type == "cpu" and self._world.transport.can_move_receives

    def _bind(self, schedule: Schedule, _: Members, memory: _Memory) -> tuple[BoundProgram, Tensor]:
        shape, operation, dtype, device = memory
        ranks, world = range(self._world.size), self._world
        mine = member_program(schedule, ranks, world.rank, len(ranks))  # which remembers schedules
        bounds = bounds_of(shape, schedule.chunks // len(shape))
        wire = self._allocate("wire", bounds[-1], dtype, device)
        scratch = self._allocate("scratch", scratch_numel(mine, bounds[-1], bounds), dtype, device)
        add = None if operation is None else combining(operation)
        return bind(mine, wire, world.transport, scratch, world.comm_thread.streams, bounds=bounds, add=add), wire

    def _allocate(self, purpose: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return [numel] of the memory that all calls share; programs bound to what was too small keep theirs."""
        need = numel * dtype.itemsize
        memory = self._memory.get((purpose, device))
        if memory is None or memory.numel() < need:
            size = max(need, 2 * WIRE_NBYTES[device.type], 0 if memory is None else 2 * memory.numel())
            memory = self._memory[purpose, device] = self._world.transport.allocate(size, torch.uint8, device)
        return memory[:need].view(dtype)


def _carry(part: _Part, call: Call, tag: Tag, recorder: Recorder | None) -> None:
    """Write this rank's contribution to the wire, run the schedule, and read the result."""
    for wire, row, begin, end in part.put:
        wire.copy_(call.put[row][begin:end])
        if call.factor is not None:
            wire.mul_(call.factor)
    for target, copy in part.land:
        point(target, call.take[copy.row][copy.begin : copy.end])
    try:
        part.program.run(tag, recorder)
    finally:
        for target, copy in part.land:
            point(target, copy.wire)
    for wire, row, begin, end in part.take:
        if (divisor := call.kind.divisor) > 1:
            is_exact = wire.is_floating_point() or wire.is_complex()
            wire.div_(divisor, rounding_mode=None if is_exact else "trunc")
        call.take[row][begin:end].copy_(wire)


def _copy(wire: Tensor, row: int, begin: int, end: int, first: int) -> _Copy:
    """Return the copy of elements [begin, end) of the wire, from or to element `first` of a row on."""
    return _Copy(wire[begin:end], row, first, first + end - begin)
