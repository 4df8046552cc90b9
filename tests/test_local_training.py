# SPDX-License-Identifier: Apache-2.0
"""Local SGD in a user's loop: what ranks keep equal, checkpoints, scalers, buffers, uneven data, and lost ranks."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from threading import Event

import failing_ranks
import pytest
import torch
from gossip_models import batch, local_step, model_of, params, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import commrt
from commrt import Direct, Gossip, HeavyBall, Int4, Int8, LocalSGD, Mix, Nesterov, SlowMomentum
from commrt.buckets.engine import Engine
from commrt.errors import DisagreementError, Place, UsageError
from commrt.testing.processes import run_processes
from commrt.testing.ranks import run_ranks

PATIENT_S = 20.0
ALGORITHMS = [
    LocalSGD(3),
    LocalSGD(3, 2),
    LocalSGD(4, 4, outer=Nesterov(0.7, 0.6)),
    LocalSGD(4, 1, Mix(0.5), SlowMomentum(), fragments=3),
    LocalSGD(6, 3, fragments=3, wire=torch.bfloat16, warmup=2),
    LocalSGD(4, 2, outer=HeavyBall(), fragments=2, inner=Direct(), wire=Int4()),
    LocalSGD(3, 1, anchor="cpu", inner=commrt.Ring()),
]
GOSSIPING = commrt.noloco(3, inner=Gossip())


class Loop:
    """A rank's training loop."""

    def __init__(self, world, algorithm, model=None, make=torch.optim.AdamW, **options):
        self.world, self.model = world, model_of() if model is None else model
        self.optimizer = make(self.model.parameters(), lr=0.05)
        options = {"bucket_cap_mb": 1e-4, **options}
        self.replica = commrt.attach(self.model, self.optimizer, algorithm, world=world, **options)
        self.step = 0

    def run(self, steps):
        for _ in range(steps):
            local_step(self.model, self.optimizer, self.step, self.world.rank)
            self.step += 1
        return self

    def state(self):
        return copy.deepcopy([part.state_dict() for part in (self.model, self.optimizer, self.replica)])

    def load(self, states):
        for part, state in zip((self.model, self.optimizer, self.replica), states, strict=True):
            part.load_state_dict(state)
        self.step = self.replica.step
        return self

    def agreed(self):
        """Anchor and momentum, by name."""
        parts = self.replica.state_dict()["fragments"]
        return {
            (kind, name): tensor
            for part in parts
            for kind in ("anchors", "velocities")
            for name, tensor in part[kind].items()
        }


def alike(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_anchor_and_momentum_are_bitwise_equal_on_all_ranks(algorithm, ranks):
    def body(world):
        loop = Loop(world, algorithm)
        return [loop.run(1).agreed() for _ in range(15)], params(loop.model)

    (first, weights), *others = run_ranks(ranks, body)
    assert not alike(first[0], first[-1])
    for found, own in others:
        assert all(map(alike, first, found))
        assert not same(weights, own) or algorithm.delay == 0


@pytest.mark.parametrize("algorithm", [*ALGORITHMS[1:6], GOSSIPING], ids=str)
def test_training_goes_on_from_a_checkpoint_with_the_same_bits_as_without_one(algorithm):
    def unbroken(world):
        return params(Loop(world, algorithm).run(12).model)

    def saving(world):
        loop = Loop(world, algorithm)
        states[world.rank] = [loop.run(1).state() for _ in range(12)]
        return params(loop.model)

    def resumed(world, step):
        loop = Loop(world, algorithm, model_of(1)).load(states[world.rank][step - 1])
        return params(loop.run(12 - step).model)

    states = {}
    expected = run_ranks(3, unbroken)
    assert all(map(same, run_ranks(3, saving), expected))
    for step in range(4, 10):
        assert all(map(same, run_ranks(3, partial(resumed, step=step)), expected))


@pytest.mark.parametrize(
    ("steps", "algorithm", "is_refused"), [(5, (3, 3), True), (8, (3, 3), True), (3, (5, 1), False)]
)
def test_period_and_delay_change_only_where_nothing_is_under_way(steps, algorithm, is_refused):
    def body(world):
        state = Loop(world, LocalSGD(4, 4)).run(steps).state()
        loop = Loop(world, LocalSGD(*algorithm))
        if not is_refused:
            return loop.load(state).run(4).replica.step
        with pytest.raises(UsageError, match=r"averages under way of period=4, delay=4.*period=3, delay=3"):
            loop.load(state)
        return None

    assert run_ranks(2, body) == [None if is_refused else steps + 4] * 2


class Scaled:
    """A loop with a `GradScaler` and a schedule of the learning rate; one rank meets an infinity in some steps."""

    def __init__(self, world, algorithm, skipped):
        self.loop, self.skipped = Loop(world, algorithm), skipped
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.loop.optimizer, 20)

    def run(self, steps):
        loop = self.loop
        for _ in range(steps):
            loop.optimizer.zero_grad()
            loss = loop.model(batch(loop.step, loop.world.rank)).square().sum()
            if loop.world.rank == 1 and loop.step in self.skipped:
                loss = loss * float("inf")
            self.scaler.scale(loss).backward()
            self.scaler.step(loop.optimizer)
            self.scaler.update()
            self.schedule.step()
            loop.step += 1
        return loop


