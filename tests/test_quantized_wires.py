# SPDX-License-Identifier: Apache-2.0
"""Wires that carry codes of few bits: their settings, what is sent, what is lost, and that replicas stay equal."""

import copy
from collections import defaultdict
from functools import partial
from itertools import cycle, repeat
from threading import Barrier

import pytest
import torch
from cases import on_ranks
from gossip_models import params, same
from hypothesis import given, settings
from hypothesis import strategies as st
from local_loops import Loop, ends_equal
from torch import nn
from training_ranks import accounts

import commrt
from commrt import Direct
from commrt.errors import DisagreementError, UsageError
from commrt.quantization import Adaptive, Float8, Int2, Int4, Int8, Progress, Quantizer, adaquant, dq
from commrt.testing.processes import run_processes
from commrt.testing.ranks import run_ranks

WIRES = [Int8(), Int4(), Int2(), Float8(), Int8(rounding="stochastic"), Int4(rounding="stochastic", feedback=False)]
FEEDBACK = [Int4(), Int2(), Int8(feedback=True), Float8(feedback=True), Int4(rounding="stochastic")]
LOSS = {8: 2e-4, 4: 0.1, 2: 1.5}
"""Most relative squared error of one sum, by bits."""


UNTRAINED = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 10))


def training(world, wire, algorithm=Direct()):  # noqa: B008  # a frozen value
    momentum = partial(torch.optim.SGD, momentum=0.9)
    options = {"wire": wire, "bucket_cap_mb": 0.003}
    return Loop(world, algorithm, copy.deepcopy(UNTRAINED), momentum, lr=0.002, **options)


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_all_ranks_get_the_same_bits_near_the_sum(wire):
    def body(world):
        x = torch.randn(30_001, generator=torch.Generator().manual_seed(world.rank))
        exact, quantized = x.clone(), x.clone()
        world.all_reduce(exact, algorithm=Direct())
        residual = torch.zeros(len(x)) if wire.feedback else None
        world.all_reduce(quantized, algorithm=Direct(), wire=wire, residual=residual)
        return exact, quantized

    pairs = run_ranks(5, body)
    exact, quantized = pairs[0]
    assert all(torch.equal(each, quantized) for _, each in pairs)
    assert (
        0 < (quantized - exact).square().sum() / exact.square().sum() < LOSS[wire.bits] * (10 if wire.is_float else 1)
    )


FEWER = {Int8(): 3.9, Float8(): 3.9, Int4(): 7.8, Int2(): 15.0}
"""How many times fewer bytes codes are at least."""


@on_ranks(4)
def test_a_step_of_a_million_parameters_sends_so_many_times_fewer_bytes(world):
    sent, layer = {}, nn.Linear(1000, 1000)
    for wire in (None, *FEWER):
        layer.zero_grad()
        replica = commrt.attach(layer, algorithm=Direct(), world=world, wire=wire)
        layer(torch.ones(1, 1000)).sum().backward()
        sent[wire] = replica.last.nbytes_sent
        replica.detach()
    plain = sent.pop(None)
    assert plain == pytest.approx(2 * 3 / 4 * 4_004_000, rel=1e-3)
    assert {wire: plain / quantized for wire, quantized in sent.items() if plain <= FEWER[wire] * quantized} == {}


TRAINED = [
    *zip(WIRES, cycle((2, 3, 4)), repeat(Direct())),
    (Adaptive(dq(30.0, 20)), 3, Direct()),
    (Int4(), 6, Direct(within=2)),
    (Int4(), 8, Direct(within=4)),
    (Int8(), 3, commrt.BackupWorkers(1, inner=Direct())),
]


@pytest.mark.parametrize(("wire", "ranks", "algorithm"), TRAINED, ids=str)
def test_replicas_stay_equal(wire, ranks, algorithm):
    def body(world):
        loop = training(world, wire, algorithm).run(6)
        if isinstance(algorithm, commrt.BackupWorkers):
            loop.replica.consolidate()
        return params(loop.model)

    first, *others = run_ranks(ranks, body)
    assert all(same(first, other) for other in others)


@ends_equal(3)
def test_ranks_that_run_out_of_data_leave_and_come_back_equal(world):
    loop = training(world, Int4())
    with loop.replica.join():
        loop.run(3 + world.rank)
    return params(loop.run(2).model)


