# SPDX-License-Identifier: Apache-2.0
"""Backup workers under loops that set the learning rate from a counter of their own, as nanoGPT's does."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from late_ranks import MODEL, Progress, batch

import commrt
from commrt.errors import DisagreementError
from commrt.testing.ranks import run_ranks

STEPS, ACCUMULATED = 7, 3


def rate(iter_num):
    return 0.01 * (iter_num + 1)


def step(model, optimizer, replica, iter_num):
    """Sets the rate, accumulates gradients, and steps: one iteration of nanoGPT's loop."""
    for group in optimizer.param_groups:
        group["lr"] = rate(iter_num)
    for micro_step in range(ACCUMULATED):
        with nullcontext() if micro_step == ACCUMULATED - 1 else replica.no_sync():
            loss = model(batch(micro_step, iter_num)).square().mean() / ACCUMULATED
            loss.backward()
    used = replica.last.step, optimizer.param_groups[0]["lr"]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return used if replica.last.counted else None


def trained(world, progress, *, counts_for_itself):
    """Rank 1 is late in its first iteration; rank 2 leaves at step 3, so that the gradients of rank 1 count then."""
    model = deepcopy(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world)
    iter_num, used = 0, []
    while iter_num < STEPS:
        if world.rank == 1 and not iter_num:
            progress.wait_for(3)
        if world.rank == 2 and iter_num == 3:
            progress.wait_for(STEPS)
        used.append(step(model, optimizer, replica, iter_num))
        iter_num = iter_num + 1 if counts_for_itself else replica.step
        progress.tell(replica._backup_step.version)
    return {*used} - {None}, replica.replicas_equal(), replica.step, replica.lost


def test_the_rate_of_each_step_is_right_on_a_rank_that_was_late_if_the_loop_asks_for_its_step():
    progress = Progress()
    ends = run_ranks(3, lambda world: trained(world, progress, counts_for_itself=False))
    assert [end[1:] for end in ends] == [(True, STEPS, ())] * 3
    rates = [(number, rate(number)) for number in range(STEPS)]
    assert [used for used, *_ in ends] == [{*rates}, {*rates[3:]}, {*rates[:3]}]


def test_a_loop_that_counts_for_itself_is_told_the_line_that_makes_it_right():
    progress = Progress()

    def body(world):
        if world.rank == 2:
            model = deepcopy(MODEL)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world)
            for number in range(3):
                step(model, optimizer, replica, number)
            return progress.wait_for(STEPS)
        try:
            with pytest.raises(DisagreementError, match=r"put `iter_num = replica\.step` at its top"):
                trained(world, progress, counts_for_itself=True)
        finally:
            progress.tell(STEPS)

    run_ranks(3, body)
