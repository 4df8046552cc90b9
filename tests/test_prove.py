# SPDX-License-Identifier: Apache-2.0
"""What `make prove` proves at all rank counts is right at a few, and slow at large ones; it says what is wrong."""

import prove
import pytest

from commrt.algorithms import tree
from commrt.schedule import empty

FEW = [ranks for ranks in prove.FEW if ranks < 20]
FEWER = {"combining beside exchanges": (3, 4, 5), "slices": (2, 3, 5, 8, 12), "within hosts": (1, 2, 3, 6, 8, 12, 13)}
"""Rank counts of sweeps that take longer than others."""
LARGE = {*prove.FEW, 97, 128, 256, 300, 1024} - {*FEW}


@pytest.mark.parametrize("name", [name for name in prove.SWEEPS if {*FEW} & {*prove.SWEEPS[name].ranks}])
def test_a_sweep_finds_nothing_wrong_at_a_few_rank_counts(name):
    count, wrong = prove.wrong(name, FEWER.get(name, FEW))
    assert wrong == []
    assert count


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_sweeps_find_nothing_wrong_at_large_rank_counts_of_each_kind():
    """A prime, powers of two, odd and composite ones, up to the largest; `make prove` has all counts between them."""
    for name in prove.SWEEPS:
        _, wrong = prove.wrong(name, LARGE - {1024} if name == "NCCL groups" else LARGE)
        assert wrong == [], name


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