@pytest.mark.parametrize("delay", [0, 1])
def test_a_skipped_step_at_a_periods_end_has_the_settings_of_its_own_backward_pass(delay):
    def body(world):
        loop = Scaled(world, LocalSGD(2, delay), skipped=(1, 2, 5)).run(8)
        loop.replica.consolidate()
        return params(loop.model)

    assert same(*run_ranks(2, body))


@pytest.mark.parametrize("delay", [0, 2])
def test_a_checkpoint_after_a_step_that_one_rank_skipped_can_be_loaded(delay):
    def body(world):
        state = Scaled(world, LocalSGD(4, delay), skipped=(3,)).run(4).state()
        loop = Loop(world, LocalSGD(4, delay)).load(state).run(3)
        loop.replica.consolidate()
        return loop.replica.step, params(loop.model)

    (steps, first), (_, second) = run_ranks(2, body)
    assert steps == 7
    assert same(first, second)


def test_ranks_run_out_of_data_where_learning_rates_follow_a_schedule():
    def body(world):
        loop = Loop(world, LocalSGD(2, 1))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 20)
        with loop.replica.join(schedule):
            for _ in range(3 + 4 * world.rank):
                loop.run(1)
                schedule.step()
        return params(loop.model), schedule.last_epoch

    (first, own), (second, other) = run_ranks(2, body, timeout_s=PATIENT_S)
    assert same(first, second)
    assert own == other == 7


def test_join_refuses_an_outer_rule_that_needs_learning_rates():
    def body(world):
        loop = Loop(world, LocalSGD(2, outer=SlowMomentum()))
        with pytest.raises(UsageError, match="with SlowMomentum: it divides"), loop.replica.join():
            pass

    run_ranks(2, body)


@pytest.mark.parametrize("merge", ["correct", Mix(0.5)])
def test_weights_are_averaged_in_each_step_of_the_warmup(merge):
    def body(world):
        loop = Loop(world, LocalSGD(4, 2, merge, warmup=3))
        return [params(loop.run(1).model) for _ in range(4)]

    first, second = run_ranks(2, body)
    assert [same(own, other) for own, other in zip(first, second, strict=True)] == [True, True, True, False]


def test_what_no_optimizer_steps_has_no_outer_rule():
    def body(world):
        model = model_of()
        optimizer = torch.optim.SGD(model[:2].parameters(), lr=0.05)
        replica = commrt.attach(model, optimizer, LocalSGD(2, outer=SlowMomentum()), world=world)
        for step in range(4):
            local_step(model, optimizer, step, world.rank)
        replica.consolidate()
        return params(model)

    assert same(*run_ranks(2, body))


def test_a_checkpoint_between_the_steps_of_two_optimizers_waits_for_both_again():
    def body(world):
        model, states = model_of(), []
        halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2:])]
        model(batch(0, world.rank)).square().sum().backward()
        replica = commrt.attach(model, halves, LocalSGD(2), world=world)
        replica.load_state_dict(replica.state_dict() | {"due": 1})
        for half in halves:
            half.step()
            states.append(replica.step)
        return states

    assert run_ranks(2, body) == [[0, 1]] * 2


