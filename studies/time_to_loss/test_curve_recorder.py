# SPDX-License-Identifier: Apache-2.0
"""A recorder that any training loop can use: what it records of known gradients, and what it leaves out."""

from __future__ import annotations

import gc
import json
import weakref

import numpy as np
import pytest
import torch
from cases import for_each
from curve import GOSSIP, SYNCHRONOUS, Curve  # of studies/time_to_loss, which reads what is written here
from curve_recorder import CurveRecorder
from small_models import backward, data, local_gradients, net, sgd
from torch import nn
from torch.nn.functional import cross_entropy

import commrt
from commrt.testing.ranks import run_ranks


def recorded(ranks, body):
    """Return the curve of the first rank; the others have none."""
    first, *others = run_ranks(ranks, body)
    assert others == [None] * (ranks - 1)
    return Curve.parsed(first)


def norms_by_hand(ranks):
    """Return the mean of the squared norms of the ranks' gradients, and the squared norm of their mean."""
    parts = [torch.cat([grad.flatten() for grad in local_gradients(net(), rank)]).double() for rank in range(ranks)]
    return sum(part.square().sum() for part in parts).item() / ranks, (sum(parts) / ranks).square().sum().item()


@for_each(("cap_mb", "ranks"), [(25.0, 2), (1e-9, 3)])
def test_statistics_are_those_of_the_gradients_before_and_after_averaging(ranks, cap_mb):
    def body(world):
        model = net()
        recorder = CurveRecorder(model)
        optimizer = sgd(model)
        commrt.attach(model, optimizer, world=world, bucket_cap_mb=cap_mb)
        backward(model, world.rank)
        optimizer.step()
        recorder.record(float(world.rank))
        return recorder.lines(world, SYNCHRONOUS, 5 * world.size)

    curve = recorded(ranks, body)
    own, mean = norms_by_hand(ranks)
    assert curve.losses == pytest.approx([(ranks - 1) / 2])
    assert curve.signal == pytest.approx([(ranks * mean - own) / (ranks - 1)], rel=1e-5)
    assert curve.noise == pytest.approx([ranks * (own - mean) / (ranks - 1)], rel=1e-5)


def test_statistics_of_later_steps_are_not_mixed_with_those_of_earlier_ones():
    def body(world):
        model = nn.Linear(1, 1, bias=False)
        recorder, optimizer = CurveRecorder(model), torch.optim.SGD(model.parameters(), 0.0)
        commrt.attach(model, optimizer, world=world)
        for step in range(3):
            optimizer.zero_grad()
            (model.weight * (step + 2 * world.rank)).sum().backward()  # gradients step and step + 2
            optimizer.step()
            recorder.record(0.0)
        return recorder.lines(world, SYNCHRONOUS, world.size)

    curve = recorded(2, body)
    assert curve.signal == pytest.approx([0, 3, 8])  # a product of both gradients
    assert curve.noise == pytest.approx([2, 2, 2])  # half of the square of their difference


def test_an_accumulated_gradient_counts_once():
    def body(world):
        model = nn.Linear(1, 1, bias=False)
        recorder, optimizer = CurveRecorder(model), torch.optim.SGD(model.parameters(), 0.0)
        replica = commrt.attach(model, optimizer, world=world)
        with replica.no_sync():
            model.weight.sum().backward()
        (model.weight * (2 * world.rank)).sum().backward()  # gradients 1 and 3, in all
        optimizer.step()
        recorder.record(0.0)
        return recorder.lines(world, SYNCHRONOUS, world.size)

    curve = recorded(2, body)
    assert [*curve.signal, *curve.noise] == pytest.approx([3, 2])


def test_a_parameter_that_a_step_does_not_use_does_not_count():
    def body(world):
        model = nn.Linear(1, 1)
        recorder, optimizer = CurveRecorder(model), torch.optim.SGD(model.parameters(), 0.0)
        commrt.attach(model, optimizer, world=world)
        for used in ([model.weight, model.bias], [model.weight]):
            optimizer.zero_grad()
            sum(param.sum() for param in used).backward()
            optimizer.step()
            recorder.record(0.0)
        return recorder.lines(world, SYNCHRONOUS, world.size)

    curve = recorded(2, body)
    assert [*curve.signal, *curve.noise] == pytest.approx([2, 1, 0, 0])


def test_one_rank_has_no_statistics():
    def body(world):
        model = net()
        recorder, optimizer = CurveRecorder(model), sgd(model)
        commrt.attach(model, optimizer, world=world)
        backward(model, 0)
        optimizer.step()
        recorder.record(1.5)
        return recorder.lines(world, SYNCHRONOUS, 5)

    curve = recorded(1, body)
    assert (curve.signal, curve.noise, [*curve.losses]) == (None, None, [1.5])


def test_a_run_that_diverges_has_a_curve():
    def body(world):
        model = nn.Linear(1, 1)
        recorder = CurveRecorder(model)
        commrt.attach(model, world=world)
        model(torch.full((1, 1), torch.inf)).sum().backward()
        recorder.record(torch.nan)
        return recorder.lines(world, SYNCHRONOUS, world.size)

    curve = recorded(2, body)
    assert all(np.isnan([*curve.losses, *curve.signal, *curve.noise]))


def test_the_first_rank_that_is_left_has_the_curve_and_it_says_that_ranks_were_lost():
    def body(world):
        model = net()
        recorder, optimizer = CurveRecorder(), sgd(model)
        commrt.attach(model, optimizer, commrt.Gossip(), world=world)
        for step in range(6):
            if (world.rank, step) == (0, 2):
                return None  # leaves this world
            x, y = data(world.rank, step)
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            recorder.record(float(world.rank))
        return recorder.lines(world, GOSSIP, 15)

    _, lines, last = run_ranks(3, body, timeout_s=5.0)
    assert last is None
    curve = Curve.parsed(lines)
    assert curve.method == "gossip, lost 1"
    assert [*curve.losses] == [1.5] * 6


def test_a_recorder_that_is_dropped_with_its_model_keeps_nothing_alive():
    model = net()
    recorder = CurveRecorder(model)
    backward(model, 0)
    watched = weakref.ref(model[0].weight)
    del model, recorder
    gc.collect()
    assert watched() is None


def test_a_curve_ends_the_recording():
    def body(world):
        model = nn.Linear(1, 1, bias=False)
        recorder = CurveRecorder(model)
        recorder.record(0.0)
        recorder.lines(world, SYNCHRONOUS, 1)
        return model.weight._post_accumulate_grad_hooks

    assert not run_ranks(1, body)[0]


def test_a_curve_has_the_steps_that_all_ranks_have_made():
    def body(world):
        recorder = CurveRecorder()
        for step in range(3 + world.rank):
            recorder.record(torch.tensor(float(step)))
        return recorder.lines(world, GOSSIP, 2)

    assert recorded(2, body).losses.tolist() == [0.0, 1.0, 2.0]


def test_lines_say_what_the_run_was():
    def body(world):
        recorder = CurveRecorder()
        recorder.record(2.5)
        return recorder.lines(world, "local", 8, {"period": 4}, seed=7, recipe={"lr": 0.1, "epochs": 2})

    head, step = map(json.loads, run_ranks(1, body)[0].splitlines())
    facts = {"training": "local", "ranks": 1, "batch": 8, "settings": {"period": 4}, "seed": 7}
    assert head == {"commrt_curve": 1, **facts, "recipe": {"lr": 0.1, "epochs": 2}}
    assert step == {"step": 0, "loss": 2.5}
