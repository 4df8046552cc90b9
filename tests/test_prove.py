# SPDX-License-Identifier: Apache-2.0
"""`make prove`: what it proves is right at a few rank counts, and slow at all of them; it says what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import closed_forms
import prove

from commrt.algorithms import tree
from commrt.algorithms.catalogue import COLLECTIVES
from commrt.errors import UsageError
from commrt.schedule import empty

FEW = {"combining beside exchanges": (3, 4, 5), "slices": (2, 3, 5, 8, 12)}
"""Rank counts of sweeps that take longer than others."""


@pytest.mark.cpu_limit(6, reason="proofs of one kind, together")
@pytest.mark.parametrize("name", [name for name in prove.SWEEPS if {*prove.FEW} & {*prove.SWEEPS[name].ranks}])
def test_a_sweep_finds_nothing_wrong_at_a_few_rank_counts(name):
    count, wrong = prove.wrong(name, FEW.get(name, prove.FEW))
    assert wrong == []
    assert count


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_sweeps_find_nothing_wrong_at_all_rank_counts(capsys):
    failed = prove.main([])
    said = capsys.readouterr().out
    assert failed == 0, said
    assert said.splitlines()[-1].startswith("0 of ")


def test_every_schedule_of_a_collective_has_a_closed_form():
    names = {f"{collective} {name}" for collective, named in COLLECTIVES.items() for name in named}
    assert closed_forms.COSTS.keys() == names


def test_a_schedule_that_does_something_else_is_named_with_its_counterexample(monkeypatch, capsys):
    monkeypatch.setattr(prove, "candidates", lambda collective, ranks, root=0: {"tree": empty(ranks)})
    assert prove.main(["--few", "--only", "broadcast"]) == 1
    said = capsys.readouterr().out
    assert (
        "broadcast tree from root 1 (nothing, 2 ranks): rank 0, chunk 0: ends with the sum over ranks {0}; exp" in said
    )
    assert said.splitlines()[-1].startswith("58 of 59 checks failed")


def test_a_schedule_that_costs_more_is_named_with_its_cost(monkeypatch):
    slow = {"tree": tree.broadcast(4).then(tree.broadcast(4))}
    monkeypatch.setattr(prove, "candidates", lambda *_: slow)
    _, found = prove.wrong("broadcast", [4])
    assert "takes 4 steps and 4 buffers instead of 2 and 2" in found[0]


def test_a_name_that_no_sweep_has_is_refused_with_all_names(capsys):
    with pytest.raises(SystemExit) as ended:
        prove.main(["--only", "no such"])
    assert ended.value.code == 2
    assert "choose one of broadcast; reduce; gather" in capsys.readouterr().err


def test_collectives_that_take_no_such_rank_count_are_left_out():
    with pytest.raises(UsageError):
        COLLECTIVES["all_gather"]["doubling"](6)
    assert prove.wrong("all_gather", [6]) == (3, [])