def test_an_optimizer_need_not_have_a_learning_rate():
    class Plain(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": None})

        def step(self):
            for group in self.param_groups:
                for param in group["params"]:
                    param.data -= 0.01 * param.grad

    def body(world):
        return params(Loop(world, LocalSGD(2), make=Plain).run(4).model)

    first, second = run_ranks(2, body)
    assert same(first, second)


def test_a_checkpoint_holds_what_is_under_way():
    def body(world):
        loop = Loop(world, LocalSGD(4, 3, fragments=2)).run(5)
        return [part["flight"] is not None for part in loop.replica.state_dict()["fragments"]]

    assert run_ranks(2, body) == [[True, False]] * 2


@pytest.mark.parametrize("steps", [8, 9, 10])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_consolidate_sets_the_weights_to_the_anchor(algorithm, steps):
    def body(world):
        loop = Loop(world, algorithm).run(steps)
        loop.replica.consolidate()
        anchors = [loop.agreed()["anchors", name] for name, _ in loop.model.named_parameters()]
        return params(loop.model), anchors, loop.replica.replicas_equal()

    found = run_ranks(3, body)
    for weights, anchors, equal in found:
        assert same(weights, anchors)
        assert same(weights, found[0][0])
        assert equal


def test_consolidate_loses_nothing_that_ranks_have_learned():
    def body(world):
        loop = Loop(world, LocalSGD(100), make=torch.optim.SGD).run(7)
        before = params(loop.model)
        loop.replica.consolidate()
        return before, params(loop.model)

    found = run_ranks(3, body)
    for place in range(len(found[0][0])):
        mean = torch.stack([before[place] for before, _ in found]).mean(0)
        torch.testing.assert_close(found[0][1][place], mean, rtol=0, atol=1e-6)


def test_gossiping_ranks_become_equal_at_their_mean_and_begin_anew_there():
    def body(world):
        loop = Loop(world, GOSSIPING).run(7)
        loop.replica.consolidate()
        anchors = [loop.agreed()["anchors", name] for name, _ in loop.model.named_parameters()]
        return params(loop.model), anchors

    found = run_ranks(4, body)
    for weights, anchors in found:
        assert same(weights, found[0][0])
        assert same(weights, anchors)


def test_the_averages_of_variances_stay_positive():
    def body(world):
        model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, momentum=0.9))
        loop = Loop(world, LocalSGD(3, 2), model)
        for step in range(11):
            loop.optimizer.zero_grad()
            scale = 100.0 if (step + world.rank) % 3 else 0.01
            model(scale * batch(step, world.rank)).square().sum().backward()
            loop.optimizer.step()
            assert (model[1].running_var >= 0).all()
        loop.replica.consolidate()
        return [buffer.clone() for buffer in model.buffers()]

    found = run_ranks(3, body)
    assert all(same(found[0], own) for own in found)
    assert found[0][2] == 11


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


def test_frozen_and_tied_parameters():
    def body(world):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5))
        model[2].weight = model[0].weight
        model[3].requires_grad_(False)
        loop = Loop(world, LocalSGD(2, 1, fragments=2), model)
        frozen = model[3].weight.clone()
        loop.run(7).replica.consolidate()
        assert torch.equal(model[3].weight, frozen)
        return [name for kind, name in loop.agreed() if kind == "anchors"], params(model)

    found = run_ranks(2, body)
    assert found[0][0] == ["0.weight", "0.bias", "2.bias"]
    assert same(found[0][1], found[1][1])


def test_weights_of_16_bits_have_anchors_of_32():
    def body(world):
        loop = Loop(world, LocalSGD(2, 1, outer=Nesterov(0.7, 0.5)), model_of().bfloat16(), make=torch.optim.SGD)
        for step in range(9):
            loop.optimizer.zero_grad()
            loop.model(batch(step, world.rank).bfloat16()).square().sum().backward()
            loop.optimizer.step()
        loop.replica.consolidate()
        assert {tensor.dtype for tensor in loop.agreed().values()} == {torch.float32}
        return params(loop.model)

    found = run_ranks(3, body)
    assert same(found[0], found[1])
    assert found[0][0].dtype == torch.bfloat16


