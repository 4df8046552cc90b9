# SPDX-License-Identifier: Apache-2.0
"""Schedules that were bound to callers' buffers: bound once, and then only run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import finalize

import torch
from torch import Tensor

from commrt.kernels.layout import GRANULE
from commrt.program import chunk_bounds, program
from commrt.runtime.executor import BoundProgram, bind, scratch_numel
from commrt.schedule import Schedule
from commrt.transport.protocol import Tag, Transport

__all__ = ["PreparedRuns", "cut"]

KEPT = 16
"""Programs that are kept for one buffer."""


@dataclass(slots=True)
class _Known:
    """What is bound to one buffer."""

    place: tuple[int, int]
    """Address and elements: `Tensor.set_` and ``resize_`` change them."""
    programs: dict[int, tuple[Schedule, BoundProgram]] = field(default_factory=dict)
    """By the identity of the schedule."""


class PreparedRuns:
    """The programs of `World.run`. Each is kept as long as its buffer lives and lies where it lay; all share scratch.

    One thread at a time calls `run`, and any thread `has`.
    """

    def __init__(self, transport: Transport, memory_epoch: Callable[[], int]) -> None:
        self._transport, self._epoch_now = transport, memory_epoch
        self._buffers: dict[int, _Known] = {}  # by identity: each is forgotten when its buffer dies
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._memory_epoch = 0  # of all that is bound

    def has(self, schedule: Schedule, buffer: Tensor) -> bool:
        """Return True if `run` has nothing to bind."""
        known = self._buffers.get(id(buffer))
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
            finalize(buffer, self._buffers.pop, id(buffer), None)
        if known is None or known.place != _place(buffer):
            known = self._buffers[id(buffer)] = _Known(_place(buffer))
        return known

    def _bind(self, schedule: Schedule, row: Tensor) -> BoundProgram:
        mine, bounds = program(schedule, self._transport.rank), cut(schedule, row)
        need, key = scratch_numel(mine, row.numel(), bounds), (row.dtype, row.device)
        if key not in self._scratch or self._scratch[key].numel() < need:
            self._scratch[key] = torch.empty(need, dtype=row.dtype, device=row.device)
        return bind(mine, row, self._transport, self._scratch[key], bounds=bounds)


def _place(buffer: Tensor) -> tuple[int, int]:
    return buffer.data_ptr(), buffer.numel()


def cut(schedule: Schedule, row: Tensor) -> list[int]:
    """Return the bounds of the chunks of `row`, which are equal if it divides."""
    return chunk_bounds(row.numel(), schedule.chunks, granule=GRANULE if row.numel() % schedule.chunks else 1)