@settings(max_examples=8)
@given(st.integers(2, 9), st.sampled_from(FEEDBACK), st.integers(1, 9_000))
def test_what_rounding_lost_is_owed_and_paid(ranks, wire, numel):
    """All averages so far, and all that is owed, add up to the true averages."""

    def body(world):
        source, residual = torch.Generator().manual_seed(world.rank), torch.zeros(numel)
        told, true = torch.zeros(numel), torch.zeros(numel)
        for _ in range(4):
            x = torch.randn(numel, generator=source)
            exact = x.clone()
            world.all_reduce(exact, algorithm=Direct())
            world.all_reduce(x, algorithm=Direct(), wire=wire, residual=residual)
            told, true = told + x, true + exact
        world.all_reduce(owed := residual.clone(), "sum", algorithm=Direct())
        return (told + owed - true).abs().max()

    assert max(run_ranks(ranks, body)) < 1e-5


class Odd(nn.Module):
    """A model of odd sizes, with buffers, and a layer that only some batches reach."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 37), nn.BatchNorm1d(37), nn.Linear(37, 3)
        self.rare = nn.Linear(37, 3)

    def forward(self, x, step):
        hidden = self.norm(self.first(x))
        return self.last(hidden) + (0.0 if step % 2 else self.rare(hidden))


def odd_training(wire, *, spoil=False, bad=None, **options):
    """The weights and gradients after each of six steps; with `spoil` all that a step should not read is NaN before it.

    In step 1 a gradient of one rank is `bad`, and no rank steps.
    """
    allocated, meeting = defaultdict(list), Barrier(3)
    torch.manual_seed(0)
    untrained = Odd()

    def remembering(transport):
        def allocate(*given):
            allocated[transport.rank].append(plain(*given))
            return allocated[transport.rank][-1]

        plain, transport.allocate = transport.allocate, allocate
        return transport

    def body(world):
        trained, source, found = copy.deepcopy(untrained), torch.Generator().manual_seed(world.rank), []
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.02)
        replica = commrt.attach(trained, optimizer, world=world, wire=wire, bucket_cap_mb=0.001, **options)
        for step in range(6):
            optimizer.zero_grad()
            loss = trained(torch.randn(5, 7, generator=source), step).square().mean()
            (loss * bad if bad is not None and step == 1 and world.rank == 1 else loss).backward()
            if step != 1:
                optimizer.step()
                replica.drain()
            tensors = [*trained.parameters(), *(p.grad for p in trained.parameters() if p.grad is not None)]
            found.append(torch.cat([tensor.detach().flatten() for tensor in tensors]))
            meeting.wait()
            for memory in allocated[world.rank] if spoil else ():
                memory.view(torch.uint8).fill_(0xFF)
            for bucket in getattr(replica, "buckets", ()) if spoil else ():
                if getattr(bucket, "residual", None) is not None:
                    bucket.residual[torch.tensor(bucket.layout.gaps()) - bucket.head_numel] = float("nan")
            meeting.wait()
        return found

    return run_ranks(3, body, wrap=remembering)


STEPS = [
    *({"wire": wire, "algorithm": Direct()} for wire in (None, torch.bfloat16, *WIRES)),
    {"wire": Adaptive(dq(30.0, 20), feedback=True), "algorithm": Direct()},
    {"wire": Int8(), "algorithm": commrt.BackupWorkers(0, inner=Direct())},
    {"wire": Int4(), "algorithm": commrt.LocalSGD(2, inner=Direct(), fragments=2)},
    {"wire": torch.bfloat16, "algorithm": commrt.Gossip()},
]


@pytest.mark.parametrize(
    "options", STEPS, ids=lambda options: f"{options['wire']} {type(options['algorithm']).__name__}"
)
def test_no_memory_that_a_step_does_not_write_decides_what_ranks_get(options):
    for plain, spoilt in zip(odd_training(**options), odd_training(**options, spoil=True), strict=True):
        assert all(map(torch.equal, plain, spoilt))


@pytest.mark.parametrize("wire", [*WIRES, Adaptive(dq(30.0, 20), feedback=True)], ids=str)
def test_a_gradient_that_is_not_finite_is_gone_in_the_next_step(wire):
    for found in odd_training(wire, algorithm=Direct(), bad=float("nan")):
        assert [bool(each.isfinite().all()) for each in found] == [step != 1 for step in range(6)]


@on_ranks(3)
def test_a_gradient_that_only_some_ranks_have_is_averaged_and_one_that_none_has_stays_none(world):
    parts = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])
    commrt.attach(parts, None, Direct(), world=world, wire=Int8())
    (parts[0](torch.ones(4)).sum() + (parts[1](torch.ones(4)).sum() if world.rank == 1 else 0.0)).backward()
    first, second, third = (part.weight.grad for part in parts)
    assert first[0, 0].item() == pytest.approx(1.0, rel=0.02)
    assert second[0, 0].item() == pytest.approx(1 / 3, rel=0.02)
    assert third is None


@pytest.mark.parametrize("wire", [Int4(), Int8(rounding="stochastic"), Adaptive(dq(30.0, 20), feedback=True)], ids=str)
@on_ranks(3)
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(world, wire):
    loop = training(world, wire).run(5)
    resumed = training(world, wire).load(loop.state())
    assert same(params(loop.run(5).model), params(resumed.run(5).model))


@pytest.mark.slow
@pytest.mark.processes
def test_the_hook_of_ddp_tells_all_ranks_the_same_and_still_owes_after_ddp_has_made_other_buckets():
    outcomes = run_processes(2, accounts, Int2())
    (true, told, owed), (others_true, told_others, others_owed) = (torch.tensor(each.value) for each in outcomes)
    assert told.any()
    assert torch.equal(told, told_others)
    torch.testing.assert_close((true + others_true) / 2, told + owed + others_owed, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("wire", [Int4(), Int2()], ids=str)
def test_what_is_owed_to_a_gradient_that_no_rank_had_is_still_owed(wire):
    def body(world):
        network, told, true = nn.ModuleList(nn.Linear(40, 50, bias=False) for _ in range(2)), [0.0, 0.0], [0.0, 0.0]
        replica = commrt.attach(network, algorithm=Direct(), world=world, wire=wire)
        source = torch.Generator().manual_seed(world.rank)
        for step in range(12):
            x, weight = torch.randn(3, 40, generator=source), network[step % 2].weight
            network.zero_grad()
            network[step % 2](x).square().sum().backward()
            told[step % 2] += weight.grad
            own = weight.detach().clone().requires_grad_()
            nn.functional.linear(x, own).square().sum().backward()
            true[step % 2] += own.grad
        return told, replica.state_dict()["residuals"], true

    found = run_ranks(3, body)
    for which in range(2):
        told = found[0][0][which]
        owed = sum(residuals[f"{which}.weight"].view(50, 40) for _, residuals, _ in found)
        true = sum(each[which] for _, _, each in found) / 3
        torch.testing.assert_close(told + owed, true, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_a_state_of_another_rank_or_of_another_shape_is_refused_before_anything_changes(world):
    replica = training(world, Int4()).replica
    state = replica.state_dict() | {"step": 7}
    name = next(iter(state["residuals"]))
    with pytest.raises(UsageError, match=r"Save state_dict.* on every rank, and load each rank's own"):
        replica.load_state_dict(state | {"rank": world.rank + 1})
    with pytest.raises(UsageError, match=f"residual of {name} has 1 values"):
        replica.load_state_dict(state | {"residuals": state["residuals"] | {name: torch.zeros(1)}})
    assert replica.step == 0


def test_one_state_serves_all_ranks_where_nothing_is_owed_or_it_is_forgotten():
    def body(world):
        return training(world, Int4()).run(2).replica.state_dict()

    state = run_ranks(2, body)[0]

    def loaded(world, wire, algorithm, given):
        replica = training(world, wire, algorithm).replica
        replica.load_state_dict(given)
        return replica.step

    assert run_ranks(3, lambda world: loaded(world, None, commrt.Ring(), state)) == [2, 2, 2]
    assert run_ranks(3, lambda world: loaded(world, Int4(), Direct(), {**state, "residuals": {}})) == [2, 2, 2]


@on_ranks(2)
def test_stochastic_rounding_is_right_in_the_mean_of_many_calls(world):
    x = torch.randn(3000, generator=torch.Generator().manual_seed(world.rank))
    exact, total = x.clone(), torch.zeros(3000)
    world.all_reduce(exact, algorithm=Direct())
    for _ in range(100):
        quantized = x.clone()
        world.all_reduce(quantized, algorithm=Direct(), wire=Int2(feedback=False, rounding="stochastic"))
        total += quantized / 100
    assert (total - exact).norm() / exact.norm() < 0.25  # one call: 1.4


RULE = dq(30.0, 20)
OTHERS = [
    (Int8(), Int4()),
    *((Adaptive(RULE), Adaptive(other)) for other in (dq(30.0, 21), lambda _: 3.0, adaquant(3, lambda: 1.0))),
]


@pytest.mark.parametrize("wires", OTHERS)
@on_ranks(2)
def test_ranks_with_other_wires_are_told(world, wires):
    with pytest.raises(DisagreementError, match="buckets"):
        training(world, wires[world.rank])


@on_ranks(2)
def test_ranks_that_sum_with_other_codings_are_told_and_go_on(world):
    x = torch.ones(5000)
    for other in (None, Int4(feedback=False), Int8(block=128), Int8(seed=1)):  # plain sums are known afterwards
        with pytest.raises(DisagreementError):
            world.all_reduce(x, algorithm=Direct(), wire=Int8() if world.rank else other)
        world.all_reduce(x, algorithm=Direct())
    assert x.sum().item() == 5000


NO_RESIDUALS = [
    (Int4(), lambda x: None, "needs a residual"),
    (Int8(), lambda x: torch.zeros(3), "others take none"),
    (Int4(), lambda x: torch.zeros(4), r"needs torch.zeros\(3"),
    (Int4(), lambda x: [0.0] * 3, "a tensor of its own"),
    (Int4(), lambda x: x, "a tensor of its own"),
    (Int4(), torch.inference_mode()(torch.zeros_like), "a tensor of its own"),
]


@pytest.mark.parametrize(("wire", "residual", "why"), NO_RESIDUALS)
@on_ranks(1)
def test_what_cannot_hold_what_rounding_lost_is_refused(world, wire, residual, why):
    x = torch.ones(3)
    with pytest.raises(UsageError, match=why):
        world.all_reduce(x, algorithm=Direct(), wire=wire, residual=residual(x))


@on_ranks(2)
def test_a_residual_may_move_between_sums(world):
    x, residual = torch.linspace(0, 1, 256), torch.zeros(256)
    world.all_reduce(x.clone(), algorithm=Direct(), wire=Int4(), residual=residual)
    lost = residual.clone()
    residual.data = torch.zeros(256)  # as a loop does that loads a checkpoint
    world.all_reduce(x.clone(), algorithm=Direct(), wire=Int4(), residual=residual)
    assert lost.any()
    assert torch.equal(residual, lost)


NO_SENSE = {
    "blocks of 64, 128": lambda: Int8(block=100),
    "bits from 2 to 8": lambda: Quantizer(9),
    'use "nearest" or "stochastic"': lambda: Int8(rounding="up"),
    "diverges": lambda: Int2(rounding="stochastic"),
    "8 bits": lambda: Quantizer(4, is_float=True),
    "no function": lambda: Adaptive(3),
    "bits from least=5 to most=4": lambda: Adaptive(dq(1, 1), least=5, most=4),
    "target=0": lambda: dq(0, 10),
    "block=256.0,": lambda: Quantizer(4, block=256.0),
    "seed=1.5:": lambda: Quantizer(4, seed=1.5),
    "feedback='no'": lambda: Quantizer(4, feedback="no"),
}


def test_settings_that_make_no_sense_are_refused():
    for message, make in NO_SENSE.items():
        with pytest.raises(UsageError, match=message):
            make()


def test_bits_follow_the_norm_and_the_step():
    wire = Adaptive(dq(target=10.0, steps=100, decay=0.99))
    early, late = (wire.quantizer(Progress(step, 1.0)).bits for step in (0, 99))
    assert early < late
    assert wire.quantizer(Progress(99, 1e-9)).bits == 2
    assert wire.quantizer(Progress(99, float("nan"))).bits == 8


def test_bits_follow_the_loss():
    losses = iter([4.0, 1.0, 0.0])
    wire = Adaptive(adaquant(1.0, lambda: next(losses)))
    assert [wire.quantizer(Progress(step, 1.0)).bits for step in range(3)] == [2, 3, 8]


def test_the_first_loss_of_a_rule_can_be_given():
    losses = [float("nan"), 4.0, 1.0]
    rule = adaquant(3.0, lambda: losses.pop(0))
    assert [rule(None) for _ in range(3)] == [float("inf"), 3.0, 6.0]
    assert adaquant(3.0, lambda: 1.0, first=4.0)(None) == 6.0