def test_passes_that_only_accumulate_are_no_steps():
    def body(world):
        loop = Loop(world, LocalSGD(2))
        for step in range(12):
            with loop.replica.no_sync() if step % 3 < 2 else nullcontext():
                loop.model(batch(step, world.rank)).square().sum().backward()
            if step % 3 == 2:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        return loop.replica.step, params(loop.model)

    found = run_ranks(2, body)
    assert [steps for steps, _ in found] == [4, 4]
    assert same(found[0][1], found[1][1])


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("last", [False, True])
def test_a_step_that_a_grad_scaler_skips_on_one_rank_counts(last, delay):
    def body(world):
        loop, scaler = Loop(world, LocalSGD(2, delay)), torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(8):
            loop.optimizer.zero_grad()
            loss = loop.model(batch(step, world.rank)).square().sum()
            if world.rank == 1 and step in ((3, 7) if last else (3, 4)):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(loop.optimizer)
            scaler.update()
        loop.replica.drain()
        loop.replica.consolidate()
        return loop.replica.step, params(loop.model)

    found = run_ranks(2, body)
    assert [steps for steps, _ in found] == [8, 8]
    assert same(found[0][1], found[1][1])


def test_two_optimizers_that_step_in_turn():
    def body(world):
        model = model_of()
        halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2:])]
        replica = commrt.attach(model, halves, LocalSGD(4, 1), world=world)
        for step in range(6):
            for half in halves:
                model.zero_grad()
                model(batch(step, world.rank)).square().sum().backward()
                half.step()
        replica.consolidate()
        return replica.step, params(model)

    found = run_ranks(2, body)
    assert found[0][0] == 12
    assert same(found[0][1], found[1][1])


def test_a_compiled_model():
    def body(world):
        loop = Loop(world, LocalSGD(3, 1, fragments=2), torch.compile(model_of(), backend="eager")).run(8)
        loop.replica.consolidate()
        plain = Loop(world, LocalSGD(3, 1, fragments=2)).run(8)
        plain.replica.consolidate()
        return params(loop.model), params(plain.model)

    torch.compiler.reset()
    found = run_ranks(1, body)  # compilation is not for several threads
    assert same(*found[0])


@pytest.mark.parametrize("batches", [(3, 6), (6, 3), (0, 4), (2, 7, 4)])
@pytest.mark.parametrize("algorithm", [ALGORITHMS[1], ALGORITHMS[2], GOSSIPING], ids=str)
def test_ranks_that_run_out_of_data_answer_the_others_and_all_end_equal(batches, algorithm):
    def body(world):
        loop = Loop(world, algorithm)
        with loop.replica.join():
            loop.run(batches[world.rank])
        first = loop.replica.step, params(loop.model), loop.optimizer.state_dict()["state"][0]["exp_avg"].clone()
        loop.run(4)
        loop.replica.consolidate()
        return *first, params(loop.model)

    found = run_ranks(len(batches), body, timeout_s=PATIENT_S)
    for steps, weights, momentum, later in found:
        assert steps == max(batches)
        assert same(weights, found[0][1])
        assert torch.equal(momentum, found[0][2])
        assert same(later, found[0][3])


def test_ranks_run_out_of_data_where_two_models_train_alone():
    def body(world):
        loop, _ = Loop(world, LocalSGD(2, 1)), Loop(world, LocalSGD(1000))
        with loop.replica.join():
            loop.run(2 + 3 * world.rank)
        return params(loop.model)

    first, second = run_ranks(2, body, timeout_s=PATIENT_S)
    assert same(first, second)


def test_a_rank_without_a_batch_takes_part():
    def body(world):
        loop = Loop(world, LocalSGD(2, 1))
        for step in range(6):
            if world.rank == 0 and step in (1, 2):
                loop.replica.average()
            else:
                local_step(loop.model, loop.optimizer, step, world.rank)
        loop.replica.consolidate()
        return params(loop.model)

    found = run_ranks(2, body)
    assert same(*found)


def test_ranks_with_other_settings_are_told():
    def body(world):
        loop = Loop(world, LocalSGD(2))
        loop.optimizer.param_groups[0]["lr"] = 0.1 if world.rank else 0.2
        with pytest.raises(DisagreementError, match="settings"):
            loop.run(2)
        return True

    assert run_ranks(2, body)


def test_a_state_of_other_training_begins_anew_from_the_weights():
    def body(world):
        loop = Loop(world, commrt.Torus2D()).run(3)
        other = Loop(world, LocalSGD(2, outer=Nesterov()), model_of(1))
        other.load(loop.state())
        anchors = [other.agreed()["anchors", name] for name, _ in other.model.named_parameters()]
        return same(anchors, params(loop.model)), other.replica.step

    assert run_ranks(2, body) == [(True, 3)] * 2


