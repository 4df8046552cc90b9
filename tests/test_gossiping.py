# SPDX-License-Identifier: Apache-2.0
"""Training by gossip: the bits of a simulation in one process, whatever a user's loop does."""

from __future__ import annotations

import io
import threading
from copy import deepcopy

import pytest
import torch
from torch import nn

import commrt
from commrt.algorithms.gossip import Gossip
from commrt.errors import DisagreementError, UsageError
from commrt.testing.ranks import run_ranks

PATIENT_S = 20.0
STEPS = 7


def made(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))


with torch.random.fork_rng():
    MODELS = [made(seed) for seed in range(9)]


def model_of(seed=0):
    return deepcopy(MODELS[seed])


def batch(step, rank):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def local_step(model, optimizer, step, rank):
    optimizer.zero_grad()
    model(batch(step, rank)).square().sum().backward()
    optimizer.step()


def optimizer_of(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def params(model):
    return [param.detach().clone() for param in model.parameters()]


def trained(world, algorithm, *, steps=STEPS, first=0, cap_mb=1e-4, wire=None, lr=0.1):
    model = model_of()
    optimizer = optimizer_of(model, lr)
    replica = commrt.attach(model, optimizer, algorithm, world=world, bucket_cap_mb=cap_mb, wire=wire)
    for step in range(first, first + steps):
        local_step(model, optimizer, step, world.rank)
    replica.drain()
    return params(model), replica


def sources(algorithm, step, ranks):
    """Of each rank, the one that it hears from."""
    (hop,) = algorithm.schedule(step, ranks).steps()
    return dict(zip(hop.dst.tolist(), hop.src.tolist(), strict=True))


def simulated(algorithm, ranks, steps=STEPS):
    """The same in one process: local steps, then messages, each applied when it is as late as it may be."""
    models = [model_of() for _ in range(ranks)]
    optimizers = [optimizer_of(model) for model in models]
    under_way = []
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            local_step(model, optimizer, step, rank)
        under_way.append((sources(algorithm, step, ranks), [params(model) for model in models]))
        if len(under_way) > algorithm.staleness:
            mixed(models, algorithm.share, *under_way.pop(0))
    for message in under_way:
        mixed(models, algorithm.share, *message)
    return [params(model) for model in models]


@torch.no_grad()
def mixed(models, share, source, sent):
    for rank, model in enumerate(models):
        for own, theirs, ours in zip(model.parameters(), sent[source[rank]], sent[rank], strict=True):
            own.copy_(own + share * (theirs - ours))


def same(one, other):
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
def test_training_gives_the_bits_of_the_simulation(ranks, staleness):
    algorithm = Gossip(staleness=staleness)
    found = run_ranks(ranks, lambda world: trained(world, algorithm)[0])
    assert all(map(same, found, simulated(algorithm, ranks)))


def test_one_rank_trains_as_if_alone():
    ((found, replica),) = run_ranks(1, lambda world: trained(world, Gossip()))
    model = model_of()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        local_step(model, optimizer, step, 0)
    assert same(found, params(model))
    assert replica.step == STEPS


@pytest.mark.parametrize("staleness", [0, 1])
def test_however_many_bundles_there_are_partners_and_bits_are_the_same(staleness):
    def body(world, cap_mb):
        found, replica = trained(world, Gossip(staleness=staleness), cap_mb=cap_mb)
        return found, len(replica.bundles)

    outcomes = [run_ranks(4, lambda world, cap_mb=cap_mb: body(world, cap_mb)) for cap_mb in (25, 2e-4, 1e-6)]
    counts = [first[1] for first, *_ in outcomes]
    assert counts == sorted(set(counts))
    assert counts[0] == 1
    for others in outcomes[1:]:
        assert all(same(a, b) for (a, _), (b, _) in zip(outcomes[0], others, strict=True))


def test_gossip_of_rows_makes_rows_equal_and_all_near_each_other():
    found = run_ranks(6, lambda world: (trained(world, Gossip(within=2))[0], world.rank))
    by_rank = {rank: bits for bits, rank in found}
    pairs = [zip(by_rank[2 * row], by_rank[2 * row + 1], strict=True) for row in range(3)]
    assert all(torch.allclose(a, b, atol=1e-6) for pair in pairs for a, b in pair)
    assert not any(torch.allclose(a, b, atol=1e-3) for a, b in zip(by_rank[0], by_rank[2], strict=True))


def apart(world, algorithm, wire, rounds=6):
    """Replicas that begin far from each other and learn nothing; means and disagreements before and after."""
    model = model_of()
    replica = commrt.attach(model, None, algorithm, world=world, wire=wire, bucket_cap_mb=1e-4)
    with torch.no_grad():
        for param, other in zip(model.parameters(), model_of(1 + world.rank).parameters(), strict=True):
            param.copy_(other)
    before = params(model), replica.disagreement()
    for _ in range(rounds):
        replica.average()
    replica.drain()
    return before, (params(model), replica.disagreement())


@pytest.mark.parametrize("wire", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("staleness", [0, 1])
def test_mixing_keeps_the_mean_also_where_the_wire_rounds(wire, staleness):
    outcomes = run_ranks(4, lambda world: apart(world, Gossip(staleness=staleness), wire))
    before, after = ([torch.stack(parts).mean(0) for parts in zip(*bits, strict=True)] for bits in means(outcomes))
    for was, now in zip(before, after, strict=True):
        assert torch.allclose(was, now, rtol=0, atol=3e-7)
    for (_, apart_before), (_, apart_after) in outcomes:
        assert apart_after < apart_before / 3


def means(outcomes):
    """Parameters of all ranks, before and after."""
    return [[before[0] for before, _ in outcomes], [after[0] for _, after in outcomes]]


def test_two_ranks_with_late_messages_settle():
    outcomes = run_ranks(2, lambda world: apart(world, Gossip(staleness=1), None, rounds=30))
    assert max(disagreement for _, (_, disagreement) in outcomes) < 1e-4


def test_after_a_period_without_learning_four_ranks_agree():
    outcomes = run_ranks(4, lambda world: apart(world, Gossip(), None, rounds=2))
    assert max(disagreement for _, (_, disagreement) in outcomes) < 1e-6


def test_consolidating_makes_replicas_equal_at_their_mean():
    def body(world):
        found, replica = trained(world, Gossip())
        replica.consolidate()
        return found, params(replica.model), replica.replicas_equal(), replica.disagreement()

    outcomes = run_ranks(3, body)
    for i in range(len(outcomes[0][0])):
        mean = torch.stack([before[i] for before, *_ in outcomes]).mean(0)
        assert all(torch.allclose(after[i], mean, atol=1e-7) for _, after, *_ in outcomes)
    assert all(equal and disagreement < 1e-6 for *_, equal, disagreement in outcomes)


def test_a_checkpoint_taken_in_between_goes_on_with_the_bits_of_the_unbroken_run():
    def broken(world):
        _, replica = trained(world, Gossip(), steps=3)
        file = io.BytesIO()
        torch.save([replica.model.state_dict(), replica.state_dict()], file)
        momentum = deepcopy(optimizer_state(replica))
        replica.detach()
        model = model_of(5)
        optimizer = optimizer_of(model)
        again = commrt.attach(model, optimizer, Gossip(), world=world, bucket_cap_mb=1e-4)
        saved, state = torch.load(io.BytesIO(file.getvalue()))
        model.load_state_dict(saved)
        optimizer.load_state_dict(momentum)
        again.load_state_dict(state)
        for step in range(3, STEPS):
            local_step(model, optimizer, step, world.rank)
        again.drain()
        return params(model)

    unbroken = run_ranks(4, lambda world: trained(world, Gossip())[0])
    assert all(map(same, run_ranks(4, broken), unbroken))


def optimizer_state(replica):
    return replica._optimizers[0].state_dict()


def test_saving_a_model_waits_for_what_is_under_way():
    def body(world):
        model = model_of()
        optimizer = optimizer_of(model)
        commrt.attach(model, optimizer, Gossip(staleness=1), world=world, bucket_cap_mb=1e-4)
        for step in range(3):
            local_step(model, optimizer, step, world.rank)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        return [*saved.values()]

    assert all(map(same, run_ranks(2, body), simulated(Gossip(staleness=1), 2, steps=3)))


def test_a_rank_whose_optimizer_did_not_step_still_exchanges():
    """As under a `GradScaler` that met an infinity."""

    def body(world):
        model = model_of()
        optimizer = optimizer_of(model)
        replica = commrt.attach(model, optimizer, Gossip(), world=world, bucket_cap_mb=1e-4)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(step, world.rank)).square().sum().backward()
            if (step, world.rank) not in {(2, 1), (6, 0)}:
                optimizer.step()
        model(batch(0, 0))  # the next forward pass
        return replica.step, replica.disagreement()

    outcomes = run_ranks(2, body)
    assert [step for step, _ in outcomes] == [STEPS] * 2
    assert max(apart for _, apart in outcomes) < 1e-6


def test_a_grad_scaler_that_skips_a_step_on_one_rank_keeps_nobody_waiting():
    def body(world):
        model = model_of()
        optimizer = optimizer_of(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        replica = commrt.attach(model, optimizer, Gossip(), world=world, bucket_cap_mb=1e-4)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(batch(step, world.rank)).square().sum() * (float("inf") if (step, world.rank) == (1, 0) else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        replica.drain()
        model(batch(0, 0))
        return replica.step, scaler.get_scale(), replica.disagreement()

    (step, scale, apart), (other_step, other_scale, _) = run_ranks(2, body)
    assert (step, scale, other_step, other_scale) == (4, 2.0, 4, 4.0)
    assert apart < 1e-6


def test_accumulating_passes_exchange_once():
    def body(world):
        model = model_of()
        optimizer = optimizer_of(model)
        replica = commrt.attach(model, optimizer, Gossip(), world=world)
        for step in range(3):
            with replica.no_sync():
                model(batch(step, world.rank)).square().sum().backward()
            model(batch(step, 9)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return replica.step

    assert run_ranks(2, body) == [3, 3]


def test_buffers_are_averaged_and_counters_stay():
    def body(world):
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
        optimizer = optimizer_of(model)
        replica = commrt.attach(model, optimizer, Gossip(rotate=False), world=world)
        for step in range(4):
            local_step(model, optimizer, step, world.rank)
        replica.drain()
        norm = model[1]
        return norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.item()

    (mean, var, count), (other_mean, other_var, other_count) = run_ranks(2, body)
    assert torch.allclose(mean, other_mean, atol=1e-6)
    assert torch.allclose(var, other_var, atol=1e-6)
    assert (count, other_count) == (4, 4)


def test_a_late_partner_is_not_waited_for_with_staleness_1():
    """Rank 1 stops after its second step until rank 0 has begun its fourth, which is one ahead of what it heard."""
    ahead, ranks = threading.Event(), 2

    def body(world):
        model = model_of()
        optimizer = optimizer_of(model)
        replica = commrt.attach(model, optimizer, Gossip(staleness=1), world=world)
        for step in range(5):
            local_step(model, optimizer, step, world.rank)
            if world.rank == 0 and step == 2:
                ahead.set()
            if world.rank == 1 and step == 1:
                assert ahead.wait(PATIENT_S)
        replica.drain()
        return replica.step

    assert run_ranks(ranks, body) == [5, 5]


def test_copies_and_pickles_of_a_model_do_not_gossip():
    def body(world):
        model = model_of()
        optimizer = optimizer_of(model)
        replica = commrt.attach(model, optimizer, Gossip(), world=world)
        copied = deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        model(batch(0, 0)).sum().backward()
        for other in (copied, loaded):
            other(batch(0, world.rank)).sum().backward()
        return replica.step

    assert run_ranks(2, body) == [0, 0]


def test_a_model_whose_parts_are_called_one_by_one_is_mixed_part_by_part():
    def body(world):
        model = model_of()
        optimizer = optimizer_of(model)
        replica = commrt.attach(model, optimizer, Gossip(), world=world, bucket_cap_mb=1e-6)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = batch(step, world.rank)
            for part in model:
                x = part(x)
            x.square().sum().backward()
            optimizer.step()
        replica.drain()
        return params(model)

    assert all(map(same, run_ranks(3, body), simulated(Gossip(), 3)))


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_compiled_model_gossips_without_hooks(how):
    def body(world):
        model = model_of()
        optimizer = optimizer_of(model)
        compiled = torch.compile(model, backend="eager")
        replica = commrt.attach(compiled if how == "before" else model, optimizer, Gossip(), world=world)
        for step in range(STEPS):
            optimizer.zero_grad()
            compiled(batch(step, world.rank)).square().sum().backward()
            optimizer.step()
        replica.drain()
        return params(model)

    assert all(map(same, run_ranks(2, body), simulated(Gossip(), 2)))


class Functional(nn.Module):
    """Uses parameters that modules without a forward pass keep."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList([param.detach().clone() for param in MODELS[0].parameters()])

    def forward(self, x):
        for weight, bias in zip(self.layers[0:4:2], self.layers[1:4:2], strict=True):
            x = torch.tanh(nn.functional.linear(x, weight, bias))
        return nn.functional.linear(x, self.layers[4], self.layers[5])


def test_parameters_of_modules_that_are_never_called_are_mixed_in_time():
    def body(world):
        model = Functional()
        optimizer = optimizer_of(model)
        replica = commrt.attach(model, optimizer, Gossip(), world=world, bucket_cap_mb=1e-4)
        for step in range(STEPS):
            local_step(model, optimizer, step, world.rank)
        replica.drain()
        return params(model)

    assert all(map(same, run_ranks(2, body), simulated(Gossip(), 2)))


def test_ranks_at_different_steps_are_told_so():
    def body(world):
        model = model_of()
        replica = commrt.attach(model, None, Gossip(rotate=False), world=world)
        replica._step += world.rank
        replica.average()
        replica.drain()

    with pytest.raises(DisagreementError, match="the ranks are at different steps"):
        run_ranks(2, body)


@pytest.mark.parametrize(
    ("algorithm", "wire", "words"),
    [
        (Gossip(within=2), torch.bfloat16, "leave wire out"),
        (Gossip(within=3), None, "within=3 does not divide 4 ranks"),
    ],
)
def test_what_cannot_work_is_refused_by_attach(algorithm, wire, words):
    with pytest.raises(UsageError, match=words):
        run_ranks(4, lambda world: commrt.attach(model_of(), None, algorithm, world=world, wire=wire))


def test_ranks_with_different_seeds_are_told_so():
    with pytest.raises(DisagreementError, match="algorithm"):
        run_ranks(2, lambda world: commrt.attach(model_of(), None, Gossip(seed=world.rank), world=world))


def test_a_parameter_that_came_later_is_refused():
    def body(world):
        model = model_of()
        replica = commrt.attach(model, None, Gossip(), world=world)
        model.append(nn.Linear(3, 3))
        replica.average()

    with pytest.raises(UsageError, match="the model has changed since attach"):
        run_ranks(2, body)


def test_a_detached_model_trains_alone_and_can_be_attached_again():
    def body(world):
        _, replica = trained(world, Gossip(), steps=2)
        replica.detach()
        model, optimizer = replica.model, replica._optimizers[0]
        local_step(model, optimizer, 0, world.rank)
        commrt.attach(model, optimizer, Gossip(), world=world)
        return replica.step

    assert run_ranks(2, body) == [2, 2]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gossip_of_gradients_averages_what_two_have_and_nothing_else(ranks):
    algorithm = Gossip(payload="gradients")

    def body(world):
        model = model_of()
        replica = commrt.attach(model, None, algorithm, world=world, bucket_cap_mb=1e-4)
        for step in range(3):
            model.zero_grad()
            model(batch(step, world.rank)).square().sum().backward()
        return [param.grad.clone() for param in model.parameters()], replica.step

    def alone(rank):
        model = model_of()
        model(batch(2, rank)).square().sum().backward()
        return [param.grad for param in model.parameters()]

    source = sources(algorithm, 2, ranks) if ranks > 1 else {0: 0}
    for rank, (found, step) in enumerate(run_ranks(ranks, body)):
        assert step == 3
        for grad, own, theirs in zip(found, alone(rank), alone(source[rank]), strict=True):
            assert torch.allclose(grad, (own + theirs) / 2, rtol=1e-5, atol=1e-7)


def test_the_report_says_what_a_step_cost():
    def body(world):
        _, replica = trained(world, Gossip())
        return replica.last, replica.stats(), len(replica.bundles)

    for last, stats, bundles in run_ranks(2, body):
        assert [span.bucket for span in last.spans][-bundles:] == [*range(bundles)]
        assert stats.nbytes_sent > 0
        assert last.exposed_s >= 0


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("batches", [(3, 6), (6, 3), (0, 4), (5, 5), (2, 6, 4), (4, 0, 0, 1)])
def test_ranks_that_run_out_of_data_answer_the_others_and_all_end_equal(batches, staleness):
    def body(world):
        model = model_of()
        optimizer = optimizer_of(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        replica = commrt.attach(model, optimizer, Gossip(staleness=staleness), world=world, bucket_cap_mb=1e-4)
        with replica.join(schedule):
            for step in range(batches[world.rank]):
                local_step(model, optimizer, step, world.rank)
                schedule.step()
        momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
        return replica.step, replica.replicas_equal(), schedule.last_epoch, [m.sum().item() for m in momentum]

    outcomes = run_ranks(len(batches), body)
    assert [(step, equal, epoch) for step, equal, epoch, _ in outcomes] == [(max(batches), True, max(batches))] * len(
        batches
    )
    assert all(momentum == outcomes[0][3] for *_, momentum in outcomes)


def test_training_goes_on_after_join_and_can_be_joined_again():
    def body(world):
        model = model_of()
        optimizer = optimizer_of(model)
        replica = commrt.attach(model, optimizer, Gossip(), world=world)
        for _ in range(2):
            with replica.join():
                for step in range(1 + world.rank):
                    local_step(model, optimizer, step, world.rank)
            local_step(model, optimizer, 9, world.rank)
        replica.drain()
        return replica.step

    assert run_ranks(3, body) == [8, 8, 8]


def test_join_inside_join_is_refused():
    def body(world):
        replica = commrt.attach(model_of(), None, Gossip(), world=world)
        with replica.join(), replica.join():
            pass

    with pytest.raises(UsageError, match=r"join\(\) inside join\(\)"):
        run_ranks(1, body)
