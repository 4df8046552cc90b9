# SPDX-License-Identifier: Apache-2.0
"""The programs of World.run: checked, compared once, bound to their buffers, and then only run.

They write the callers' buffers, and scratch memory of their own. See `PreparedRuns` for threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from commrt.errors import UsageError
from commrt.kernels.plain_torch import mix_into, reduce_into
from commrt.program import member_program
from commrt.proof.replay import ends_alike
from commrt.runtime.comparison import Claim
from commrt.runtime.executor import BoundProgram, Scratch, bind, cut
from commrt.runtime.prepared import HasMembership, Prepared
from commrt.runtime.remade_schedules import RemadeSchedules
from commrt.runtime.schedule_traits import SCHEDULES_KEPT, traits_of
from commrt.runtime.tags import check_tag
from commrt.schedule import ADD, MIX, Schedule, no_schedule
from commrt.threads.comm_thread import RecoveredError
from commrt.threads.recording import Recorder
from commrt.transport.protocol import Tag, Transport

RUNS_KEPT = 1024
"""Programs of `World.run`."""

_ends_alike = lru_cache(SCHEDULES_KEPT)(ends_alike)

Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
"""Where a buffer lies, and how: ``set_``, ``resize_`` and ``buffer.data = ...`` change it."""


class _Run(NamedTuple):
    program: BoundProgram
    place: Place
    until: ref[Tensor]
    """Lets go of the program when the buffer dies."""


class PreparedRuns:
    """The programs of `World.run`; the latest are kept while their buffers live, and share scratch.

    Memory that a buffer has left, by ``buffer.data = ...``, is freed when the buffer runs again, or
    dies. An error that all ranks raise alike, before anything is sent, leaves the world usable.

    `run` is for the communication thread, or the caller's in its place, and alone prepares; `known`
    and `require_possible` are for any thread. The world calls `forget` when no task runs.
    """

    def __init__(
        self, transport: Transport, world: HasMembership, compare: Callable[[Claim], object]
    ) -> None:
        self._transport = transport
        self._world = world
        self._compare = compare
        self._scratch = Scratch()
        self._remade = RemadeSchedules()
        self._prepared = Prepared[_Run](world, RUNS_KEPT)

    def known(self, schedule: Schedule, buffer: Tensor) -> BoundProgram | None:
        """Return what `run` would only run, else None."""
        found = self._prepared.known(schedule, ref(buffer))
        # `_place_of`, at one call less
        if found is None or found.place != (
            buffer.data_ptr(),
            buffer.shape,
            buffer.stride(),
            buffer.dtype,
        ):
            return None
        return found.program

    def require_possible(self, schedule: Schedule, buffer: Tensor) -> None:
        """Raise `UsageError` if `schedule` cannot run on `buffer`."""
        _require_row(buffer)
        if self.known(schedule, buffer) is None:
            # raises for a device or dtype that it cannot move
            self._transport.allocate(0, buffer.dtype, buffer.device)
            _require_arithmetic(buffer.dtype, traits_of(schedule).combines)

    def run(
        self, schedule: Schedule, buffer: Tensor, tag: Tag, recorder: Recorder | None = None
    ) -> None:
        """Run `schedule`, of all ranks, on `buffer` [numel]; prepares a new one."""
        program = self.known(schedule, buffer) or self._prepare(schedule, buffer)
        program.run(tag, recorder)

    def forget(self) -> None:
        """Let go of all memory."""
        self._prepared.forget()
        self._scratch.clear()

    def _prepare(self, schedule: Schedule, buffer: Tensor) -> BoundProgram:
        # it may be bound to memory that the buffer has left
        self._prepared.forget_one(schedule, ref(buffer))
        digest, ranks, _combines = traits_of(schedule)
        tells = self._transport.rank == self._world.membership.ranks[0]
        self._remade.see(schedule, "the caller of world.run()", tells=tells)
        self._require_members(schedule, ranks)
        if self._transport.rank in ranks:  # others need not come
            claim = Claim(ranks, f"{digest} {buffer.numel()} {buffer.dtype}")
            self._prepared.compare_once(claim, self._compare)
            _require_equal_chunks(schedule, buffer.numel())
        run = self._bind(schedule, buffer, ref(buffer))
        return self._prepared.keep(run, schedule, ref(buffer)).program

    def _require_members(self, schedule: Schedule, ranks: Sequence[int]) -> None:
        if lost := sorted({*ranks} - {*self._world.membership.ranks}):
            what = f"{schedule.name} names ranks {lost}, which are lost"
            do = (
                "build a schedule for the ranks that are left, with schedule.over(world.members,"
                " world=world.size)"
            )
            raise RecoveredError(UsageError(f"{what}: {do}"))

    def _bind(self, schedule: Schedule, buffer: Tensor, key: ref[Tensor]) -> _Run:
        ranks = schedule.ranks
        mine = member_program(schedule, range(ranks), self._transport.rank, ranks)
        bounds = cut(schedule, buffer)
        program = bind(mine, buffer.detach(), self._transport, self._scratch, bounds=bounds)

        def let_go(_: ref[Tensor]) -> None:
            self._prepared.forget_one(schedule, key)  # `_` is dead, and has no hash

        return _Run(program, _place_of(buffer), ref(buffer, let_go))


def _place_of(buffer: Tensor) -> Place:
    return buffer.data_ptr(), buffer.shape, buffer.stride(), buffer.dtype


def check_run(schedule: Schedule, buffer: Tensor, tag: Tag, ranks: int) -> None:
    """Raise `UsageError` for a `schedule` of other `ranks`, a wrong `buffer` or a wrong `tag`."""
    check_tag(tag)
    if not isinstance(buffer, Tensor):
        raise UsageError(
            f"a buffer must be a tensor, not a {type(buffer).__name__}: make one with"
            " torch.tensor()"
        )
    if not isinstance(schedule, Schedule):  # `require_schedule`, at one call less
        raise no_schedule(schedule)
    if schedule.ranks != ranks:
        raise UsageError(
            f"{schedule.name} is a schedule of {schedule.ranks} ranks and the world has {ranks}:"
            f" say which of them play it with schedule.over(ranks, world={ranks})"
        )


def _require_equal_chunks(schedule: Schedule, numel: int) -> None:
    if numel % schedule.chunks and not _ends_alike(schedule):
        what = (
            f"{numel} elements do not divide into {schedule.chunks} equal chunks, which"
            f" {schedule.name} needs"
        )
        whole = -(-numel // schedule.chunks) * schedule.chunks
        raise RecoveredError(UsageError(f"run: {what}: pad the buffer to {whole} elements"))


def _require_row(buffer: Tensor) -> None:
    if buffer.layout != torch.strided or buffer.dim() != 1 or not buffer.is_contiguous():
        raise UsageError(
            f"a buffer must be one contiguous row, not {buffer.layout} of shape"
            f" {tuple(buffer.shape)}, perhaps with gaps: flatten it first"
        )
    if buffer.is_inference():
        raise UsageError(
            "the buffer was made under torch.inference_mode() and cannot be written: clone() it"
            " outside of that"
        )


def _require_arithmetic(dtype: torch.dtype, combines: frozenset[int]) -> None:
    """Raise `UsageError` if torch cannot do on `dtype` what receivers do: try it on one element."""
    try:
        own, received = torch.zeros(2, 1, dtype=dtype, device="cpu")
        own.copy_(received)
        if ADD in combines:
            reduce_into(own, [own, received])
        if MIX in combines:
            mix_into(own, received, 0.5)
    except (RuntimeError, TypeError) as error:  # the latter since torch 2.15
        raise UsageError(
            f"this schedule cannot run on {dtype} ({error}): convert the buffer first"
        ) from error