def test_other_weights_are_taken_for_the_anchor_by_overwrite_with_first():
    def body(world):
        loop = Loop(world, LocalSGD(4, 2)).run(5)
        loop.model.load_state_dict(model_of(2 + world.rank).state_dict())
        loop.replica.overwrite_with_first()
        anchors = [loop.agreed()["anchors", name] for name, _ in loop.model.named_parameters()]
        assert same(anchors, params(model_of(2)))
        return params(loop.run(9).model)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {**state, "fragments": state["fragments"][:1]}, "1 fragments .* attached with 2"),
        (lambda state: {**state, "step": -1}, "without a step number"),
        (
            lambda state: {**state, "fragments": [{**part, "anchors": {}} for part in state["fragments"]]},
            "none as the anchor",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, message):
    def body(world):
        loop = Loop(world, LocalSGD(4, 2, fragments=2)).run(5)
        with pytest.raises(UsageError, match=message):
            loop.replica.load_state_dict(change(loop.replica.state_dict()))
        return loop.replica.step

    assert run_ranks(2, body) == [5, 5]


def test_ranks_that_load_other_anchors_are_told():
    def body(world):
        loop = Loop(world, LocalSGD(4)).run(5)
        state = loop.replica.state_dict()
        if world.rank:
            state["fragments"][0]["anchors"]["0.bias"][0] += 1
        with pytest.raises(DisagreementError, match="anchors"):
            loop.replica.load_state_dict(state)
        return True

    assert run_ranks(2, body)


def test_a_detached_model_trains_alone_and_can_be_attached_again():
    def body(world):
        loop = Loop(world, LocalSGD(3, 2)).run(4)
        loop.replica.detach()
        loop.run(3)
        again = commrt.attach(loop.model, loop.optimizer, LocalSGD(2), world=world)
        loop.run(4)
        return again.step, params(loop.model)

    found = run_ranks(2, body)
    assert found[0][0] == 4
    assert same(found[0][1], found[1][1])


@pytest.mark.parametrize(("delay", "share"), [(5, 0.25), (26, 0.5), (100, 1.0)])
def test_fragments_that_are_never_under_way_together_share_memory(delay, share):
    def body(world):
        model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(8)))
        loop = Loop(world, LocalSGD(100, delay, fragments=4), model, bucket_cap_mb=0.05)
        wires = [bucket.wire for bucket in loop.replica._exchange.engine.buckets]
        spans = sorted({(wire.data_ptr(), wire.nbytes) for wire in wires})
        return sum(nbytes for _, nbytes in spans) / (4 * 8 * 10_000)

    assert run_ranks(2, body) == pytest.approx([share] * 2, rel=0.02)


REFUSED = [
    (LocalSGD(wire=Int4()), {}, r"commrt\.Direct\(\)"),
    (LocalSGD(wire=torch.float16), {"wire": torch.bfloat16}, "give it once"),
    (LocalSGD(inner=Gossip()), {"wire": torch.bfloat16}, "would be rounded"),
    (LocalSGD(inner=Direct()), {"wire": commrt.Adaptive(commrt.dq(1.0, 10))}, "bits follow gradients"),
    (LocalSGD(), {"graphs": True}, "leave graphs out"),
]


@pytest.mark.parametrize(("algorithm", "options", "message"), REFUSED)
def test_attach_refuses_what_local_sgd_cannot_do(algorithm, options, message):
    def body(world):
        with pytest.raises(UsageError, match=message):
            Loop(world, algorithm, **options)

    run_ranks(8, body)


def test_optimizers_must_be_named():
    def body(world):
        with pytest.raises(UsageError, match="needs the optimizers whose steps it counts"):
            commrt.attach(model_of(), algorithm=LocalSGD(2), world=world)

    run_ranks(2, body)


def test_unwise_settings_are_logged(caplog):
    run_ranks(1, lambda world: Loop(world, LocalSGD(4, 3, Mix(0))))
    assert "throws away" in caplog.text


# Lost ranks.


def finished(world, algorithm, end, steps=14):
    """Train; the ranks that are left consolidate."""
    loop = Loop(world, algorithm).run(min(end, steps))
    if end < steps:
        return None
    loop.replica.consolidate()
    return params(loop.model), tuple(world.members), [loss.rank for loss in loop.replica.lost]


