# SPDX-License-Identifier: Apache-2.0
"""Batches that grow, and rates that follow: what comes in which order, in parts, and after a resumed run."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain
from math import sqrt

import pytest
import torch
from cases import for_each, taking_turns
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import commrt
from commrt.algorithms.catalogue import ALGORITHMS, by_name
from commrt.data.large_batch import BatchSizeControl, Rate
from commrt.errors import UsageError
from commrt.testing.ranks import run_ranks

DATA = TensorDataset(torch.arange(96.0))


def sampler(rank=0, ranks=1, length=96):
    return DistributedSampler(range(length), ranks, rank, shuffle=True, seed=3)


def control_of(sizes, most=None, **options):
    return BatchSizeControl(sampler(**options), sizes, most)


def rate_of(control, epochs=6, warmup=2, **options):
    """Return a rate, and what tells its value."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    rate = Rate(optimizer, control, epochs, warmup_epochs=warmup, **options)
    return rate, lambda: optimizer.param_groups[0]["lr"]


def epoch_of(control, epoch):
    """The batches that a loop gets, whole."""
    control.set_epoch(epoch)
    batches, parts = [], []
    for (values,) in DataLoader(DATA, batch_sampler=control):
        with control.part() as part:
            parts.append(values)
        if part.is_last:
            batches.append(torch.cat(parts).tolist())
            parts = []
    return batches


