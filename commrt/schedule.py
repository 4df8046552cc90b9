# SPDX-License-Identifier: Apache-2.0
"""What moves, and to whom, as data.

A `Schedule` is a sequence of `Step` s over a buffer that is cut into equal chunks. A step is a set
of transfers that happen at the same time. Its transfers are stored as columns, so a step of 4,096
ranks is a few arrays. Every transfer of a step reads the state from before the step.

Larger schedules are built from smaller ones: `Schedule.then`, `Schedule.over`, `Schedule.within`,
`beside`. All here are values and pure functions, for any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain, zip_longest
from operator import index
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from commrt.errors import CommrtError, ScheduleError, UsageError

IntArray = NDArray[np.int64]

MAX_STEPS = 1 << 18
"""Most steps of a schedule, plus 16 for each rank.

A schedule that yields more is refused as endless.
"""
ITSELF = "is from a rank to itself; leave it out"


class Combine(IntEnum):
    """What a receiver does with the chunks that it receives."""

    COPY = 0
    ADD = 1
    MIX = 2


COPY = Combine.COPY
"""Overwrite the receiver's own value."""
ADD = Combine.ADD
"""Add to the receiver's own value.

What one range of chunks receives in a step is added in order of ranks, the receiver's own value in
its place, and rounded once; ranges that overlap are added one after the other, by (lo, hi).
"""
MIX = Combine.MIX
"""Move the receiver's own value towards the received one: ``own += weight * (received - own)``."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Transfers that happen at the same time, one per row of the columns [T].

    Columns of int64 are kept, not copied: write to none. Raises `UsageError` for bad columns.
    """

    src: IntArray
    """Sending rank."""
    dst: IntArray
    """Receiving rank."""
    lo: IntArray
    """First chunk carried."""
    hi: IntArray
    """One past the last chunk carried."""
    combine: IntArray
    weight: NDArray[np.float64]
    """Share of the received value where `combine` is MIX, else 0."""

    def __post_init__(self) -> None:
        # digests compare bytes: equal moves need equal dtypes, and equal weights that are not used
        columns = [
            _int_column(name, getattr(self, name)) for name in ("src", "dst", "lo", "hi", "combine")
        ]
        weight = _column("weight", self.weight)
        lengths = [len(column) for column in (*columns, weight)]
        if len(set(lengths)) > 1:
            raise UsageError(
                f"columns of {lengths} transfers: src, dst, lo, hi, combine and weight need as many"
                " each"
            )
        used = np.asarray(np.where(columns[-1] == int(MIX), weight, 0.0), dtype=np.float64)
        _hold(self, *columns, used)

    @classmethod
    def of(
        cls,
        src: ArrayLike,
        dst: ArrayLike,
        lo: ArrayLike,
        hi: ArrayLike,
        combine: Combine,
        weight: float = 0.5,
    ) -> Step:
        """Build a step from scalars or arrays, broadcast against each other: a transfer per entry.

        >>> print(Step.of(src=[0, 1], dst=[1, 0], lo=0, hi=2, combine=ADD))
        add  0->1 [0:2)  1->0 [0:2)
        >>> print(Step.of(src=0, dst=[[1], [2]], lo=[0, 3], hi=[1, 4], combine=COPY))
        copy  0->1 [0:1)  0->1 [3:4)  0->2 [0:1)  0->2 [3:4)
        """
        # numpy is slow with a member of an enum
        code = int(combine) if isinstance(combine, Combine) else combine
        try:
            # np.broadcast_arrays takes longer
            shape = np.broadcast(src, dst, lo, hi, code, weight).shape
        except ValueError as error:
            raise UsageError(
                f"columns do not fit together: {error}; give scalars, or arrays that broadcast"
            ) from error
        return cls(
            *(np.full(shape, column).reshape(-1) for column in (src, dst, lo, hi, code, weight))
        )

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """The six columns in the order of the fields: ``Step(*step.columns)`` is the same step."""
        return self.src, self.dst, self.lo, self.hi, self.combine, self.weight

    def __len__(self) -> int:
        return len(self.src)

    def rows(self, keep: NDArray[np.generic]) -> Step:
        """Return the transfers that a mask, an index array or a permutation [T] selects."""
        return _derived(*(column[keep] for column in self.columns))

    def canonical(self) -> Step:
        """Return the same transfers sorted by (src, dst, lo), adjacent ranges to one peer merged.

        Empty ones are left out. Both ends of a transfer derive their program from this form, so
        they agree on order and sizes.
        """
        full = self if (self.hi > self.lo).all() else self.rows(self.hi > self.lo)
        step = full.rows(np.lexsort((full.hi, full.lo, full.dst, full.src)))
        if len(step) < 2:
            return step
        same = step.lo[1:] == step.hi[:-1]
        for column in (step.src, step.dst, step.combine, step.weight):
            same &= column[1:] == column[:-1]
        first = np.flatnonzero(np.concatenate(([True], ~same)))
        last = np.concatenate((first[1:], [len(step)])) - 1
        src, dst, lo, _, combine, weight = (column[first] for column in step.columns)
        return _derived(src, dst, lo, step.hi[last], combine, weight)

    def text(self, limit: int = 16) -> str:
        """Return a line such as ``add  0->1 [2:3)  1->2 [0:1)``: at most `limit` transfers."""
        words: list[str] = []
        previous = ""
        for src, dst, lo, hi, combine, weight in zip(
            *(c[:limit].tolist() for c in self.columns), strict=True
        ):
            verb = Combine(combine).name.lower() if COPY <= combine <= MIX else f"combine {combine}"
            verb += f"({weight:g})" if combine == MIX else ""
            words += [verb] * (verb != previous) + [f"{src}->{dst} [{lo}:{hi})"]
            previous = verb
        return "  ".join(words) + (f"  ... {len(self) - limit} more" if len(self) > limit else "")

    __str__ = text


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """A collective as data: `steps()` yields the steps anew each time, lazily.

    Raises `UsageError` for bad fields.

    >>> both = Step.of([0, 1], [1, 0], 0, 1, ADD)
    >>> swap = Schedule("swap", ranks=2, chunks=1, steps=lambda: iter([both]))
    >>> print(swap)
    swap: 2 ranks, 1 chunk
      0  add  0->1 [0:1)  1->0 [0:1)
    """

    name: str
    ranks: int
    chunks: int
    """Number of equal parts of the buffer.

    When the schedule is bound to a buffer, sizes need not divide by it.
    """
    steps: Callable[[], Iterator[Step]]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise UsageError(f"name={self.name!r:.80}: give the schedule's name, a string, first")
        require_counts(self.name, ranks=self.ranks, chunks=self.chunks)
        if not callable(self.steps):
            raise UsageError(
                f"{self.name}: steps={self.steps!r:.80}: give a function that yields all steps anew"
            )

    def checked_steps(self) -> Iterator[Step]:
        """Yield each of `steps()`; `ScheduleError` if one is no Step, it fails or never ends."""
        try:
            for number, step in enumerate(self.steps()):
                self._check(number, step)
                yield step
        except CommrtError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error!s:.200}"
            raise ScheduleError(
                f"{self.name}: steps() fails: {what}; it must yield each Step anew"
            ) from error

    def _check(self, number: int, step: object) -> None:
        if not isinstance(step, Step):
            raise ScheduleError(
                f"{self.name}: steps() yields {step!r:.80} as step {number}: yield Step.of(...)"
            )
        if number >= MAX_STEPS + 16 * self.ranks:
            raise ScheduleError(f"{self.name}: steps() has yielded {number:,} steps: does it end?")

    def then(self, after: Schedule, name: str | None = None) -> Schedule:
        """Return this schedule followed by `after`, on the same buffer."""
        _require_same_shape(self, after)
        label = name or f"{self.name} then {after.name}"
        return Schedule(label, self.ranks, self.chunks, lambda: chain(self.steps(), after.steps()))

    def over(self, ranks: ArrayLike, world: int | None = None, shift: ArrayLike = 0) -> Schedule:
        """Return the same schedule with ``ranks[i]``, of a world of `world` ranks, as rank i.

        By default `world` is as many as the schedule has. With `ranks` [copies, ranks] all copies
        run at once, one per row; copy c works `shift[c]` chunks further up.
        """
        size = self.ranks if world is None else world
        try:
            copies = np.atleast_2d(np.asarray(ranks, dtype=np.int64))
            up = np.broadcast_to(np.asarray(shift, dtype=np.int64), len(copies))[:, None]
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"{self.name}.over(): ranks are no whole numbers: {error}") from error
        require_counts(f"{self.name}.over()", world=size)
        if copies.shape[1] != self.ranks or len(np.unique(copies)) != copies.size:
            raise ScheduleError(
                f"{self.name} needs {self.ranks} different ranks, got {copies.tolist()}"
            )
        if copies.size and (copies.min() < 0 or copies.max() >= size):
            raise ScheduleError(
                f"{self.name} over {copies.tolist()}: ranks must lie in 0..{size - 1}"
            )

        if copies.shape == (1, size) and not up.any():
            return self.renamed(copies[0])

        def steps() -> Iterator[Step]:
            for step in self.steps():
                moved = (copies[:, step.src], copies[:, step.dst], step.lo + up, step.hi + up)
                src, dst, lo, hi = (column.reshape(-1) for column in moved)
                yield _derived(
                    src, dst, lo, hi, np.tile(step.combine, len(up)), np.tile(step.weight, len(up))
                )

        return Schedule(self.name, size, self.chunks, steps)

    def renamed(self, order: IntArray) -> Schedule:
        """Return it with ``order[i]`` as rank i; `order` [ranks], each rank once, is unchecked."""
        return Schedule(self.name, self.ranks, self.chunks, _RenamedSteps(self, order))

    @property
    def renames(self) -> tuple[Schedule, IntArray] | None:
        """A schedule and its order, if this is that `renamed`; what is proven of it holds here."""
        steps = self.steps
        return (steps.schedule, steps.order) if isinstance(steps, _RenamedSteps) else None

    def within(self, lo: int, hi: int, chunks: int) -> Schedule:
        """Return the same schedule on chunks [lo, hi) of a buffer of `chunks` chunks.

        ``hi - lo`` must be a multiple of this schedule's own chunk count; each own chunk becomes
        that many.
        """
        lo = index(lo)
        hi = index(hi)
        factor, rest = divmod(hi - lo, self.chunks)
        if rest or factor < 1 or lo < 0 or hi > chunks:
            raise ScheduleError(
                f"{self.name} has {self.chunks} chunks and cannot be laid on chunks [{lo}:{hi}) of"
                f" {chunks}: the range must lie inside and be a multiple of {self.chunks} long"
            )

        def steps() -> Iterator[Step]:
            for s in self.steps():
                yield _derived(
                    s.src, s.dst, lo + s.lo * factor, lo + s.hi * factor, s.combine, s.weight
                )

        return Schedule(self.name, self.ranks, chunks, steps)

    def refined(self, factor: int) -> Schedule:
        """Return the same schedule with every chunk cut into `factor` chunks."""
        return self.within(0, self.chunks * factor, self.chunks * factor)

    def beside(self, other: Schedule, name: str | None = None) -> Schedule:
        """Return both schedules at once, step by step; see the function `beside`."""
        return beside((self, other), name)

    def named(self, name: str) -> Schedule:
        """Return the same schedule under another name."""
        return replace(self, name=name)

    def digest(self) -> str:
        """Return a hash of all that moves (not of the name).

        Two ranks run the same schedule if theirs are equal.
        """
        seen = hashlib.sha256(f"{self.ranks} {self.chunks}".encode())
        for step in map(Step.canonical, self.checked_steps()):
            seen.update(len(step).to_bytes(8, "little"))
            for column in step.columns:
                seen.update(np.ascontiguousarray(column).tobytes())
        return seen.hexdigest()

    def text(self, limit: int = 16) -> str:
        """Return the schedule as text, one line per step with at most `limit` transfers each."""
        lines = (
            f"{number:3d}  {step.text(limit)}" for number, step in enumerate(self.checked_steps())
        )
        return "\n".join([f"{self.name}: {_shape(self)}", *lines])

    __str__ = text


