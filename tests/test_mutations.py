# SPDX-License-Identifier: Apache-2.0
"""Mutants of correct schedules: whatever a naive interpreter finds wrong, the symbolic proof must refuse."""

import sys
from collections import Counter
from random import Random

import pytest
from schedule_mutants import CASES, chosen, edited, edits, finding, rows_of, schedule_of

from commrt.proof.replay import verify
from commrt.proof.spec import collective_of

STRICT = (
    "overwrites what it sends in the same step",
    "receives this chunk twice in one step and not all of it adds",
    "a second time",
    "before it holds a value",
)
"""What the proof refuses even where the numbers happen to come out right."""


@pytest.fixture(scope="module")
def tally():
    """Counts over all tests of this file; `pytest -s` shows them at the end."""
    counts = Counter()
    yield counts
    head = ("mutants", "wrong", "refused", "refused though right", "accepted as equivalent")
    line = ", ".join(f"{name}: {counts.pop(name, 0)}" for name in head)
    detail = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    sys.stdout.write(f"\n{line}\n({detail})\n")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_every_mutant_that_the_oracle_finds_wrong_is_refused(case, tally):
    task, rng, steps, counts = case.task, Random(case.label), rows_of(case.schedule), Counter()
    promise = collective_of(*task)
    for kind, every in edits(steps, task.ranks, task.chunks).items():
        for edit in chosen(every, case.per_kind, task.ranks, rng):
            mutant = edited(steps, edit)
            proof = verify(schedule_of(mutant, task.ranks, task.chunks), promise)
            counts.update(judged(kind, finding(mutant, task, rng), proof))
    tally.update(counts)
    assert counts["wrong"] > counts["mutants"] / 2


def judged(kind: str, truth: str, proof) -> list[str]:
    """The counts that a mutant belongs to; fails where the oracle and the proof contradict each other."""
    said = str(proof.counterexample)
    if truth != "right":
        assert not proof.ok, f"{kind}: the oracle says {truth}, the proof accepts"
        return ["mutants", "wrong", "refused", truth + "!"]
    if proof.ok:
        return ["mutants", "accepted as equivalent", f"equivalent: {kind}"]
    assert any(words in said for words in STRICT), f"{kind}: the oracle finds nothing wrong, the proof says {said}"
    return ["mutants", "refused", "refused though right", f"strict: {said.partition(': ')[2].split(';')[0][:33]}"]
