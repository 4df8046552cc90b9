# SPDX-License-Identifier: Apache-2.0
"""Compare predicted with recorded steps to a loss: ``python studies/time_to_loss/planner_check.py FOLDER``.

The folder holds curves of ``record_curves.py``: some methods on 1, 2, 4, 8 and 16 ranks, with several seeds each.
Steps for 8 and 16 ranks are predicted from curves of 1, 2 and 4, and for 16 also from those of 8.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import exp
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from convergence import Convergence, Steps, convergence_of, mean_log
from curve import Curve

from commrt.errors import UsageError

__all__ = ["Row", "check", "order"]

TARGETS, CASES = (0.3, 0.2), ((4, 8), (4, 16), (8, 16))
"""Losses, and (largest rank count that is fitted, rank count that is predicted)."""


class Row(NamedTuple):
    """One prediction beside what was recorded."""

    target: float
    method: str
    fitted: int
    ranks: int
    recorded: float
    """Mean steps of all seeds."""
    found: Steps
    family: str
    others: dict[str, float]
    """Steps by each family."""

    @property
    def error(self) -> float:
        """Relative error."""
        return self.found.steps / self.recorded - 1

    @property
    def is_covered(self) -> bool:
        """Whether the recorded steps lie in the interval."""
        return self.found.low <= self.recorded <= self.found.high


def check(curves: Mapping[str, Curve], target: float) -> Iterator[Row]:
    """Yield a row for each of `CASES` and each method."""
    known = {each.method: each for each in convergence_of(curves, target)}
    for fitted, ranks in CASES:
        for model in convergence_of({name: each for name, each in curves.items() if each.ranks <= fitted}, target):
            yield _row(model, ranks, exp(mean_log(known[model.method].runs, ranks)))


def _row(model: Convergence, ranks: int, recorded: float) -> Row:
    others = {name: fit(model.runs, model.target)(ranks) for name, fit in model.fits.items()}
    fitted, family = model.recorded[-1], model.family or ""
    return Row(model.target, model.method, fitted, ranks, recorded, model.steps(ranks), family, others)


def order(rows: Sequence[Row]) -> str:
    """Return which pairs of methods are predicted in the order that was recorded, and whose intervals overlap."""
    told = dict[str, list[str]]()
    for one, other in combinations(sorted(rows, key=lambda row: row.recorded), 2):
        kind = "right" if one.found.steps <= other.found.steps else "WRONG"
        kind += " but intervals overlap" * one.found.overlaps(other.found)
        told.setdefault(kind, []).append(f"{one.method} {one.recorded:.0f} < {other.method} {other.recorded:.0f}")
    return "; ".join(f"{kind}: {', '.join(pairs)}" for kind, pairs in told.items())


def main() -> None:
    """Print a table, then the order of the methods on 16 ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="files of curves, *.jsonl")
    parser.add_argument("--targets", type=float, nargs="+", default=TARGETS, help="losses")
    options = parser.parse_args()
    curves = {path.name: Curve.read(path) for path in sorted(options.folder.glob("*.jsonl"))}
    if not curves:
        raise UsageError(f"{options.folder} holds no *.jsonl")
    for target in options.targets:
        rows = list(check(curves, target))
        _show(rows)
        with_8 = order([row for row in rows if row.fitted == 8])
        print(f"\norder on 16 ranks with 8 in the curves, loss {target:g}: {with_8}\n")


def _show(rows: Sequence[Row]) -> None:
    print("| loss | method | fitted | ranks | recorded | predicted | error | in interval | family | all families |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = (
            f"{row.target:g}", row.method, f"1 to {row.fitted}", row.ranks, f"{row.recorded:.0f}",
            f"{row.found.steps:.0f} ({row.found.low:.0f} to {row.found.high:.0f})", f"{row.error:+.0%}",
            "yes" if row.is_covered else "no", row.family,
            ", ".join(f"{name} {steps / row.recorded - 1:+.0%}" for name, steps in row.others.items()),
        )  # fmt: skip
        print(f"| {' | '.join(map(str, cells))} |")
    for fitted, ranks in CASES:
        errors = [abs(row.error) for row in rows if (row.fitted, row.ranks) == (fitted, ranks)]
        print(f"fitted up to {fitted}, {ranks} ranks: mean error {mean(errors):.0%}, largest {max(errors):.0%}")


if __name__ == "__main__":
    main()
