# SPDX-License-Identifier: Apache-2.0
"""Gossip and local SGD, where each rank has weights of its own, under the loops of users.

Ranks run out of data, have no batch, skip a step or accumulate; states are saved and loaded; models leave and come.
"""

from functools import partial

import pytest
import torch
from cases import for_each, on_ranks, taking_turns
from gossip_models import PATIENT_S, batch, local_step, model_of, params, same
from local_loops import ALGORITHMS, GOSSIPING, Loop, ends_equal
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import commrt
from commrt import Direct, Gossip
from commrt.errors import DisagreementError, UsageError
from commrt.local_sgd import LocalSGD, Mix, Nesterov, SlowMomentum
from commrt.quantization import Int4
from commrt.testing.ranks import run_ranks

WAYS = [Gossip(), Gossip(staleness=1), LocalSGD(3, 2), LocalSGD(2), GOSSIPING]
BATCHES = [(3, 6), (6, 3), (0, 4), (2, 7, 4), (4, 0, 0, 1), (5, 5)]
"""How many each rank has."""


@for_each(("batches", "algorithm"), taking_turns(BATCHES + BATCHES[:2], WAYS))
def test_ranks_that_run_out_of_data_answer_the_others_and_all_end_equal(batches, algorithm):
    def body(world):
        loop = Loop(world, algorithm)
        schedule = CosineAnnealingLR(loop.optimizer, 20)
        with loop.replica.join(schedule):
            for _ in range(batches[world.rank]):
                loop.run(1)
                schedule.step()
        momenta = [state["exp_avg"].clone() for state in loop.optimizer.state.values()]
        joined = loop.replica.step, schedule.last_epoch, [*params(loop.model), *momenta]
        loop.run(2)
        with loop.replica.join(schedule):
            loop.run(world.rank)
        loop.replica.consolidate()
        return *joined, loop.replica.step, params(loop.model)

    ranks, most = len(batches), max(batches)
    found = run_ranks(ranks, body, timeout_s=PATIENT_S)
    for steps, epoch, joined, last, weights in found:
        assert (steps, epoch, last) == (most, most, most + 2 + ranks - 1)
        assert same(joined, found[0][2])
        assert same(weights, found[0][4])


@on_ranks(2)
def test_join_refuses_an_outer_rule_that_needs_learning_rates(world):
    loop = Loop(world, LocalSGD(2, outer=SlowMomentum()))
    with pytest.raises(UsageError, match="with SlowMomentum: it divides"), loop.replica.join():
        pass


@for_each(
    ("algorithm", "skipped"),
    taking_turns([Gossip(), LocalSGD(2), LocalSGD(2, 1), LocalSGD(2), LocalSGD(2, 1)], [(1, 2, 5), (3, 7), (1, 2, 5)]),
)
@ends_equal(2)
def test_a_step_that_a_grad_scaler_skips_on_one_rank_counts_with_the_settings_of_its_own_pass(
    world, algorithm, skipped
):
    """Rank 1 meets an infinity in steps `skipped`; a schedule changes the learning rate."""
    loop, scaler = Loop(world, algorithm), torch.amp.GradScaler("cpu", init_scale=4.0)
    schedule = CosineAnnealingLR(loop.optimizer, 20)
    for step in range(8):
        loop.optimizer.zero_grad()
        loss = loop.model(batch(step, world.rank)).square().sum()
        scaler.scale(loss * (float("inf") if world.rank == 1 and step in skipped else 1.0)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        schedule.step()
    loop.replica.consolidate()
    assert loop.replica.step == 8
    assert scaler.get_scale() == (4.0 / 2 ** len(skipped) if world.rank == 1 else 4.0)
    return params(loop.model)


@for_each(
    ("algorithm", "steps"),
    [
        (Gossip(), 7),
        (LocalSGD(100), 7),
        (LocalSGD(4, 3), 8),  # an average has just left
        (LocalSGD(4, 3), 10),  # and here steps ago
        (LocalSGD(6, 5, fragments=2), 9),
        (LocalSGD(4, 4), 8),
    ],
)
def test_consolidate_makes_all_equal_at_their_mean_and_loses_nothing_that_ranks_have_learned(algorithm, steps):
    def body(world):
        loop = Loop(world, algorithm, make=torch.optim.SGD).run(steps)
        before = params(loop.model)
        loop.replica.consolidate()
        assert loop.replica.replicas_equal()
        assert loop.replica.disagreement() < 1e-6
        return before, params(loop.model)

    before, after = zip(*run_ranks(3, body), strict=True)
    for place, weights in enumerate(after[0]):
        mean = torch.stack([params[place] for params in before]).mean(0)
        torch.testing.assert_close(weights, mean, rtol=0, atol=1e-6)


SLOW_WAYS = [pytest.param(each, marks=pytest.mark.slow) for each in (ALGORITHMS[1], *ALGORITHMS[3:6], GOSSIPING)]


@pytest.mark.parametrize("algorithm", [Gossip(), ALGORITHMS[2], *SLOW_WAYS], ids=str)
def test_training_goes_on_from_a_checkpoint_with_the_same_bits_as_without_one(algorithm):
    def unbroken(world):
        return params(Loop(world, algorithm).run(12).model)

    def saving(world):
        loop = Loop(world, algorithm)
        states[world.rank] = {step: loop.run(step - loop.step).state() for step in saved}
        return params(loop.run(12 - loop.step).model)

    def resumed(world, step):
        loop = Loop(world, algorithm, model_of(1)).load(states[world.rank][step])
        return params(loop.run(12 - step).model)

    states, saved = {}, (4, 5, 8)
    expected = run_ranks(3, unbroken)
    assert all(map(same, run_ranks(3, saving), expected))
    for step in saved:
        assert all(map(same, run_ranks(3, partial(resumed, step=step)), expected))


# local SGD alone: what ranks keep equal, models of all kinds, and what is refused


@ends_equal(2)
def test_what_no_optimizer_steps_has_no_outer_rule(world):
    model = model_of()
    optimizer = torch.optim.SGD(model[:2].parameters(), lr=0.05)
    replica = commrt.attach(model, optimizer, LocalSGD(2, outer=SlowMomentum()), world=world)
    for step in range(4):
        local_step(model, optimizer, step, world.rank)
    replica.consolidate()
    return params(model)


@for_each(("algorithm", "steps"), taking_turns([*ALGORITHMS, GOSSIPING], [8, 9, 10]))
@ends_equal(2)
def test_consolidate_sets_the_weights_to_the_anchor(world, algorithm, steps):
    loop = Loop(world, algorithm).run(steps)
    loop.replica.consolidate()
    assert loop.replica.replicas_equal()
    assert same(params(loop.model), loop.anchors())
    return params(loop.model)


@ends_equal(3)
def test_the_averages_of_variances_stay_positive(world):
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, momentum=0.9))
    loop = Loop(world, LocalSGD(3, 2), model)
    for step in range(11):
        loop.optimizer.zero_grad()
        scale = 100.0 if (step + world.rank) % 3 else 0.01
        model(scale * batch(step, world.rank)).square().sum().backward()
        loop.optimizer.step()
        assert (model[1].running_var >= 0).all()
    loop.replica.consolidate()
    assert model[1].num_batches_tracked == 11
    return [*model.buffers()]