@dataclass(frozen=True, slots=True, eq=False)
class _RenamedSteps:
    """The steps of `schedule` with ``order[i]`` as rank i."""

    schedule: Schedule
    order: IntArray

    def __call__(self) -> Iterator[Step]:
        order = self.order
        for s in self.schedule.steps():
            yield _derived(order[s.src], order[s.dst], s.lo, s.hi, s.combine, s.weight)


def require_schedule(value: object) -> None:
    """Raise `UsageError` unless `value` is a schedule."""
    if not isinstance(value, Schedule):
        raise no_schedule(value)


def no_schedule(value: object) -> UsageError:
    """Return the error of a `value` in the place of a schedule."""
    return UsageError(
        f"{value!r:.80} is no schedule: an algorithm makes one with its schedule(step, ranks)"
    )


def require_counts(name: str, **counts: object) -> None:
    """Raise `UsageError` unless all `counts` of what is called `name` are whole numbers from 1."""
    for what, count in counts.items():
        is_whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
        if not is_whole or not 1 <= cast("int", count) < 2**31:
            raise UsageError(f"{name}: {what}={count!r:.80}: give a whole number from 1 on")


def empty(ranks: int, chunks: int = 1, name: str = "nothing") -> Schedule:
    """Return the schedule that moves nothing, such as an all-reduce of one rank."""
    return Schedule(name, ranks, chunks, lambda: iter(()))


