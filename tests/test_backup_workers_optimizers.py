# SPDX-License-Identifier: Apache-2.0
"""Backup workers with several optimizers, of which some do not step after every backward pass."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from cases import for_each, on_ranks, taking_turns
from late_ranks import Progress, weights
from torch import nn

import commrt
from commrt.backup_workers.backup_step import SkippingGuard
from commrt.errors import DisagreementError
from commrt.testing.ranks import run_ranks

STEPS, LATE_FROM = 9, 5
"""A rank is late in each step from `LATE_FROM` on."""


class Parts(nn.ModuleList):
    """A generator, a part between, and a critic; a loop may call all or some of them."""

    def forward(self, x, first=0):
        for part in list(self)[first:]:
            x = part(x)
        return x

    def call(self, numbers, x):
        """Call these parts, and not the module that was attached."""
        for number in numbers:
            x = self[number](x)
        return x


with torch.random.fork_rng():
    torch.manual_seed(0)
    PARTS = Parts([nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)]).double()


def drawn(version, width):
    """A batch that is the same on all ranks, so that the weights do not depend on whose gradients count."""
    return torch.randn(5, width, generator=torch.Generator().manual_seed(version), dtype=torch.float64)


def turns(parts, version):
    """Two steps of the critic, then one of the generator, whose gradients reach the critic, too."""
    return (parts.call([2], drawn(version, 4)), [2]) if version % 3 < 2 else (parts(drawn(version, 3)), [0])


def turns_of_parts(parts, version):
    critic = version % 3 < 2
    x = drawn(version, 4) if critic else parts.call([0, 1], drawn(version, 3))
    return parts.call([2], x), [2 if critic else 0]


def turns_of_three(parts, version):
    first = version % 3
    return parts(drawn(version, 4 if first else 3), first), [first]


def no_pass_in_common(parts, version):
    return (parts.call([0], drawn(version, 3)), [0]) if version % 2 else (parts.call([2], drawn(version, 4)), [2])


def whole(which):
    """All parts are called; ``which(version)`` are the optimizers that step."""
    return lambda parts, version: (parts(drawn(version, 3)), which(version))


all_of_them = whole(lambda _: [0, 1, 2])
LOOPS = {
    "turns": turns,
    "turns of parts": turns_of_parts,
    "turns of three": turns_of_three,
    "no pass in common": no_pass_in_common,
    "all of them": all_of_them,
    "one never": whole(lambda _: [0, 1]),
    "one that a scaler skips at times": whole(lambda version: [0, 1] if version % 3 == 2 else [0, 1, 2]),
    "none in the last pass": whole(lambda version: [] if version == STEPS - 1 else [0, 1, 2]),
}
ZEROED = ["first", "after forward", "last"]


def optimizers_of(parts):
    return [torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01) for part in parts]


def step(parts, optimizers, loop, version, zero, between=lambda: None):
    """One iteration that zeroes all gradients `zero` (at the begin, after the forward pass, at the end)."""
    if zero == "first":
        parts.zero_grad()
    out, which = loop(parts, version)
    if zero == "after forward":
        parts.zero_grad()
    out.square().mean().backward()
    for number in which:
        optimizers[number].step()
        between()
    if zero == "last":
        parts.zero_grad()


def trained_alone(loop, zero):
    parts = deepcopy(PARTS)
    optimizers = optimizers_of(parts)
    for version in range(STEPS):
        step(parts, optimizers, loop, version, zero)
    return weights(parts)


def trained_with_a_late_rank(loop, zero, late=1, backups=1, ranks=3):
    progress = Progress()

    def body(world):
        parts = deepcopy(PARTS)
        optimizers = optimizers_of(parts)
        replica = commrt.attach(parts, optimizers, commrt.BackupWorkers(backups), world=world)
        while replica.drain() or replica.step < STEPS:
            if world.rank == late and replica.step >= LATE_FROM:
                progress.wait_for(min(replica.step + 1, STEPS))
            step(parts, optimizers, loop, replica.step, zero)
            progress.tell_of(replica)
        return replica.replicas_equal(), replica.step, replica.lost, weights(parts)

    return run_ranks(ranks, body)


def check(loop, zero, **options):
    """If gradients are never zeroed, they depend on whose count, and ranks are compared with each other alone."""
    wanted = None if zero == "never" else trained_alone(loop, zero)
    for equal, at, lost, found in trained_with_a_late_rank(loop, zero, **options):
        assert (equal, at, lost) == (True, STEPS, ())
        assert wanted is None or all(
            torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(found, wanted, strict=True)
        )


@pytest.mark.slow
@for_each(("loop", "zero"), [*taking_turns(LOOPS, ZEROED), ("turns", "after forward"), ("turns", "last")])
def test_a_late_rank_gets_the_others_weights_whichever_optimizers_step(loop, zero):
    check(LOOPS[loop], zero)


@for_each(
    ("late", "backups", "ranks", "loop", "zero"),
    [(0, 1, 3, turns, "first"), (2, 2, 5, turns, "first"), (1, 1, 3, turns, "never"), (1, 1, 3, all_of_them, "never")],
)
def test_any_rank_may_be_late_in_a_loop_whose_optimizers_take_turns(late, backups, ranks, loop, zero):
    check(loop, zero, late=late, backups=backups, ranks=ranks)


def test_a_loop_that_zeroes_only_what_it_steps_and_counts_for_itself_keeps_its_late_rank():
    progress = Progress()

    def body(world):
        net = nn.ModuleList(deepcopy(PARTS[i]) for i in (0, 2))
        optimizers = optimizers_of(net)
        replica = commrt.attach(net, optimizers, commrt.BackupWorkers(1), world=world)
        for number in range(STEPS):
            if world.rank == 1:
                progress.wait_for(min(max(number, replica.step) + 1, STEPS))
            critic = number % 3 < 2
            optimizers[critic].zero_grad()
            (net[1](drawn(number, 4)) if critic else net[1](net[0](drawn(number, 3)))).square().mean().backward()
            optimizers[critic].step()
            progress.tell_of(replica)
        return replica.replicas_equal(), replica.step, replica.lost

    assert run_ranks(3, body) == [(True, STEPS, ())] * 3


@for_each("zero", ["first", "never"])
def test_replicas_are_equal_in_a_collective_between_two_optimizers_steps(zero):
    progress = Progress()

    def body(world):
        parts, seen = deepcopy(PARTS), []
        optimizers = optimizers_of(parts)
        replica = commrt.attach(parts, optimizers, commrt.BackupWorkers(1), world=world)

        def compare():
            progress.tell(number + 1)  # in a collective, the others wait for the late rank
            seen.append(replica.replicas_equal())

        for number in range(4):
            if world.rank == 1:
                progress.wait_for(number + 1)
            step(parts, optimizers, all_of_them, number, zero, compare)
        return seen, replica.step, replica.lost

    assert run_ranks(3, body) == [([True] * 12, 4, ())] * 3


@for_each("algorithm", [commrt.Torus2D(), commrt.BackupWorkers(0)])
@on_ranks(2)
def test_ranks_that_step_different_optimizers_are_told_so_in_the_next_pass(world, algorithm):
    parts = deepcopy(PARTS)
    optimizers = optimizers_of(parts)
    commrt.attach(parts, optimizers, algorithm, world=world)
    step(parts, optimizers, whole(lambda _: [world.rank]), 0, "first")
    with pytest.raises(
        DisagreementError, match=r"stepped different optimizers: .* choose the optimizer by replica\.step"
    ):
        step(parts, optimizers, all_of_them, 1, "first")


def test_an_error_in_a_step_that_changes_nothing_leaves_no_trace_in_the_next_one():
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], 0.1)
    guard = SkippingGuard([optimizer], [param], lambda: None)
    param.grad = torch.zeros(1)
    guard.drop()
    guard.before_step(optimizer, (optimizer,), {})  # hides it, and the step ends in an error
    param.grad = torch.ones(1)
    guard.open()
    guard.before_step(optimizer, (optimizer,), {})
    guard.after_step(optimizer)
    assert (guard.steps, guard.is_due, param.grad.item()) == (1, False, 1.0)
