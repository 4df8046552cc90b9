# SPDX-License-Identifier: Apache-2.0
"""Prepared exchanges: proven, compared between ranks and bound to memory when they are new, and then only run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor

from commrt.errors import UsageError
from commrt.kernels.layout import GRANULE
from commrt.kernels.plain_torch import mix_into, reduce_into
from commrt.program import chunk_bounds, member_program
from commrt.proof.replay import ends_alike
from commrt.runtime.executor import BoundProgram, Scratch, bind
from commrt.runtime.membership import Membership
from commrt.schedule import ADD, MIX, Algorithm, Schedule
from commrt.threads.comm_thread import RecoveredError
from commrt.threads.recording import Recorder
from commrt.transport.protocol import Tag, Transport

T = TypeVar("T")
KEPT = 256
"""Exchanges that are kept, unless a kind says otherwise: those that were prepared last."""
RUNS_KEPT = 1024
"""Programs of `World.run`."""
COMPARISONS_KEPT = 256
"""Comparisons that each set of ranks remembers."""
SCHEDULES_KEPT = 16

Members = tuple[int, ...] | None
"""``members[i]`` plays rank i of a schedule; None if the ranks of the world play themselves."""


class HasMembership(Protocol):
    """A world, as far as it says which generation runs."""

    membership: Membership


class Claim(NamedTuple):
    """What `ranks` compare before an exchange of theirs runs for the first time."""

    ranks: tuple[int, ...]
    text: str


Compare = Callable[[Claim, Schedule, int], None]
"""(claim, schedule, step): raises unless all ranks of the claim come with it. On the communication thread."""


class Prepared(Generic[T]):
    """The exchanges of one kind, each made once from a schedule, the members that play it, and the memory it uses.

    `prove` sees each schedule once, and `compare` each claim once, before `bind` makes the exchange. Whoever finds one
    here only runs it. The ranks of a claim compare, remember and forget the same claims in the same order, whatever
    each of them has bound: when claims are forgotten, so is all that is bound, so what is bound was compared. A new
    generation has other connections, and perhaps a rank that was not there before: it begins with nothing.
    """

    def __init__(
        self,
        world: HasMembership,
        bind: Callable[[Schedule, Members, Any], T],
        *,
        prove: Callable[[Schedule], object] = lambda _: None,
        claim: Callable[[Schedule, Members, Any], Claim | None] = lambda *_: None,
        compare: Compare = lambda *_: None,
        kept: int = KEPT,
    ) -> None:
        self._world, self._bind, self._claim, self._compare, self._kept = world, bind, claim, compare, kept
        self.prove = lru_cache(KEPT)(prove)
        """Raises unless a schedule does what it must. On any thread."""
        self.since: object
        """Another object each time that something is let go of."""
        self.forget()

    def forget(self) -> None:
        """Let go of all memory, and begin anew; on all ranks alike, if they compare."""
        self.since = object()
        self._generation = self._world.membership.number
        self._bound: dict[tuple[Schedule, Members, Hashable], T] = {}
        self._compared: dict[tuple[int, ...], set[str]] = {}

    def forget_bound(self) -> None:
        """Let go of all memory. A rank may do so alone."""
        self.since = object()
        self._bound.clear()

    def forget_one(self, schedule: Schedule, members: Members, memory: Hashable) -> None:
        """Let go of one exchange, if it is there. A rank may do so alone, on any thread."""
        self.since = object()
        self._bound.pop((schedule, members, memory), None)

    def known(self, schedule: Schedule, members: Members, memory: Hashable) -> T | None:
        """Return the exchange if it is prepared, else None. On any thread."""
        is_current = self._generation == self._world.membership.number
        return self._bound.get((schedule, members, memory)) if is_current else None

    def get(self, schedule: Schedule, members: Members, memory: Hashable, step: int = 0) -> T:
        """Return the exchange, prepared now if it is new; `step` is for `compare`. On the communication thread."""
        if self._generation == self._world.membership.number:  # as `known` asks, at one call less
            found = self._bound.get((schedule, members, memory))
            if found is not None:
                return found
        return self._prepare(schedule, members, memory, step)

    def _prepare(self, schedule: Schedule, members: Members, memory: Any, step: int) -> T:
        if self._generation != self._world.membership.number:
            self.forget()
        self.prove(schedule)
        if claim := self._claim(schedule, members, memory):
            self._compare_once(claim, schedule, step)
        bound = self._bind(schedule, members, memory)
        while len(self._bound) >= self._kept:
            self.since = object()
            self._bound.pop(next(iter(self._bound)), None)
        self._bound[schedule, members, memory] = bound
        return bound

    def _compare_once(self, claim: Claim, schedule: Schedule, step: int) -> None:
        known = self._compared.setdefault(claim.ranks, set())
        if claim.text in known:
            return
        self._compare(claim, schedule, step)
        if len(known) == COMPARISONS_KEPT:  # all ranks forget at the same call
            known.clear()
            self.forget_bound()
        known.add(claim.text)


class Traits(NamedTuple):
    """What a comparison needs of a schedule."""

    digest: str
    ranks: tuple[int, ...]
    """Those that send or receive."""
    combines: frozenset[int]


@lru_cache(SCHEDULES_KEPT)
def traits_of(schedule: Schedule) -> Traits:
    """Return the traits of `schedule`. They are remembered by object, which is kept alive meanwhile."""
    ranks: set[int] = set()
    combines: set[int] = set()
    for step in schedule.checked_steps():
        moved = step.canonical()
        ranks.update(chain(moved.src.tolist(), moved.dst.tolist()))
        combines.update(moved.combine.tolist())
    return Traits(schedule.digest(), tuple(sorted(ranks)), frozenset(combines))


_ends_alike = lru_cache(SCHEDULES_KEPT)(ends_alike)

Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
"""Where a buffer lies, and how: ``set_``, ``resize_`` and ``buffer.data = ...`` change it."""


class _Run(NamedTuple):
    program: BoundProgram
    place: Place
    until: ref[Tensor]
    """Lets go of the program when the buffer dies."""


class PreparedRuns:
    """The programs of `World.run`. The latest are kept, as long as their buffers live; all share scratch memory.

    Memory that a buffer has left, by ``buffer.data = ...``, is freed when the buffer runs again, or dies. An error that
    all ranks raise alike, before anything is sent, leaves the world usable.
    """

    def __init__(self, transport: Transport, world: HasMembership, compare: Compare) -> None:
        self._transport, self._world = transport, world
        self._scratch = Scratch()
        self._prepared = Prepared(world, self._bind, claim=self._claim, compare=compare, kept=RUNS_KEPT)

    def known(self, schedule: Schedule, buffer: Tensor) -> BoundProgram | None:
        """Return what `run` would only run, else None. On any thread."""
        found = self._prepared.known(schedule, None, ref(buffer))
        if found is None or found.place != (buffer.data_ptr(), buffer.shape, buffer.stride(), buffer.dtype):
            return None
        return found.program

    def require_possible(self, schedule: Schedule, buffer: Tensor) -> None:
        """Raise `UsageError` if `schedule` cannot run on `buffer`. On any thread."""
        _require_row(buffer)
        if self.known(schedule, buffer) is None:
            self._transport.allocate(0, buffer.dtype, buffer.device)  # raises for a device or dtype that it cannot move
            _require_arithmetic(buffer.dtype, traits_of(schedule).combines)

    def run(self, schedule: Schedule, buffer: Tensor, tag: Tag, recorder: Recorder | None = None) -> None:
        """Run `schedule`, of all ranks, on `buffer` [numel]. On the communication thread."""
        program = self.known(schedule, buffer)
        if program is None:
            self._prepared.forget_one(schedule, None, ref(buffer))  # it may be bound to memory that the buffer has left
            program = self._prepared.get(schedule, None, ref(buffer)).program
        program.run(tag, recorder)

    def forget(self) -> None:
        """Let go of all memory."""
        self._prepared.forget()
        self._scratch.clear()

    def _claim(self, schedule: Schedule, _: Members, memory: ref[Tensor]) -> Claim | None:
        """Return what the ranks that send or receive compare; None on others, which need not come."""
        digest, ranks, _combines = traits_of(schedule)
        if lost := sorted({*ranks} - {*self._world.membership.ranks}):
            what = f"{schedule.name} names ranks {lost}, which are lost"
            do = "build a schedule for the ranks that are left, with schedule.over(world.members, world=world.size)"
            raise RecoveredError(UsageError(f"{what}: {do}"))
        buffer = cast("Tensor", memory())
        return Claim(ranks, f"{digest} {buffer.numel()} {buffer.dtype}") if self._transport.rank in ranks else None

    def _bind(self, schedule: Schedule, _: Members, memory: ref[Tensor]) -> _Run:
        buffer, ranks = cast("Tensor", memory()), schedule.ranks
        if self._transport.rank in traits_of(schedule).ranks:
            _require_equal_chunks(schedule, buffer.numel())
        row = buffer.detach()
        mine = member_program(schedule, range(ranks), self._transport.rank, ranks)  # which remembers schedules
        program = bind(mine, row, self._transport, self._scratch, bounds=cut(schedule, buffer))
        place = buffer.data_ptr(), buffer.shape, buffer.stride(), buffer.dtype
        return _Run(program, place, ref(buffer, lambda _: self._prepared.forget_one(schedule, None, memory)))


def cut(schedule: Schedule, row: Tensor) -> list[int]:
    """Return the bounds of the chunks of `row`, which are equal if it divides."""
    return chunk_bounds(row.numel(), schedule.chunks, granule=GRANULE if row.numel() % schedule.chunks else 1)


def schedule_of(algorithm: Algorithm, step: int, ranks: int) -> Schedule:
    """Return the schedule of training step `step`; raises `UsageError` if it is none of so many `ranks`."""
    schedule = algorithm.schedule(step, ranks)
    if not isinstance(schedule, Schedule) or schedule.ranks != ranks:
        raise UsageError(f"{algorithm} made {schedule!r:.80} for {ranks} ranks, which is no schedule of them")
    return schedule


def check_run(schedule: Schedule, buffer: Tensor, tag: Tag, ranks: int) -> None:
    """Raise `UsageError` unless `schedule` is one of so many `ranks`, and the others are what they must be."""
    check_tag(tag)
    if not isinstance(buffer, Tensor):
        raise UsageError(f"a buffer must be a tensor, not a {type(buffer).__name__}: make one with torch.tensor()")
    if not isinstance(schedule, Schedule):
        raise UsageError(f"{schedule!r} is no schedule: an algorithm makes one with its schedule(step, ranks)")
    if schedule.ranks != ranks:
        raise UsageError(
            f"{schedule.name} is a schedule of {schedule.ranks} ranks and the world has {ranks}: say which of "
            f"them play it with schedule.over(ranks, world={ranks})"
        )


def check_tag(tag: Tag) -> None:
    """Raise `UsageError` unless `tag` is one."""
    if not isinstance(tag, Tag):
        raise UsageError(f"tag={tag!r:.80}: give a commrt.Tag(step, bucket), or leave it out")


def _require_equal_chunks(schedule: Schedule, numel: int) -> None:
    if numel % schedule.chunks and not _ends_alike(schedule):
        what = f"{numel} elements do not divide into {schedule.chunks} equal chunks, which {schedule.name} needs"
        whole = -(-numel // schedule.chunks) * schedule.chunks
        raise RecoveredError(UsageError(f"run: {what}: pad the buffer to {whole} elements"))


def _require_row(buffer: Tensor) -> None:
    if buffer.layout != torch.strided or buffer.dim() != 1 or not buffer.is_contiguous():
        raise UsageError(
            f"a buffer must be one contiguous row, not {buffer.layout} of shape {tuple(buffer.shape)}, perhaps with "
            "gaps: flatten it first"
        )
    if buffer.is_inference():
        raise UsageError(
            "the buffer was made under torch.inference_mode() and cannot be written: clone() it outside of that"
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
    except RuntimeError as error:
        raise UsageError(f"this schedule cannot run on {dtype} ({error}): convert the buffer first") from error
