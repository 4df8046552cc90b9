# SPDX-License-Identifier: Apache-2.0
"""Runs the collectives of one process group, in order, on the communication thread.

A *wire* is a row of *slots*. A slot holds a piece that moves as a whole: a rank's share in an
all-gather, say, or the whole buffer in a broadcast. A call of any size travels through one wire of
fixed size, in slices, one after the other; a slot may be empty in the last ones. So schedules are
bound to memory once per size, whatever tensors come, and on a CPU the wire fits the cache. All
ranks have the same slots at the same places, of the same sizes, whatever the layout of their
tensors: multiples of 16 elements, or bytes of what only moves. But only the two ends of a transfer
know its size in an all-to-all. There a slot has exactly that size, so two ends that differ notice
it, and is empty at other ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.c10d.call import Call, Kind
from commrt.errors import DeadlineExceeded, TransportClosed, TransportError
from commrt.kernels.dispatch import combining
from commrt.kernels.layout import GRANULE, padded
from commrt.pricing.selection import Selection
from commrt.pricing.slices import WIRE_NBYTES, slice_nbytes
from commrt.program import chunk_bounds, member_program
from commrt.runtime.executor import BoundProgram, Scratch, bind
from commrt.runtime.prepared import Prepared
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.threads.future import Future
from commrt.threads.recording import NOTHING, Fact, Recorder, within_range
from commrt.transport.channel import SMALL_NBYTES
from commrt.transport.protocol import Tag, point

LANDING_NUMEL = 1 << 15
"""Elements of a slice from which receiving into the caller's memory takes less than a copy."""
SPREAD = 0x9E3779B1
"""Makes sequence numbers differ in many bits, so that a call of one number is taken for no call of
another.
"""


class _Copy(NamedTuple):
    """A part of the wire, and the elements of a row of a call that are copied from or to it."""

    wire: Tensor
    row: int
    elements: slice


class _Bound(NamedTuple):
    program: BoundProgram
    wire: Tensor
    """[sum of the sizes of all slots]"""


class _Part(NamedTuple):
    """What a slice of a kind of call needs."""

    program: BoundProgram
    put: Sequence[_Copy]
    take: Sequence[_Copy]
    land: Sequence[tuple[Tensor, _Copy]]
    """Receives that go into the caller's rows, where that saves a copy, and the part of the wire
    they go to else.
    """


class _Plan(NamedTuple):
    schedule: str
    number: int
    """32 bits that tell this kind of call from others, on all ranks."""
    numel: int
    parts: Sequence[_Part]