@pytest.mark.parametrize("end", [1, 4, 5, 6, 7])
@pytest.mark.parametrize(
    "algorithm", [LocalSGD(4), LocalSGD(4, 2, outer=Nesterov(0.7, 0.6)), LocalSGD(4, 4, fragments=2)], ids=str
)
def test_the_others_go_on_without_a_rank_that_is_lost(algorithm, end):
    found = run_ranks(3, lambda world: finished(world, algorithm, end if world.rank == 1 else 99), timeout_s=PATIENT_S)
    assert found[1] is None
    assert found[0][1:] == found[2][1:] == ((0, 2), [1])
    assert same(found[0][0], found[2][0])


def test_no_rank_can_be_lost_while_another_one_still_connects_in_attach(monkeypatch):
    """Rank 1 has no transfer with rank 5, so nothing but `attach` itself makes it wait for that rank."""
    connect = Engine._connect_peers

    def slow_on_rank_5(engine, *args):
        if engine.world.rank == 5:
            Event().wait(0.5)
        connect(engine, *args)

    monkeypatch.setattr(Engine, "_connect_peers", slow_on_rank_5)
    found = run_ranks(
        6, lambda world: finished(world, LocalSGD(2), 0 if world.rank == 1 else 99, 4), timeout_s=PATIENT_S
    )
    assert [members for _, members, _ in (found[0], *found[2:])] == [(0, 2, 3, 4, 5)] * 5


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=40)
def test_the_others_go_on_without_ranks_that_are_lost_one_after_the_other(data):
    ranks, period = data.draw(st.integers(2, 6), "ranks"), data.draw(st.integers(1, 5), "period")
    delay, fragments = (
        data.draw(st.integers(0, period), "delay"),
        data.draw(st.integers(1, min(period, 3)), "fragments"),
    )
    gone = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1), "gone")
    ends = {rank: data.draw(st.integers(0, 13), f"end of {rank}") for rank in sorted(gone)}
    inner = data.draw(st.sampled_from([commrt.Torus2D(), Direct(), Gossip()]), "inner")
    algorithm = LocalSGD(period, delay, outer=HeavyBall(0.7, 0.3), fragments=fragments, inner=inner)
    found = run_ranks(ranks, lambda world: finished(world, algorithm, ends.get(world.rank, 99)), timeout_s=PATIENT_S)
    stay = [rank for rank in range(ranks) if rank not in gone]
    for rank in stay:
        assert found[rank][1] == tuple(stay)
        assert same(found[rank][0], found[stay[0]][0])


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS[2:4], ALGORITHMS[5]], ids=str)
def test_an_average_that_one_rank_has_not_got_is_made_again_by_all(algorithm, number):
    def body(world, fails):
        loop = Loop(world, algorithm)
        engine, calls = loop.replica._exchange.engine, iter(range(1000))
        run = engine.reduce_now

        def lost_at_the_last_moment(*args):
            span = run(*args)
            if next(calls) == number and fails and world.rank == 1:
                raise commrt.PeerLost("the connection broke", Place(1, 0))
            return span

        engine.reduce_now = lost_at_the_last_moment
        return params(loop.run(14).model), tuple(world.members)

    expected = run_ranks(3, lambda world: body(world, fails=False), timeout_s=PATIENT_S)
    found = run_ranks(3, lambda world: body(world, fails=True), timeout_s=PATIENT_S)
    assert {members for _, members in found} == {(0, 1, 2)}
    assert all(same(own, before) for (own, _), (before, _) in zip(found, expected, strict=True))


def test_codes_and_residuals_go_on_without_a_lost_rank():
    algorithm = LocalSGD(3, 1, inner=Direct(), wire=Int8(feedback=True))
    found = run_ranks(3, lambda world: finished(world, algorithm, 7 if world.rank == 1 else 99), timeout_s=PATIENT_S)
    assert same(found[0][0], found[2][0])


@pytest.mark.processes
@pytest.mark.parametrize("where", ["backward", "exchange"])
def test_the_others_go_on_without_a_process_that_is_killed(where):
    algorithm = LocalSGD(4, 2, outer=Nesterov(0.7, 0.6), fragments=2)
    outcomes = run_processes(4, failing_ranks.killed_in_local_sgd, algorithm, 2, where, limit_s=90)
    left = [outcome.value for rank, outcome in enumerate(outcomes) if rank != 2]
    assert outcomes[2].value is None
    assert [members for _, members in left] == [[0, 1, 3]] * 3
    assert len({weights for weights, _ in left}) == 1
