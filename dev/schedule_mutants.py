# SPDX-License-Identifier: Apache-2.0
"""Mutants of correct schedules, and a naive interpreter that says which are wrong;
`tests/test_mutations.py` runs them.

The oracle here shares no code with the proof: it moves random numbers, transfer by transfer, once
with all sends of a step read first and then in several orders in which a copy lands while others
still read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random
from typing import NamedTuple

import numpy as np

from commrt.algorithms.catalogue import COLLECTIVES, ROOTED, candidates
from commrt.algorithms.torus import Torus2D
from commrt.schedule import ADD, COPY, Schedule, Step

Row = tuple[int, int, int, int, int]
"""One transfer: src, dst, lo, hi, combine."""
Rows = list[Row]

FIRST = ("ring", "halving_doubling", "torus2d")
"""All-reduces that are tried on more ranks, and with more mutants, than other schedules."""
RANKS = (2, 3, 4, 5, 6, 7, 8, 12)
RANKS_OF_OTHERS = (4, 6)
EXHAUSTIVE_UP_TO = 3
MOST_EXHAUSTIVE = 300
"""All mutants of a kind are tried on so many ranks, unless there are more of them than this."""
PER_KIND = 12
PER_KIND_OF_OTHERS = 6
"""Mutants of each kind that are tried where there are too many to try all."""
VALUES = 3
"""Independent random buffers that the oracle moves at once."""
SHUFFLES = 4


def rows_of(schedule: Schedule) -> list[Rows]:
    columns = ([column.tolist() for column in step.columns[:5]] for step in schedule.steps())
    return [list(zip(*column, strict=True)) for column in columns]


def schedule_of(steps: Sequence[Rows], ranks: int, chunks: int) -> Schedule:
    built = [Step.of(*(list(zip(*rows, strict=True)) or [[]] * 5)) for rows in steps]
    return Schedule("mutant", ranks, chunks, lambda: iter(built))


def is_malformed(steps: Sequence[Rows], ranks: int, chunks: int) -> bool:
    for src, dst, lo, hi, _ in (row for rows in steps for row in rows):
        if src == dst or min(src, dst) < 0 or max(src, dst) >= ranks or not 0 <= lo <= hi <= chunks:
            return True
    return False


def all_at_once(steps: Sequence[Rows], start: np.ndarray) -> np.ndarray:
    """The meaning of a step: every transfer reads the state from before it."""
    buffer = start.copy()
    for rows in steps:
        before = buffer.copy()
        for src, dst, lo, hi, combine in rows:
            own = buffer[dst, lo:hi] if combine == ADD else 0
            buffer[dst, lo:hi] = own + before[src, lo:hi]
    return buffer


Event = tuple[str, int]


def one_by_one(rows: Rows) -> list[Event]:
    return [event for k in range(len(rows)) for event in (("send", k), ("land", k))]


def last_one_first(rows: Rows) -> list[Event]:
    return [event for k in reversed(range(len(rows))) for event in (("send", k), ("land", k))]


def at_random(rng: Random, rows: Rows) -> list[Event]:
    times = [sorted((rng.random(), rng.random())) for _ in rows]
    timed = [
        (t, event, k)
        for k, pair in enumerate(times)
        for t, event in zip(pair, ("send", "land"), strict=True)
    ]
    return [(event, k) for _, event, k in sorted(timed)]


def in_place(steps: Sequence[Rows], start: np.ndarray, order) -> np.ndarray:
    """What a machine does: copies land in the buffer whenever they arrive, additions wait for the
    end of the step.
    """
    buffer = start.copy()
    for rows in steps:
        wire: dict[int, np.ndarray] = {}
        for event, k in order(rows):
            src, dst, lo, hi, combine = rows[k]
            if event == "send":
                wire[k] = buffer[src, lo:hi].copy()
            elif combine == COPY:
                buffer[dst, lo:hi] = wire[k]
        for k, (_, dst, lo, hi, combine) in enumerate(rows):
            if combine == ADD:
                buffer[dst, lo:hi] += wire[k]
    return buffer


class Task(NamedTuple):
    """What a schedule has to do."""

    collective: str
    ranks: int
    chunks: int
    root: int = 0


def is_done(task: Task, start: np.ndarray, end: np.ndarray) -> bool:
    """Whether `end` [ranks, chunks, VALUES] is what `task` makes of `start`, which is random where
    it is undefined.
    """
    total = start.sum(axis=0)
    chunk = np.arange(task.chunks)
    owner = chunk // max(1, task.chunks // task.ranks)
    source, target = np.divmod(chunk, task.ranks)
    found, wanted = {
        "all_reduce": lambda: (end, total),
        "reduce": lambda: (end[task.root], total),
        "reduce_scatter": lambda: (end[owner, chunk], total),
        "broadcast": lambda: (end, start[task.root]),
        "scatter": lambda: (end[owner, chunk], start[task.root]),
        "gather": lambda: (end[task.root], start[owner, chunk]),
        "all_gather": lambda: (end, start[owner, chunk]),
        "barrier": lambda: (end, start[owner, chunk]),
        "all_to_all": lambda: (end[target, chunk], start[source, chunk]),
    }[task.collective]()
    return bool((found == wanted).all())


def finding(steps: Sequence[Rows], task: Task, rng: Random) -> str:
    """What is wrong with `steps` for `task`: malformed, wrong or luck; or right."""
    if is_malformed(steps, task.ranks, task.chunks):
        return "malformed"
    shape = (task.ranks, task.chunks, VALUES)
    start = np.random.default_rng(rng.getrandbits(32)).integers(-(1 << 50), 1 << 50, shape)
    meant = all_at_once(steps, start)
    if not is_done(task, start, meant):
        return "wrong"
    orders = [one_by_one, last_one_first, *[lambda rows: at_random(rng, rows)] * SHUFFLES]
    return (
        "right"
        if all((in_place(steps, start, order) == meant).all() for order in orders)
        else "luck"
    )


Edit = dict[int, Rows]
"""Steps to replace, by number; one past the last is a new step."""


def edited(steps: Sequence[Rows], edit: Edit) -> list[Rows]:
    return [edit.get(i, rows) for i, rows in enumerate([*steps, []]) if i < len(steps) or i in edit]


def edits(steps: Sequence[Rows], ranks: int, chunks: int) -> dict[str, list[Edit]]:
    """All mutants by kind: of all transfers, and two chunks exchanged before anything else, which
    only sums survive.
    """
    found = defaultdict(list)
    for one, other in combinations(range(ranks), 2):
        for lo in range(chunks):
            exchange = [(one, other, lo, lo + 1, COPY), (other, one, lo, lo + 1, COPY)]
            found["exchange at start"].append(dict(enumerate([exchange, *steps])))
    for i, rows in enumerate(steps):
        for j in range(len(rows)):
            for kind, instead in replacements(rows[j], ranks, chunks):
                found[kind].append({i: [*rows[:j], *instead, *rows[j + 1 :]]})
            for kind, edit in relocations(steps, i, j):
                found[kind].append(edit)
    return found


def replacements(row: Row, ranks: int, chunks: int) -> Iterator[tuple[str, Rows]]:
    """Mutants of one transfer in its place."""
    src, dst, lo, hi, combine = row
    yield "drop", []
    yield "duplicate", [row, row]
    yield "flip combine", [(src, dst, lo, hi, ADD if combine == COPY else COPY)]
    for other in sorted({*range(ranks)} - {src, dst}):
        yield "redirect dst", [(src, other, lo, hi, combine)]
        yield "redirect src", [(other, dst, lo, hi, combine)]
    for by in (1, -1):
        yield "shift", shifted(row, by, chunks)
        yield "resize above", [(src, dst, lo, hi + by, combine)]
        yield "resize below", [(src, dst, lo + by, hi, combine)]


def shifted(row: Row, by: int, chunks: int) -> Rows:
    """The transfer with its chunks moved up by `by`; in two pieces where it wraps around."""
    src, dst, lo, hi, combine = row
    start = (lo + by) % chunks
    end = start + hi - lo
    pieces = [(start, min(end, chunks)), (0, max(end - chunks, 0))]
    return [(src, dst, a, b, combine) for a, b in pieces if a < b]


def relocations(steps: Sequence[Rows], i: int, j: int) -> Iterator[tuple[str, Edit]]:
    """Mutants that involve a second transfer or a second step."""
    rows = steps[i]
    row = steps[i][j]
    without = [*rows[:j], *rows[j + 1 :]]
    after = steps[i + 1] if i + 1 < len(steps) else []
    yield "repeat in next step", {i + 1: [*after, row]}
    yield "move to next step", {i: without, i + 1: [*after, row]}
    if i:
        yield "move to previous step", {i - 1: [*steps[i - 1], row], i: without}
    for later in range(i + 1, len(steps)):
        for k, other in enumerate(steps[later]):
            changed = [*steps[later][:k], row, *steps[later][k + 1 :]]
            yield "swap with another step", {i: [*rows[:j], other, *rows[j + 1 :]], later: changed}
    for k in range(j + 1, len(rows)):
        yield "swap receivers", {i: with_receivers_swapped(rows, j, k)}


def with_receivers_swapped(rows: Rows, j: int, k: int) -> Rows:
    swapped = list(rows)
    swapped[j] = (rows[j][0], rows[k][1], *rows[j][2:])
    swapped[k] = (rows[k][0], rows[j][1], *rows[k][2:])
    return swapped


def chosen(candidates: list, limit: int, ranks: int, rng: Random) -> list:
    few = ranks <= EXHAUSTIVE_UP_TO and len(candidates) <= MOST_EXHAUSTIVE
    return candidates if few or len(candidates) <= limit else rng.sample(candidates, limit)


class Case(NamedTuple):
    """A schedule, and how many of its mutants are tried."""

    label: str
    task: Task
    schedule: Schedule
    per_kind: int


def cases() -> Iterator[Case]:
    for ranks in RANKS:
        found = [(name, COLLECTIVES["all_reduce"][name](ranks)) for name in FIRST]
        for name, schedule in [*found, ("both ways", Torus2D(both_ways=True).schedule(0, ranks))]:
            task = Task("all_reduce", ranks, schedule.chunks)
            yield Case(f"{name}-{ranks}", task, schedule, PER_KIND)
    for ranks in RANKS_OF_OTHERS:
        for collective in COLLECTIVES:
            root = 1 if collective in ROOTED else 0
            for name, schedule in candidates(collective, ranks, root).items():
                if collective != "all_reduce" or name not in FIRST:
                    task = Task(collective, ranks, schedule.chunks, root)
                    label = f"{collective}-{name}-{ranks}"
                    yield Case(label, task, schedule, PER_KIND_OF_OTHERS)


CASES = list(cases())