@given(
    length=st.integers(1, 96),
    sizes=st.dictionaries(st.integers(1, 9), st.integers(1, 40), max_size=3),
    first=st.integers(1, 40),
    epoch=st.integers(0, 12),
)
def test_every_epoch_has_whole_batches_of_its_size_and_each_sample_once(length, sizes, first, epoch):
    control = control_of({0: first, **sizes}, length=length)
    size = first if not [at for at in sizes if at <= epoch] else sizes[max(at for at in sizes if at <= epoch)]
    assume(size <= length)
    batches = epoch_of(control, epoch)
    assert [len(batch) for batch in batches] == [size] * (length // size)
    assert len({*chain(*batches)}) == size * (length // size)
    whole = sum(length // control.batch_in(each) for each in range(epoch + 1))
    assert control.epochs_after(whole) >= (epoch + 1 if length >= max([first, *sizes.values()]) else 0)


def test_parts_of_a_batch_are_the_batch():
    whole, parted = (control_of({0: 8, 1: 24}, most) for most in (None, 8))
    for epoch in (0, 1):
        assert epoch_of(whole, epoch) == epoch_of(parted, epoch)
    assert (whole.parts, parted.parts, len(parted), parted.steps) == (1, 3, 0, 4)


def test_epochs_come_in_other_orders_and_ranks_have_other_samples():
    control = control_of({0: 8})
    assert epoch_of(control, 0) != epoch_of(control, 1)
    halves = [{*chain(*epoch_of(control_of({0: 8}, rank=rank, ranks=2), 0))} for rank in range(2)]
    assert halves[0].isdisjoint(halves[1])


def test_a_run_that_is_resumed_goes_on_in_the_middle_of_an_epoch():
    control, again = (control_of({0: 8, 2: 24}, most=12) for _ in range(2))
    expected = epoch_of(control, 2)
    control.set_epoch(1)
    control.set_epoch(2)
    loader = iter(DataLoader(DATA, batch_sampler=control))
    for _ in range(4):  # two batches
        next(loader)
        with control.part():
            pass
    again.load_state_dict(control.state_dict())
    assert epoch_of(again, 2) == expected[2:]
    assert epoch_of(again, 3) == epoch_of(control, 3)


def test_a_checkpoint_after_the_last_step_of_an_epoch_begins_the_next_one():
    control, again = (control_of({0: 8, 2: 24}) for _ in range(2))
    epoch_of(control, 1)
    again.load_state_dict(control.state_dict())
    assert again.epoch == 2
    assert epoch_of(again, 2) == epoch_of(control, 2)


@for_each(("before", "after"), [(4, 8), (4, 2), (8, 1), (1, 3)])
def test_with_another_number_of_ranks_training_goes_on_as_far_as_it_was(before, after):
    control, later = (control_of({0: 8, 2: 24}, ranks=ranks, length=960) for ranks in (before, after))
    for done in (0.1, 1.0, 1.7, 2.6, 2.95, 3.9):
        (rate, value), (resumed, resumed_value) = (rate_of(each, 5, 1) for each in (control, later))
        for _ in range(control.updates_after(done)):
            rate.step()
        control.load_state_dict({"epochs": done})
        resumed.load_state_dict(rate.state_dict())
        later.load_state_dict(control.state_dict())
        a_step = 1 / min(control.steps_in(2), later.steps_in(2))
        assert resumed_value() == pytest.approx(value(), abs=4 * a_step)
        assert later.state_dict()["epochs"] == pytest.approx(control.state_dict()["epochs"], abs=a_step)


def test_an_epoch_in_which_no_step_can_be_made_is_an_error():
    with pytest.raises(UsageError, match="a batch of 10000 samples in epoch 1, and this rank has"):
        control_of({0: 8, 1: 10_000}).set_epoch(1)


def test_a_second_epoch_without_set_epoch_is_an_error():
    control = control_of({0: 8})
    epoch_of(control, 0)
    with pytest.raises(UsageError, match=r"epoch 0 is done: call set_epoch\(\)"):
        next(iter(control))


@for_each("ranks", [1, 2])
def test_a_batch_in_parts_gives_the_gradient_of_the_whole(ranks):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(96, 4, dtype=torch.float64), torch.randint(0, 3, (96,))

    def trained(world, most):
        mine = deepcopy(model)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        replica = commrt.attach(mine, optimizer, commrt.Ring(), world=world)
        control = control_of({0: 8, 1: 24}, most, rank=world.rank, ranks=ranks)
        for epoch in (0, 1):
            control.set_epoch(epoch)
            for places in control:
                with control.part(replica) as part:
                    (part.share * cross_entropy(mine(x[places]), y[places])).backward()
                if part.is_last:
                    optimizer.step()
                    optimizer.zero_grad()
        return torch.cat([param.detach().flatten() for param in mine.parameters()])

    whole, parted = (run_ranks(ranks, lambda world, most=most: trained(world, most))[0] for most in (None, 4))
    torch.testing.assert_close(parted, whole, rtol=0, atol=1e-12)


@for_each(
    ("sizes", "most", "says"),
    [
        ({}, None, "give a batch of one sample or more from epoch 0 on"),
        ({1: 8}, None, "from epoch 0 on"),
        ({0: 0}, None, "one sample or more"),
        ({0: 8}, 0, "most=0: at least one sample must fit"),
        ({0: 9}, 8, "a batch of 9 cannot come in 2 equal parts of at most 8"),
    ],
)
def test_sizes_that_cannot_be_are_refused_in_words(sizes, most, says):
    with pytest.raises(UsageError, match=says):
        control_of(sizes, most)


def rates(rule="keep", sizes=None):
    control = control_of(sizes or {0: 8})
    rate, value = rate_of(control, power=2, rule=rule)
    found = []
    for epoch in range(6):
        control.set_epoch(epoch)
        for _ in range(control.steps):
            found.append(value())
            rate.step()
    return found


def test_the_rate_rises_for_its_epochs_then_falls_to_nothing():
    found = rates()
    assert found[:24] == pytest.approx([2.0 * (number + 1) / 24 for number in range(24)])
    assert found[24:] == pytest.approx([2.0 * ((48 - number) / 48) ** 2 for number in range(48)])


@for_each(("rule", "factor"), [("keep", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_when_batches_grow_the_rate_does_what_its_rule_says(rule, factor):
    grown = rates(rule, {0: 8, 3: 32})
    assert len(grown) == 3 * 12 + 3 * 3
    assert grown[36::3] == pytest.approx([factor * each for each in rates()[36::12]])


def test_when_ranks_come_the_rate_follows_also_after_a_resume():
    (one, value), (other, resumed) = (rate_of(control_of({0: 8}), rule="linear") for _ in range(2))
    plain, expected = rate_of(control_of({0: 8}))
    for ranks in (None, 2, 4):
        one.step(ranks)
        plain.step()
    assert value() == 2 * expected()
    other.load_state_dict(one.state_dict())
    assert resumed() == value()


@for_each(
    ("changed", "says"),
    [({"rule": "cubic"}, "choose one of keep, sqrt, linear"), ({"warmup": 6}, "fewer than there are")],
)
def test_a_rate_that_cannot_be_is_refused_in_words(changed, says):
    with pytest.raises(UsageError, match=says):
        rate_of(control_of({0: 8}), **changed)


@for_each(("ranks", "name"), taking_turns([2, 4, 8, 16], [*ALGORITHMS]))
def test_an_exchange_in_fp16_is_wrong_by_a_rounding_per_addition_and_does_not_overflow(name, ranks):
    """Divided by the ranks before it is cast: values of which the sum is beyond fp16 have a mean that is not."""
    torch.manual_seed(ranks)
    gradients = 6e4 * torch.rand(ranks, 4096, dtype=torch.float64).add(0.05).clamp(max=1.0)
    schedule = by_name(name).schedule(0, ranks)

    def summed(world):
        wire = (gradients[world.rank] / ranks).half()
        world.run(schedule, wire)
        return wire

    means = run_ranks(ranks, summed)
    exact = gradients.mean(dim=0)
    error = (means[0].double() - exact).abs() / exact
    assert means[0].isfinite().all()
    assert all(torch.equal(means[0], other) for other in means)
    assert error.square().mean().sqrt() < sqrt(ranks) * 2**-11
    assert error.max() < ranks * 2**-11
