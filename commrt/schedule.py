# SPDX-License-Identifier: Apache-2.0
"""What moves, and to whom, as data.

A `Schedule` is a sequence of `Step` s over a buffer cut in equal `chunks`. A step is a set of transfers that
happen at the same time, kept as columns so that a step of 4,096 ranks is a few arrays. Every transfer of a
step reads the state from before the step.

Schedules are built from smaller ones: `Schedule.then`, `Schedule.over`, `Schedule.within`, `beside`.
This module knows nothing but numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction
from itertools import chain, zip_longest
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from commrt.columns import row, whole
from commrt.errors import CommrtError, ScheduleError, UsageError

__all__ = [
    "ADD",
    "COPY",
    "MIX",
    "Algorithm",
    "Combine",
    "IntArray",
    "Schedule",
    "Step",
    "Traffic",
    "beside",
    "empty",
    "traffic",
]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class Combine(IntEnum):
    """What a receiver does with what arrives."""

    COPY = 0
    """Overwrite its own value."""
    ADD = 1
    """Add to its own value; several additions to one chunk in one step happen in order of sender."""
    MIX = 2
    """Move its own value towards the received one: ``own += weight * (received - own)``."""


COPY = Combine.COPY
"""Overwrite what the receiver has."""
ADD = Combine.ADD
"""Add to what the receiver has."""
MIX = Combine.MIX
"""Move what the receiver has towards what arrives, by a step's `weight`."""
MOST_STEPS = 1 << 18
"""Of a schedule, and 16 more for each rank: who yields more does not end."""
VERBS = {int(combine): combine.name.lower() for combine in Combine}


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Transfers that happen at the same time, one per row of the columns [T]."""

    src: IntArray
    dst: IntArray
    lo: IntArray
    """First chunk carried."""
    hi: IntArray
    """One past the last chunk carried."""
    combine: IntArray
    weight: FloatArray
    """Share of the received value where `combine` is MIX, else 0."""

    def __post_init__(self) -> None:
        """Two steps that move the same have the same bytes, whatever they were made from: digests compare those."""
        for name in ("src", "dst", "lo", "hi", "combine"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        weight = row("weight", self.weight)
        if len({len(column) for column in (*self.columns[:5], weight)}) > 1:
            lengths = ", ".join(str(len(column)) for column in (*self.columns[:5], weight))
            raise UsageError(f"columns of {lengths} transfers: src, dst, lo, hi, combine and weight need as many each")
        read = np.where(self.combine == MIX, weight, 0.0)
        object.__setattr__(self, "weight", np.asarray(read, dtype=np.float64))

    @classmethod
    def of(
        cls, src: ArrayLike, dst: ArrayLike, lo: ArrayLike, hi: ArrayLike, combine: Combine, weight: float = 0.5
    ) -> Step:
        """Build a step from scalars or arrays of any shape, broadcast against each other; raises `UsageError`.

        There is a transfer for each entry.

        >>> print(Step.of(src=[0, 1], dst=[1, 0], lo=0, hi=2, combine=ADD))
        add  0->1 [0:2)  1->0 [0:2)
        >>> print(Step.of(src=0, dst=[[1], [2]], lo=[0, 3], hi=[1, 4], combine=COPY))
        copy  0->1 [0:1)  0->1 [3:4)  0->2 [0:1)  0->2 [3:4)
        """
        try:
            wide = np.broadcast_arrays(src, dst, lo, hi, combine, weight)
        except ValueError as error:
            raise UsageError(
                f"columns that do not fit together: {error}; give scalars, or arrays that broadcast"
            ) from error
        return cls.from_columns([column.reshape(-1) for column in wide])

    @classmethod
    def from_columns(cls, columns: Sequence[NDArray[Any]]) -> Step:
        """The inverse of `columns`."""
        src, dst, lo, hi, combine, weight = columns
        return cls(src, dst, lo, hi, combine, weight)

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """The six columns, in the order of the fields."""
        return self.src, self.dst, self.lo, self.hi, self.combine, self.weight

    def __len__(self) -> int:
        return len(self.src)

    def rows(self, keep: NDArray[np.generic]) -> Step:
        """The transfers selected by a mask, an index array or a permutation [T]."""
        return Step.from_columns([column[keep] for column in self.columns])

    def played_by(self, players: IntArray, shift: IntArray) -> Step:
        """One copy per row of `players` [copies, ranks], with its chunks moved up by `shift` [copies]."""
        up = shift[:, None]
        labelled = (players[:, self.src], players[:, self.dst], self.lo + up, self.hi + up)
        copies = (np.tile(self.combine, len(players)), np.tile(self.weight, len(players)))
        return Step.from_columns([*(column.reshape(-1) for column in labelled), *copies])

    def canonical(self) -> Step:
        """The same transfers sorted by (src, dst, lo), without empty ones, neighbours to one peer merged.

        Both ends of a transfer derive their program from this form, so they agree on order and sizes.
        """
        full = self.rows(self.hi > self.lo)
        step = full.rows(np.lexsort((full.hi, full.lo, full.dst, full.src)))
        if len(step) < 2:
            return step
        same = np.ones(len(step) - 1, dtype=bool)
        for column in (step.src, step.dst, step.combine, step.weight):
            same &= column[1:] == column[:-1]
        first = np.flatnonzero(np.concatenate(([True], ~(same & (step.lo[1:] == step.hi[:-1])))))
        last = np.concatenate((first[1:], [len(step)])) - 1
        return replace(step.rows(first), hi=step.hi[last])

    def __str__(self) -> str:
        return self.text()

    def text(self, limit: int = 16) -> str:
        """One line: ``add  0->1 [2:3)  1->2 [0:1)``, at most `limit` transfers."""
        words: list[str] = []
        previous = ""
        for src, dst, lo, hi, combine, weight in zip(*(c[:limit].tolist() for c in self.columns), strict=True):
            verb = VERBS.get(combine, f"combine {combine}") + (f"({weight:g})" if combine == MIX else "")
            words += [verb] * (verb != previous) + [f"{src}->{dst} [{lo}:{hi})"]
            previous = verb
        return "  ".join(words) + (f"  ... {len(self) - limit} more" if len(self) > limit else "")


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """A collective as data: `steps()` yields the steps anew each time, lazily.

    >>> swap = Schedule("swap", ranks=2, chunks=1, steps=lambda: iter([Step.of([0, 1], [1, 0], 0, 1, ADD)]))
    >>> print(swap)
    swap: 2 ranks, 1 chunk
      0  add  0->1 [0:1)  1->0 [0:1)
    """

    name: str
    ranks: int
    chunks: int
    """The buffer is cut in this many; sizes that do not divide are the business of whoever binds it."""
    steps: Callable[[], Iterator[Step]]

    def __post_init__(self) -> None:
        for what, number in {"ranks": self.ranks, "chunks": self.chunks}.items():
            if isinstance(number, bool) or not isinstance(number, int | np.integer) or not 1 <= number < 2**31:
                raise UsageError(f"{self.name}: {what}={number!r:.80}: give a whole number from 1 on")
        if not callable(self.steps):
            raise UsageError(
                f"{self.name}: steps is a {type(self.steps).__name__}: give a function that yields all anew"
            )

    def played(self) -> Iterator[Step]:
        """What `steps` yields, for who looks at all of it; raises `ScheduleError` for no step, and without an end."""
        number, steps = 0, self._made()
        for number, step in enumerate(steps):
            if not isinstance(step, Step):
                raise ScheduleError(f"{self.name}: steps() yields {step!r:.80} as step {number}: yield Step.of(...)")
            if number >= MOST_STEPS + 16 * self.ranks:
                raise ScheduleError(f"{self.name}: steps() has yielded {number:,} steps: does it end?")
            yield step

    def _made(self) -> Iterator[Step]:
        try:
            yield from self.steps()
        except CommrtError:
            raise
        except Exception as error:
            raise ScheduleError(
                f"{self.name}: steps() fails: {type(error).__name__}: {error!s:.200}; it must yield each Step anew"
            ) from error

    def then(self, after: Schedule, name: str | None = None) -> Schedule:
        """This schedule, then `after`, on the same buffer."""
        _require_same_shape(self, after)
        label = name or f"{self.name} then {after.name}"
        return Schedule(label, self.ranks, self.chunks, lambda: chain(self.steps(), after.steps()))

    def over(self, ranks: ArrayLike, world: int | None = None, shift: ArrayLike = 0) -> Schedule:
        """The same schedule with rank i played by ``ranks[i]`` of a world of `world` ranks (default: as many).

        With `ranks` [copies, ranks], one copy per row, all at once; copy c works `shift[c]` chunks further up.
        """
        players = np.atleast_2d(np.asarray(ranks, dtype=np.int64))
        moved = np.broadcast_to(np.asarray(shift, dtype=np.int64), len(players))
        size = self.ranks if world is None else world
        if players.shape[1] != self.ranks or len(np.unique(players)) != players.size:
            raise ScheduleError(f"{self.name} needs {self.ranks} different ranks, got {players.tolist()}")
        if players.size and (players.min() < 0 or players.max() >= size):
            raise ScheduleError(f"{self.name} over {players.tolist()}: ranks must lie in 0..{size - 1}")

        def steps() -> Iterator[Step]:
            return (step.played_by(players, moved) for step in self.steps())

        return Schedule(self.name, size, self.chunks, steps)

    def within(self, lo: int, hi: int, chunks: int) -> Schedule:
        """The same schedule on chunks [lo, hi) of a buffer of `chunks` chunks.

        ``hi - lo`` must be a multiple of this schedule's own chunk count; each own chunk becomes that many.
        """
        factor, rest = divmod(hi - lo, self.chunks)
        if rest or factor < 1 or lo < 0 or hi > chunks:
            raise ScheduleError(
                f"{self.name} has {self.chunks} chunks and cannot be laid on chunks [{lo}:{hi}) of {chunks}: "
                f"the range must lie inside and be a multiple of {self.chunks} long"
            )

        def steps() -> Iterator[Step]:
            return (replace(s, lo=lo + s.lo * factor, hi=lo + s.hi * factor) for s in self.steps())

        return Schedule(self.name, self.ranks, chunks, steps)

    def refined(self, factor: int) -> Schedule:
        """The same schedule with every chunk cut in `factor`."""
        return self.within(0, self.chunks * factor, self.chunks * factor)

    def in_slices(self, slices: int) -> Schedule:
        """The same schedule on each of `slices` equal parts of the buffer, a step of each in turn.

        Cost: `slices` times the steps, the same bytes.
        """
        if slices < 1:
            raise ScheduleError(f"{self.name} cannot be cut in {slices} slices: 1 leaves it whole")
        whole = self.chunks * slices
        parts = [self.within(lo, lo + self.chunks, whole) for lo in range(0, whole, self.chunks)]

        def steps() -> Iterator[Step]:
            return chain.from_iterable(zip(*(part.steps() for part in parts), strict=True))

        return Schedule(f"{self.name} in {slices} slices", self.ranks, whole, steps)

    def beside(self, other: Schedule, name: str | None = None) -> Schedule:
        """Both at once, step by step; see the function `beside`."""
        return beside((self, other), name)

    def named(self, name: str) -> Schedule:
        """The same schedule under another name."""
        return replace(self, name=name)

    def digest(self) -> str:
        """A hash of all that moves (not of the name): equal on two ranks exactly if they run the same schedule."""
        seen = hashlib.sha256(f"{self.ranks} {self.chunks}".encode())
        for step in self.played():
            canonical = step.canonical()
            seen.update(len(canonical).to_bytes(8, "little"))
            for column in canonical.columns:
                seen.update(np.ascontiguousarray(column).tobytes())
        return seen.hexdigest()

    def __str__(self) -> str:
        return self.text()

    def text(self, limit: int = 16) -> str:
        """The schedule as text, one line per step with at most `limit` transfers each."""
        head = f"{self.name}: {_shape(self)}"
        return "\n".join([head, *(f"{i:3d}  {step.text(limit)}" for i, step in enumerate(self.played()))])


class Algorithm(Protocol):
    """Anything that answers which schedule a training step runs.

    A pure function of its own fields, the step and the rank count: every rank computes the same answer.
    Implementations are small frozen dataclasses, so their ``repr`` says everything. They return the same
    object for the same answer (``functools.lru_cache``), because programs are bound once per object.
    """

    def schedule(self, step: int, ranks: int) -> Schedule:
        """The schedule of training step `step` on `ranks` ranks, numbered from 0."""
        ...


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a schedule costs, whatever it is for."""

    steps: int
    transfers: int
    bytes_per_rank: Fraction
    """Sent by the busiest rank, in units of the buffer."""
    max_peers: int
    """Most peers any rank talks to in one step."""