def test_with_a_wire_of_codes_buffers_stay_local_until_consolidate():
    def body(world):
        model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
        loop = Loop(world, LocalSGD(2, inner=Direct(), wire=Int4()), model).run(4)
        before = model[1].running_var.clone()
        loop.replica.consolidate()
        return before, model[1].running_var.clone()

    (own, first), (other, second) = run_ranks(2, body)
    assert not torch.equal(own, other)
    assert torch.equal(first, own)
    assert torch.equal(second, own)


@ends_equal(2)
def test_frozen_and_tied_parameters(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    model[3].requires_grad_(False)
    loop = Loop(world, LocalSGD(2, 1, fragments=2), model)
    frozen = model[3].weight.clone()
    loop.run(7).replica.consolidate()
    assert torch.equal(model[3].weight, frozen)
    assert [name for kind, name in loop.agreed() if kind == "anchors"] == ["0.weight", "0.bias", "2.bias"]
    return params(model)


@ends_equal(3)
def test_weights_of_16_bits_have_anchors_of_32(world):
    loop = Loop(world, LocalSGD(2, 1, outer=Nesterov(0.7, 0.5)), model_of().bfloat16(), make=torch.optim.SGD)
    for step in range(9):
        loop.optimizer.zero_grad()
        loop.model(batch(step, world.rank).bfloat16()).square().sum().backward()
        loop.optimizer.step()
    loop.replica.consolidate()
    assert {tensor.dtype for tensor in loop.agreed().values()} == {torch.float32}
    assert {param.dtype for param in params(loop.model)} == {torch.bfloat16}
    return params(loop.model)


def test_unwise_settings_are_logged(caplog):
    run_ranks(1, lambda world: Loop(world, LocalSGD(4, 3, Mix(0))))
    assert "throws away" in caplog.text


@pytest.mark.slow
@for_each(
    ("steps", "period", "delay", "is_refused"), [(5, 3, 3, True), (8, 4, 3, True), (5, 6, 4, True), (3, 5, 1, False)]
)
@on_ranks(2)
def test_period_and_delay_change_only_where_nothing_is_under_way(world, steps, period, delay, is_refused):
    state = Loop(world, LocalSGD(4, 4)).run(steps).state()
    loop = Loop(world, LocalSGD(period, delay))
    if not is_refused:
        assert loop.load(state).run(4).replica.step == steps + 4
        return
    with pytest.raises(UsageError, match=rf"averages in flight of period=4, delay=4.*period={period}, delay={delay}"):
        loop.load(state)


@on_ranks(2)
def test_a_state_of_other_training_begins_anew_from_the_weights(world):
    loop = Loop(world, commrt.Torus2D()).run(3)
    other = Loop(world, LocalSGD(2, outer=Nesterov()), model_of(1))
    other.load(loop.state())
    assert (same(other.anchors(), params(loop.model)), other.replica.step) == (True, 3)


@for_each(
    ("change", "message"),
    [
        (lambda state: {**state, "fragments": state["fragments"][:1]}, "1 fragments .* attached with 2"),
        (lambda state: {**state, "step": -1}, "without a step number"),
        (lambda state: {**state, "fragments": [{**part, "anchors": {}} for part in state["fragments"]]}, "none as"),
    ],
)
@on_ranks(2)
def test_a_state_that_does_not_fit_is_refused(world, change, message):
    loop = Loop(world, LocalSGD(4, 2, fragments=2)).run(5)
    with pytest.raises(UsageError, match=message):
        loop.replica.load_state_dict(change(loop.replica.state_dict()))
    assert loop.replica.step == 5


@on_ranks(2)
def test_ranks_that_load_other_anchors_are_told(world):
    loop = Loop(world, LocalSGD(4)).run(5)
    state = loop.replica.state_dict()
    if world.rank:
        state["fragments"][0]["anchors"]["0.bias"][0] += 1
    before = loop.anchors()
    with pytest.raises(DisagreementError, match="anchors"):
        loop.replica.load_state_dict(state)
    assert same(loop.anchors(), before)