def beside(schedules: Iterable[Schedule], name: str | None = None) -> Schedule:
    """Return all `schedules` at once: their k-th steps become one step.

    Use it for disjoint ranks (the rows of a torus) or disjoint chunks (two halves of the buffer).
    `verify` refuses schedules that overlap.
    """
    if isinstance(schedules, Schedule):
        raise UsageError(
            f"beside() takes a list of schedules, not {schedules.name} alone: write beside([a, b])"
        )
    try:
        parts = tuple(schedules)
    except TypeError as error:
        raise UsageError(f"beside({schedules!r:.80}): give a list of schedules") from error
    for part in parts:
        require_schedule(part)
    if not parts:
        raise ScheduleError(
            "beside() of no schedules: use empty(ranks, chunks) for a schedule that moves nothing"
        )
    for part in parts[1:]:
        _require_same_shape(parts[0], part)

    def steps() -> Iterator[Step]:
        for at_once in zip_longest(*(part.steps() for part in parts)):
            yield Step(
                *map(
                    np.concatenate,
                    zip(*(step.columns for step in at_once if step is not None), strict=True),
                )
            )

    return Schedule(
        name or " beside ".join(p.name for p in parts), parts[0].ranks, parts[0].chunks, steps
    )


def malformed(step: Step, ranks: int, chunks: int) -> Iterator[tuple[Step, str]]:
    """Yield for each kind of invalid transfer the first in `step`, and what is wrong with it."""
    low = np.minimum(step.src, step.dst)
    high = np.maximum(step.src, step.dst)
    outside = f"carries chunks outside 0..{chunks - 1} or a range that ends before it starts"
    for valid, what in (
        ((low >= 0) & (high < ranks), f"names a rank outside 0..{ranks - 1}"),
        ((step.lo >= 0) & (step.lo <= step.hi) & (step.hi <= chunks), outside),
        (low != high, ITSELF),
        ((step.combine >= int(COPY)) & (step.combine <= int(MIX)), "has an unknown way to combine"),
        (
            np.isfinite(step.weight) | (step.combine != int(MIX)),
            "mixes with a weight that is no number",
        ),
    ):
        if not valid.all():
            yield step.rows(np.flatnonzero(~valid)[:1]), what


