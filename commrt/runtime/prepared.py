# SPDX-License-Identifier: Apache-2.0
"""Schedules that were bound to callers' buffers: bound once, and then only run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import finalize, ref

import torch
from torch import Tensor

from commrt.kernels.layout import GRANULE
from commrt.program import chunk_bounds, member_program
from commrt.runtime.executor import BoundProgram, bind, scratch_numel
from commrt.schedule import Schedule
from commrt.transport.protocol import Tag, Transport

__all__ = ["PreparedRuns", "cut"]

KEPT = 16
"""Programs that are kept for one buffer."""


Place = tuple[int, int, torch.dtype]
"""Address, elements and dtype of a buffer: ``set_``, ``resize_`` and ``buffer.data = ...`` change them."""


@dataclass(slots=True)
class _Known:
    """What is bound to one buffer."""

    place: Place
    programs: dict[int, tuple[Schedule, BoundProgram]] = field(default_factory=dict)
    """By the identity of the schedule."""


class PreparedRuns:
    """The programs of `World.run`. Each is kept as long as its buffer lives; all share scratch memory.

    Memory that a buffer has left, by ``buffer.data = ...``, is freed when the buffer runs again, or dies. One thread at
    a time calls `run`, and any thread the rest.
    """

    def __init__(self, transport: Transport, memory_epoch: Callable[[], int]) -> None:
        self._transport, self._epoch_now = transport, memory_epoch
        self._buffers: dict[int, _Known] = {}  # by identity: each is forgotten when its buffer dies
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._memory_epoch = 0  # of all that is bound

    def has(self, schedule: Schedule, buffer: Tensor) -> bool:
        """Return True if `run` has nothing to bind."""
        known = self._buffers.get(id(buffer)) if self._memory_epoch == self._epoch_now() else None
        return known is not None and known.place == _place(buffer) and id(schedule) in known.programs

    def run(self, schedule: Schedule, buffer: Tensor, tag: Tag) -> None:
        """Run `schedule`, of all ranks, on `buffer` [numel]. What was bound in another memory epoch is bound anew."""
        if self._memory_epoch != self._epoch_now():
            self.forget()
            self._memory_epoch = self._epoch_now()
        self._bound(schedule, buffer).run(tag)

    def forget(self) -> None:
        """Let go of all memory."""
        self._buffers.clear()
        self._scratch.clear()

    def forget_one(self, number: int) -> None:
        """Let go of the memory of the buffer with this identity."""
        self._buffers.pop(number, None)

    def _bound(self, schedule: Schedule, buffer: Tensor) -> BoundProgram:
        known = self._known(buffer)
        if id(schedule) not in known.programs:
            if len(known.programs) == KEPT:
                known.programs.clear()
            known.programs[id(schedule)] = schedule, self._bind(schedule, buffer.detach())
        return known.programs[id(schedule)][1]

    def _known(self, buffer: Tensor) -> _Known:
        known = self._buffers.get(id(buffer))
        if known is None:
            finalize(buffer, _forget, ref(self), id(buffer)).atexit = False
        if known is None or known.place != _place(buffer):
            known = self._buffers[id(buffer)] = _Known(_place(buffer))
        return known

    def _bind(self, schedule: Schedule, row: Tensor) -> BoundProgram:
        ranks, bounds = schedule.ranks, cut(schedule, row)
        mine = member_program(schedule, range(ranks), self._transport.rank, ranks)  # which remembers schedules
        need, key = scratch_numel(mine, row.numel(), bounds), (row.dtype, row.device)
        if key not in self._scratch or self._scratch[key].numel() < need:
            self._scratch[key] = torch.empty(need, dtype=row.dtype, device=row.device)
        return bind(mine, row, self._transport, self._scratch[key], bounds=bounds)


def _place(buffer: Tensor) -> Place:
    return buffer.data_ptr(), buffer.numel(), buffer.dtype


def _forget(runs: ref[PreparedRuns], number: int) -> None:
    """Forget the buffer that had this identity; does not keep the programs of other buffers alive."""
    if (here := runs()) is not None:
        here.forget_one(number)


def cut(schedule: Schedule, row: Tensor) -> list[int]:
    """Return the bounds of the chunks of `row`, which are equal if it divides."""
    return chunk_bounds(row.numel(), schedule.chunks, granule=GRANULE if row.numel() % schedule.chunks else 1)