def traffic(schedule: Schedule) -> Traffic:
    """Count steps, transfers, bytes and peers of `schedule`; one pass, O(transfers)."""
    sent = np.zeros(schedule.ranks, dtype=np.int64)
    steps = transfers = peers = 0
    for step in map(Step.canonical, schedule.played()):
        steps += 1
        transfers += len(step)
        np.add.at(sent, step.src, step.hi - step.lo)
        peers = max(peers, _most_peers(step))
    return Traffic(steps, transfers, Fraction(int(sent.max(initial=0)), schedule.chunks), peers)


def empty(ranks: int, chunks: int = 1, name: str = "nothing") -> Schedule:
    """The schedule that moves nothing: all that one rank needs."""
    return Schedule(name, ranks, chunks, lambda: iter(()))


def beside(schedules: Iterable[Schedule], name: str | None = None) -> Schedule:
    """All `schedules` at once, step by step: the k-th steps of all are one step.

    Meant for disjoint ranks (the rows of a torus) or disjoint chunks (two halves of the buffer); `verify`
    refuses what overlaps.
    """
    parts = tuple(schedules)
    if not parts:
        raise ScheduleError(
            "beside() of no schedule at all: use empty(ranks, chunks) for a schedule that moves nothing"
        )
    for part in parts[1:]:
        _require_same_shape(parts[0], part)

    def steps() -> Iterator[Step]:
        return (_merged(at_once) for at_once in zip_longest(*(part.steps() for part in parts)))

    return Schedule(name or " beside ".join(p.name for p in parts), parts[0].ranks, parts[0].chunks, steps)


def _merged(steps: Iterable[Step | None]) -> Step:
    columns = zip(*(step.columns for step in steps if step is not None), strict=True)
    return Step.from_columns([np.concatenate(column) for column in columns])


def _require_same_shape(a: Schedule, b: Schedule) -> None:
    if (a.ranks, a.chunks) != (b.ranks, b.chunks):
        raise ScheduleError(
            f"{a.name} ({_shape(a)}) and {b.name} ({_shape(b)}) "
            "do not fit together: bring both to one shape with over() and within()"
        )


def _most_peers(step: Step) -> int:
    ranks = 1 + max(int(step.src.max(initial=0)), int(step.dst.max(initial=0)))
    pairs = np.unique(np.concatenate((step.src * ranks + step.dst, step.dst * ranks + step.src)))
    return int(np.unique(pairs // ranks, return_counts=True)[1].max(initial=0))


def _shape(schedule: Schedule) -> str:
    return f"{_count(schedule.ranks, 'rank')}, {_count(schedule.chunks, 'chunk')}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