class CallEngine:
    """The collectives of one group. Any thread may `begin` one, and the group sets `timeout_s`.

    All else runs on the communication thread, or one at a time on threads that wait for it.
    """

    def __init__(self, world: World, selection: Selection, name: str) -> None:
        self._world = world
        self._selection = selection
        self._name = name
        self.timeout_s = world.timeout_s
        """Of calls that have none of their own."""
        self.begun = 0
        """Calls that have run, or begun to: the sequence number of the next one."""
        self._memory = Scratch(self._allocate)
        self._plans = Prepared[_Plan](world)
        # programs that plans share; their schedules were proven when they were chosen
        self._programs = Prepared[_Bound](world)

    def begin(
        self, call: Call, timeout_s: float | None = None, *, waits: bool = False
    ) -> Future[None] | None:
        """Run `call` after all earlier ones; return at once, or if the caller `waits` anyway None,
        when it is done.
        """
        device = call.kind.device
        comm_thread = self._world.comm_thread
        if device.type == "cuda":
            self._world.connect(device)
            waits = False
        task = partial(self._run, call, timeout_s)
        return comm_thread.call(task) if waits else comm_thread.submit(task)

    def _run(self, call: Call, timeout_s: float | None) -> None:
        number = self.begun
        transport = self._world.transport
        comm_thread = self._world.comm_thread
        self.begun += 1
        if timeout_s is not None:
            transport.timeout_s = timeout_s
        try:
            # The caller's tensors may be made under it. torch.inference_mode() takes four times as
            # long.
            with torch._C._InferenceMode(True):  # noqa: SLF001
                plan = self._plans.known(call.kind)
                if plan is None:
                    plan = self._plans.keep(self._plan(call.kind), call.kind)
                collective = call.kind.collective
                tag = Tag(number, collective, plan.number ^ (number * SPREAD & 0xFFFFFFFF))
                listener = comm_thread.listener
                facts: dict[str, Fact] = {"numel": plan.numel, "schedule": plan.schedule}
                with (
                    NOTHING
                    if listener is None
                    else within_range(listener, collective, step=number, **facts)
                ):
                    for part in plan.parts:
                        _carry(part, call, tag, listener)
                    for target, row in call.copies:
                        target.copy_(row.view(target.dtype).view(target.shape))
            if call.kind.device.type == "cuda":
                for row in (*call.put, *call.take):  # they may be freed on another stream
                    row.record_stream(torch.cuda.current_stream(row.device))
        except TransportError as error:
            limit = (
                f", with a timeout of {transport.timeout_s:g} s"
                if isinstance(error, DeadlineExceeded)
                else ""
            )
            # why it was closed
            ended = comm_thread.failure if isinstance(error, TransportClosed) else None
            why = f", as {ended.what}" if isinstance(ended, TransportClosed) else ""
            error.what = (
                f"{call.kind}, sequence number {number} of group {self._name}{limit}:"
                f" {error.what}{why}"
            )
            raise
        finally:
            if timeout_s is not None:
                transport.timeout_s = self.timeout_s

    def _plan(self, kind: Kind) -> _Plan:
        slot_nbytes = slice_nbytes(kind.collective, self._world.size, kind.device.type)
        schedule = self._selection.choose(
            kind.collective, kind.root, min(kind.piece_nbytes, slot_nbytes)
        )
        number = zlib.crc32(f"{kind} {schedule.name} {kind.divisor} {kind.is_scaled}".encode())
        slot_numel = slot_nbytes // kind.wire_dtype.itemsize
        begins = range(0, max(kind.sizes, default=0), slot_numel)
        parts = [self._part(schedule, kind, lo, slot_numel) for lo in begins]
        return _Plan(schedule.name, number, sum(kind.sizes), parts)

    def _part(self, schedule: Schedule, kind: Kind, lo: int, slot_numel: int) -> _Part:
        """Return what the slice needs that has at most `slot_numel` elements of each piece, from
        `lo` on.
        """
        sizes = tuple([min(max(size - lo, 0), slot_numel) for size in kind.sizes])
        shape = tuple(map(padded, sizes)) if kind.is_even else sizes
        places = [*accumulate(shape, initial=0)]
        key = schedule, shape, kind.operation, kind.wire_dtype, kind.device
        bound = self._programs.known(*key)
        if bound is None:
            bound = self._programs.keep(self._bind(*key), *key)
        program, wire = bound
        lands = (
            kind.divisor == 1
            and shape == sizes
            and places[-1] >= LANDING_NUMEL
            and kind.device.type == "cpu"
        )
        lands = lands and self._world.transport.can_move_receives
        landings = sorted(program.landings, key=lambda each: each.begin) if lands else []
        put = [
            _copy(wire, row, places[at], places[at] + sizes[at], first + lo)
            for at, row, first in kind.put
        ]
        take = []
        land = []
        for slot, row, first in kind.take:
            begin = places[slot]
            stop = places[slot] + sizes[slot]
            ahead = first + lo - places[slot]
            for target, low, high in landings:
                if begin <= low < high <= stop:
                    take.append(_copy(wire, row, begin, low, begin + ahead))
                    land.append((target, _copy(wire, row, low, high, low + ahead)))
                    begin = high
            take.append(_copy(wire, row, begin, stop, begin + ahead))
        return _Part(program, put, [each for each in take if each.wire.numel()], land)

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


def _carry(part: _Part, call: Call, tag: Tag, recorder: Recorder | None) -> None:
    """Write this rank's contribution to the wire, run the schedule, and read the result."""
    for wire, row, elements in part.put:
        wire.copy_(call.put[row][elements])
        if call.factor is not None:
            wire.mul_(call.factor)
    for target, copy in part.land:
        point(target, call.take[copy.row][copy.elements])
    try:
        part.program.run(tag, recorder)
    finally:
        for target, copy in part.land:
            point(target, copy.wire)
    for wire, row, elements in part.take:
        if (divisor := call.kind.divisor) > 1:
            is_exact = wire.is_floating_point() or wire.is_complex()
            # of the device, as a GPU multiplies by the reciprocal of a number of the host
            number = torch.full((), divisor, device=wire.device)
            wire.div_(number, rounding_mode=None if is_exact else "trunc")
        call.take[row][elements].copy_(wire)


def _copy(wire: Tensor, row: int, begin: int, end: int, first: int) -> _Copy:
    """Return the copy of elements [begin, end) of the wire,
    from or to element `first` of a row on.
    """
    return _Copy(wire[begin:end], row, slice(first, first + end - begin))
