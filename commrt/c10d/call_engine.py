# SPDX-License-Identifier: Apache-2.0
"""Runs the collectives of one process group, in order, on the communication thread of its world.

A call of any size travels through one wire of fixed size, slice by slice. So schedules are bound to memory once per
size, whatever tensors come. On a CPU the wire fits the cache, so copies to and from it cost little.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.c10d.call import Call, Range, Slice, bounds_of
from commrt.errors import DeadlineExceeded, TransportError
from commrt.kernels.dispatch import combining
from commrt.pricing.selection import WIRE_NBYTES, Selection, slice_nbytes
from commrt.program import member_program
from commrt.runtime.executor import BoundProgram, bind, scratch_numel
from commrt.runtime.recording import within_range
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
"""Bound programs that are kept: those of the sizes seen last."""


class _Landing(NamedTuple):
    target: Tensor
    slot: int
    range: Range
    """Of the slot."""
    home: Tensor
    """What `target` is between two calls: a part of the wire."""


class _Bound(NamedTuple):
    program: BoundProgram
    wire: Tensor
    landings: Sequence[_Landing]
    rest: Sequence[Sequence[Range]]
    """[slots] what no landing receives."""

    @contextmanager
    def landing(self, call: Call, part: Slice) -> Iterator[Sequence[Sequence[Range]] | None]:
        """Receive into the caller's rows in the body, where that saves a copy; give what remains to be read."""
        if call.divisor > 1 or part.shape != part.sizes or part.places[-1] < LANDING_NUMEL or not self.landings:
            yield None
            return
        rows = {slot: row[begin + part.lo :] for slot, row, begin in call.take}
        landed = [each for each in self.landings if each.slot in rows]
        for target, slot, (begin, end), _ in landed:
            point(target, rows[slot][begin:end])
        try:
            yield self.rest
        finally:
            for each in landed:
                point(each.target, each.home)


class CallEngine:
    """The collectives of one group. All methods but `begin` run on the communication thread."""

    def __init__(self, world: World, selection: Selection, name: str) -> None:
        self._world, self._selection, self._name = world, selection, name
        self.timeout_s = world.timeout_s
        """Of calls that have none of their own."""
        self.begun = 0
        """Calls that have run, or begun to: the sequence number of the next one."""
        self._memory: dict[tuple[str, torch.device], Tensor] = {}
        self._bound = lru_cache(KEPT)(self._bind)

    def begin(self, call: Call, *, waits: bool = False) -> Future[None]:
        """Run `call` after all earlier ones. Returns at once, or when it is done if the caller `waits` anyway."""
        if call.device.type == "cuda":
            self._world.connect(call.device)
        elif waits:
            return self._world.comm_thread.run(lambda: self._run(call))
        return self._world.comm_thread.submit(lambda: self._run(call))

    def _run(self, call: Call) -> None:
        number, transport = self.begun, self._world.transport
        self.begun += 1
        if call.timeout_s is not None:
            transport.timeout_s = call.timeout_s
        try:
            with torch.inference_mode():  # the caller's tensors may be made under it
                self._run_slices(call, number)
        except TransportError as error:
            limit = f", with a timeout of {transport.timeout_s:g} s" if isinstance(error, DeadlineExceeded) else ""
            error.what = f"{call.traits}, sequence number {number} of group {self._name}{limit}: {error.what}"
            raise
        finally:
            if call.timeout_s is not None:
                transport.timeout_s = self.timeout_s

    def _run_slices(self, call: Call, number: int) -> None:
        traits, recorder = call.traits, self._world.recorder
        slot_nbytes = slice_nbytes(traits.collective, self._world.size, call.device.type)
        schedule = self._selection.choose(traits.collective, traits.root, min(traits.nbytes, slot_nbytes))
        kind = traits.number(f"{schedule.name} {call.divisor} {call.factor is not None}")
        tag = Tag(number, traits.collective, kind ^ (number * SPREAD & 0xFFFFFFFF))
        with within_range(recorder, traits.collective, step=number, numel=sum(call.sizes), schedule=schedule.name):
            for part in call.slices(slot_nbytes // traits.wire_dtype.itemsize):
                bound = self._bound(schedule, part.shape, traits.operation, traits.wire_dtype, call.device)
                call.pack(bound.wire, part)
                with bound.landing(call, part) as rest:
                    bound.program.run(tag, recorder)
                call.unpack(bound.wire, part, rest)
            call.finish()
        if call.device.type == "cuda":
            for _, row, _ in (*call.put, *call.take):  # they may be freed on another stream
                row.record_stream(torch.cuda.current_stream(call.device))

    def _bind(
        self,
        schedule: Schedule,
        shape: tuple[int, ...],
        operation: str | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Bound:
        ranks = range(self._world.size)
        mine = member_program(schedule, ranks, self._world.rank, len(ranks))  # which remembers schedules
        bounds = bounds_of(shape, schedule.chunks // len(shape))
        wire = self._allocate("wire", bounds[-1], dtype, device)
        scratch = self._allocate("scratch", scratch_numel(mine, bounds[-1], bounds), dtype, device)
        add = None if operation is None else combining(operation)
        streams = self._world.comm_thread.streams
        bound = bind(mine, wire, self._world.transport, scratch, streams, bounds=bounds, add=add)
        can_land = device.type == "cpu" and self._world.transport.can_move_receives
        landings = list(_landings(bound, wire, shape)) if can_land else []
        taken = [[each.range for each in landings if each.slot == slot] for slot in range(len(shape))]
        rest = [_complement(ranges, size) for ranges, size in zip(taken, shape, strict=True)]
        return _Bound(bound, wire, landings, rest)

    def _allocate(self, purpose: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return [numel] of the memory that all calls share; programs bound to what was too small keep theirs."""
        need = numel * dtype.itemsize
        memory = self._memory.get((purpose, device))
        if memory is None or memory.numel() < need:
            size = max(need, 2 * WIRE_NBYTES[device.type], 0 if memory is None else 2 * memory.numel())
            memory = self._memory[purpose, device] = self._world.transport.allocate(size, torch.uint8, device)
        return memory[:need].view(dtype)


def _landings(bound: BoundProgram, wire: Tensor, shape: Sequence[int]) -> Iterator[_Landing]:
    """Yield the landings of `bound` that lie within one slot."""
    places = list(accumulate(shape, initial=0))
    for target, begin, end in bound.landings:
        slot = bisect_right(places, begin) - 1
        if begin < end <= places[slot + 1]:
            inside = begin - places[slot], end - places[slot]
            yield _Landing(target, slot, inside, wire[begin:end])


def _complement(ranges: Sequence[Range], size: int) -> list[Range]:
    """Return what is left of [0, size) without `ranges`, which do not overlap.

    >>> _complement([(4, 6), (0, 2)], 8)
    [(2, 4), (6, 8)]
    """
    bounds = [0, *(bound for each in sorted(ranges) for bound in each), size]
    return [(begin, end) for begin, end in zip(bounds[::2], bounds[1::2], strict=True) if begin < end]
