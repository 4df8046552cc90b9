# SPDX-License-Identifier: Apache-2.0
"""Measure the requests of backup workers to the store: ``python bench/store_requests.py`` times one of 4, 16, 64 ranks.

The reduction does nothing. Everything else is the code that trains (`store_ranks` says in which processes).

**Timed**: from the announcement that completes a step's list until the measured rank knows the members, and from the
end of the reduction until it knows the outcome, with the way between its communication and store threads. This is the
worst case: all other ranks wait, and the store serves this rank last, because it came last. Work at other times does
not count, as ranks seldom announce in the same microsecond. For a late rank, its own announcement replaces the last
one.

**CPU time of the store** from the same instants until all processes are idle. It is a bound that does not depend on the
speed of the other ranks here: the store is one thread, and the last rank knows when the store has served all.

**Left out**:

* the network between hosts: the latency of two messages for each request to the store; `get` and `multi_get` wait
  first and ask then, so they are two requests,
* the tree by which the first member learns that all have the sum,
* 97 operations of the first member every 16 steps, which delete old keys while no rank waits.

On the loopback, the store's time includes the delivery to the receivers, which their hosts would do.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, NamedTuple

from interleaved import spread
from store_ranks import MeasuredRank, announcement, cores, measured_rank, now_s

from commrt.backup_workers.quorum import StepOutcome, quorum_key

__all__ = ["CASES", "Case", "Row", "measured"]

MEASURED = 1
"""The measured rank: the first that counts if rank 0 is late."""
WARM_STEPS = 5
TIDYING = {"set", "delete_key"}
Spread = tuple[float, float, float]


class Case(NamedTuple):
    """The role of the measured rank in a step."""

    name: str
    is_decisive: bool = False
    """True if it announces last of those that count, and decides the outcome."""
    counts: bool = True

    def members(self, ranks: int, needed: int) -> list[int]:
        """Return the ranks that count."""
        able = [rank for rank in range(ranks) if rank >= MEASURED or not self.is_decisive]
        return [rank for rank in able if rank != MEASURED or self.counts][:needed]


CASES = (
    Case("last and first", is_decisive=True),
    Case("early"),
    Case("late", counts=False),
)


@dataclass(frozen=True)
class Times:
    """Times of one step, in ms."""

    members: float
    """Until the measured rank knows the members."""
    outcome: float
    both: float
    store_members: float
    """CPU time of the store until all know the members; 0 for a late rank."""
    store_outcome: float
    store_both: float
    store_step: float


class Step:
    """One step of the measured rank and of the others."""

    def __init__(self, measured: MeasuredRank, number: int, case: Case) -> None:
        self._measured, self._number, self._case = measured, number, case
        self._members = case.members(measured.setup.ranks, measured.setup.needed)
        self._peers = [rank for rank in self._members if rank != MEASURED]
        self._first, self._last = measured.setup.first, measured.setup.last
        self._begin_s = self._known_s = self._sum_s = 0.0
        self._store_ms: list[float] = []

    def run(self) -> Times:
        """Run the step on all ranks, and return its times."""
        measured, case = self._measured, self._case
        self._mark()
        early = [rank for rank in self._peers if case.is_decisive or rank != self._last]
        measured.command("announce", self._number, ranks=early)
        if not case.counts:
            measured.command("announce", self._number, ranks=[self._last])
            self._others_reduce()
        self._mark()
        self._begin_s = now_s()
        measured.vote.before_waiting, measured.vote.reduce = self._before_waiting, self._reduce
        outcome = measured.vote.run(announcement(MEASURED), self._number)
        end_s = now_s()
        if not case.is_decisive:
            self._sum_s = measured.connection_to(self._first).recv()
        self._mark()
        self._check(outcome)
        return self._times(end_s)

    def _mark(self) -> None:
        self._store_ms.append(self._measured.store_ms())

    def _before_waiting(self, key: str) -> None:
        """Let the event that ends the wait come once all processes are idle."""
        if key == quorum_key(self._number, 0, "outcome"):
            self._known_s = self._known_s or now_s()
            if not self._case.is_decisive:
                self._tell("settle", self._first)
        elif self._case.counts and not self._case.is_decisive:
            self._tell("complete", self._number, self._last)

    def _tell(self, *told: Any) -> None:
        rank = told[-1]
        self._measured.connection_to(rank).send((*told, self._measured.pids_without(rank)))

    def _reduce(self, *_: object) -> bool:
        self._known_s = now_s()
        if not self._case.is_decisive:
            self._begin_s = self._measured.connection_to(self._last).recv()
        self._mark()
        self._others_reduce()
        self._mark()
        self._sum_s = now_s()
        return True

    def _others_reduce(self) -> None:
        """Let the others reduce, and the late ranks announce meanwhile."""
        late = set(range(self._measured.setup.ranks)) - {MEASURED, *self._members}
        self._measured.command("announce", self._number, ranks=late)
        self._measured.command("have_sum", ranks=[rank for rank in self._peers if rank != self._first])

    def _check(self, outcome: StepOutcome) -> None:
        self._measured.command("end", self._number, ranks=self._members)
        if outcome.members != tuple(self._members) or outcome.counts != self._case.counts:
            raise AssertionError(f"{self._case.name}: not {self._members}: {outcome}")
        if outcome.counts and self._case.is_decisive:
            self._measured.vote.delete_old_steps(self._number)

    def _times(self, end_s: float) -> Times:
        members, outcome = 1e3 * (self._known_s - self._begin_s), 1e3 * (end_s - self._sum_s)
        begin, *marks, end = self._store_ms
        decided, ended = (marks[1] - marks[0], end - marks[2]) if self._case.counts else (0.0, 0.0)
        return Times(members, outcome, members + outcome, decided, ended, decided + ended, end - begin)


@dataclass(frozen=True)
class Row:
    """The cost of one case: 20th percentile, median and 80th percentile of each time, in ms."""

    ranks: int
    backups: int
    case: str
    steps: int
    times: dict[str, Spread]
    operations: float
    """Requests of the measured rank to the store, per step."""


def measured(ranks: int, backups: int, steps: int) -> list[Row]:
    """Measure all cases interleaved, and return one row per case."""
    counts = Counter[str]()
    found: dict[Case, list[tuple[Times, Counter[str]]]] = {case: [] for case in CASES}
    with measured_rank(MEASURED, ranks, backups, counts) as measured_one:
        order = Random(0)
        turns = [case for _ in range(WARM_STEPS + steps) for case in order.sample(CASES, len(CASES))]
        for number, case in enumerate(turns):
            counts.clear()
            found[case].append((Step(measured_one, number, case).run(), counts.copy()))
    return [row(ranks, backups, case, kept[WARM_STEPS:]) for case, kept in found.items()]


def row(ranks: int, backups: int, case: Case, kept: Sequence[tuple[Times, Counter[str]]]) -> Row:
    """Return the row of one case, from the steps that were kept."""
    columns = {name: [asdict(times)[name] for times, _ in kept] for name in asdict(kept[0][0])}
    asked = sum((counts for _, counts in kept), Counter[str]())
    operations = sum(count for name, count in asked.items() if name not in TIDYING) / len(kept)
    times = {name: spread(values) for name, values in columns.items()}
    return Row(ranks, backups, case.name, len(kept), times, operations)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64], help="number of ranks")
    parser.add_argument("--steps", type=int, default=200, help="steps of each case")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    found = [each for ranks in options.ranks for each in measured(ranks, max(1, ranks // 16), options.steps)]
    if options.json:
        print(json.dumps([asdict(each) for each in found]))
    else:
        show(found)


def show(found: Sequence[Row]) -> None:
    """Print a table."""
    near, far = cores()
    place = f"the store on cores {near}, the ranks on {far}" if near != far else "all on one core"
    print(f"ms: median (20 % .. 80 %); {place}")
    print(f"{'':<26}  {'until the measured rank knows':<44}  {'the store computes':<44}")
    heads = ("the members", "the outcome", "in both", "until all know both", "in the whole step", "operations")
    print(f"{'ranks':>5} {'measured rank':<20}", *(f"{head:<21}" for head in heads), sep="  ")
    for each in found:
        cells = [shown(each.times[name]) for name in ("members", "outcome", "both", "store_both", "store_step")]
        print(
            f"{each.ranks:>5} {each.case:<20}", *(f"{cell:<21}" for cell in cells), f"{each.operations:.1f}", sep="  "
        )


def shown(times: Spread) -> str:
    """Format a cell."""
    low, middle, high = times
    return f"{middle:.2f} ({low:.2f} .. {high:.2f})" if high else "-"


if __name__ == "__main__":
    main()