def require_valid(step: Step, schedule: Schedule) -> Step:
    """Return `step` if `schedule` can run it, else raise `ScheduleError`; self-sends are fine."""
    for transfer, what in malformed(step, schedule.ranks, schedule.chunks):
        if what != ITSELF:
            raise ScheduleError(
                f"{schedule.name} cannot run: the transfer {transfer.text()} {what}"
            )
    return step


def _hold(step: Step, *columns: NDArray[Any]) -> Step:
    for name, column in zip(Step.__dataclass_fields__, columns, strict=True):
        object.__setattr__(step, name, column)
    return step


def _derived(*columns: NDArray[Any]) -> Step:
    """Return the step of columns made from a checked step's, unchecked: a proof makes many."""
    return _hold(object.__new__(Step), *columns)


def _int_column(name: str, given: ArrayLike) -> IntArray:
    """Return `given` as int64; raise `UsageError` rather than round or wrap around."""
    # the checks take 15 us
    if isinstance(given, np.ndarray) and given.dtype == np.int64 and given.ndim == 1:
        return given
    with np.errstate(invalid="ignore"):  # compared next
        whole = (column := _column(name, given)).astype(np.int64, copy=False)
    if whole is not column and not (whole == column).all():
        raise UsageError(
            f"{name} holds {column[whole != column][0]}: give whole numbers below 2^63"
        )
    return whole


def _column(name: str, given: ArrayLike) -> NDArray[Any]:
    try:
        column = np.asarray(given)
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"{name} is no row of numbers: {error}") from error
    if column.ndim != 1 or column.dtype.kind not in "biuf":
        kind = f"{column.dtype}, of shape {column.shape}"
        raise UsageError(f"{name} is of {kind}: give a row of numbers, one per transfer")
    return column


def _require_same_shape(a: Schedule, b: Schedule) -> None:
    require_schedule(b)
    if (a.ranks, a.chunks) != (b.ranks, b.chunks):
        raise ScheduleError(
            f"{a.name} ({_shape(a)}) and {b.name} ({_shape(b)}) "
            "do not fit together: bring both to one shape with over() and within()"
        )


def _shape(schedule: Schedule) -> str:
    counts = {"rank": schedule.ranks, "chunk": schedule.chunks}
    return ", ".join(f"{count} {what}{'s' * (count != 1)}" for what, count in counts.items())
