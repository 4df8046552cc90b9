# SPDX-License-Identifier: Apache-2.0
"""A program on a buffer does what its schedule says, whatever the sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import commrt
from commrt.program import program
from commrt.proof.spec import all_reduce
from commrt.runtime.executor import bind
from commrt.schedule import ADD, COPY, Schedule, Step
from commrt.testing.ranks import run_ranks
from commrt.transport.local import Fabric, LocalTransport


def test_additions_to_overlapping_ranges_happen_range_by_range():
    step = Step.of([1, 2, 3], 0, [0, 1, 0], [2, 3, 2], ADD)
    schedule = Schedule("overlapping", 4, 3, lambda: iter([step]))

    def body(world):
        buffer = torch.full((24,), [0.0, 1e8, 1.0, -1e8][world.rank])
        world.run(schedule, buffer)
        return buffer

    chunk = run_ranks(4, body)[0][8:16]
    in_order = (torch.tensor(0.0) + 1e8 - 1e8) + 1.0
    assert torch.equal(chunk, in_order.expand(8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.complex64], ids=str)
def test_a_star_adds_all_that_arrives_at_once_without_losing_bits(dtype):
    gather, spread = Step.of([1, 2, 3], 0, 0, 1, ADD), Step.of(0, [1, 2, 3], 0, 1, COPY)
    star = Schedule("star", 4, 1, lambda: iter([gather, spread]))
    commrt.prove(star, all_reduce(4, 1))
    value = 2**20 + 1j if dtype.is_complex else 2**24 + 1

    def body(world):
        buffer = torch.full((5,), value, dtype=dtype)
        world.run(star, buffer)
        return buffer

    assert all(buffer.tolist() == [4 * value] * 5 for buffer in run_ranks(4, body))


@pytest.mark.parametrize(
    ("hop", "reads"),
    [
        ([(0, 1, 0, ADD), (1, 0, 1, ADD)], True),
        ([(0, 1, 0, ADD), (1, 0, 0, ADD)], False),  # the peer reads what this rank would change
        ([(0, 1, 0, ADD), (1, 0, 1, COPY)], False),
        ([(0, 1, 0, ADD), (1, 0, 1, ADD), (1, 0, 2, COPY)], False),
        ([(1, 0, 1, ADD), (1, 0, 2, ADD)], True),
    ],
)
def test_a_rank_only_reads_what_it_adds_to_chunks_that_it_does_not_send(hop, reads):
    step = Step.of(*map(list, zip(*[(src, dst, lo, lo + 1) for src, dst, lo, _ in hop], strict=True)), COPY)
    step = replace(step, combine=[combine for *_, combine in hop])
    groups = []

    class Recorded(LocalTransport):
        def bind(self, group):
            groups.append(group)
            return super().bind(group)

    bind(program(Schedule("a hop", 2, 4, lambda: iter([step])), 0), torch.zeros(64), Recorded(Fabric(2), 0))
    assert [group.reads for group in groups] == [reads]
