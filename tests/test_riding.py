# SPDX-License-Identifier: Apache-2.0
"""What rides with the gradients: weights, numbers, the wish to stop or to skip, and a watch on the weights."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from itertools import chain, product

import pytest
import torch
from cases import for_each, on_ranks, taking_turns
from late_ranks import AT, LATE, Loop, Trainee, at
from small_models import attached, net, sgd
from torch import nn

import commrt
from commrt.buckets.digest import Digest
from commrt.errors import DisagreementError, UsageError
from commrt.gossip.gossip_exchange import GossipExchange
from commrt.local_sgd import LocalSGD
from commrt.quantization import Int8
from commrt.testing.ranks import run_ranks


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


PASSES = {
    "one each": lambda rank, step, ranks: 1,
    "accumulated": lambda rank, step, ranks: 3,
    "uneven": lambda rank, step, ranks: 1 + (rank + step) % 3,
    "one rank has none": lambda rank, step, ranks: 2 * (rank != step % ranks),
}
WAYS = [{}, {"gradients": "views"}, {"algorithm": commrt.Direct(), "wire": Int8()}]
WAYS += [{"algorithm": commrt.Direct()}, {"wire": torch.bfloat16}, {"wire": torch.float16}]
ROUNDING = {None: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, Int8(): 2.0**-6}  # of a sum on a wire


def batch(rank, step, part, dtype=torch.float32):
    """A micro-batch of 1 to 8 samples."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    count = int(torch.randint(1, 9, (), generator=generator))
    x, y = (torch.randn(count, size, generator=generator, dtype=torch.float64) for size in (6, 3))
    return x.to(dtype), y.to(dtype)


def loss_of(model, x, y, reduction="mean"):
    losses = (model(x) - y).square().sum(1)
    return losses.mean() if reduction == "mean" else losses.sum()


def true_mean(model, parts):
    """The gradient of the mean over all samples of `parts`, and the size of what it is the mean of, in float64."""
    grads, size, samples = None, 0.0, sum(len(x) for x, _ in parts)
    exact = deepcopy(model).double()
    for x, y in parts:
        own = torch.autograd.grad(loss_of(exact, x, y, "sum") / samples, [*exact.parameters()])
        flat = torch.cat([each.flatten() for each in own])
        grads, size = flat if grads is None else grads + flat, size + float(flat.norm())
    return grads, size


def backward(replica, model, parts, reduction="mean"):
    model.zero_grad()
    for number, (x, y) in enumerate(parts):
        with nullcontext() if number == len(parts) - 1 else replica.no_sync():
            replica.weigh(loss_of(model, x, y, reduction), len(x), reduction=reduction).backward()
    if not parts:
        replica.average()


def is_mean(model, expected, size, tolerance):
    own = torch.cat([param.grad.double().flatten() for param in model.parameters()])
    return bool((own - expected).norm() <= tolerance * size)


WEIGHED = [(2 + (i + i // len(WAYS)) % 3, *row) for i, row in enumerate(product(PASSES, WAYS))]


@for_each(("ranks", "passes", "way"), [(1, "accumulated", {}), *WEIGHED])
def test_gradients_that_weigh_become_the_mean_over_all_samples(ranks, passes, way):
    def body(world):
        model, optimizer, replica = attached(world, net(), bucket_cap_mb=1e-4, **way)
        for step in range(3):
            counts = [PASSES[passes](rank, step, ranks) for rank in range(ranks)]
            every = [batch(rank, step, k, torch.float64) for rank, n in enumerate(counts) for k in range(n)]
            before = deepcopy(model)
            parts = [batch(world.rank, step, k) for k in range(counts[world.rank])]
            backward(replica, model, parts, ["mean", "sum"][step % 2])
            if world.rank == step % ranks:  # the others have the same: or their weights would differ at the end
                assert is_mean(model, *true_mean(before, every), ROUNDING[way.get("wire")])
            optimizer.step()
        return replica.replicas_equal()

    assert run_ranks(ranks, body) == [True] * ranks


@for_each("ranks", [2, 3])
def test_a_rank_that_has_left_join_weighs_nothing(ranks):
    def body(world):
        model = net()
        replica = commrt.attach(model, None, world=world, bucket_cap_mb=1e-4)
        with replica.join():
            for step in range(2 + world.rank):
                backward(replica, model, [batch(world.rank, step, 0)])
                left = [batch(rank, step, 0, torch.float64) for rank in range(ranks) if step < 2 + rank]
                assert is_mean(model, *true_mean(model, left), 1e-6)

    run_ranks(ranks, body)


@for_each("ranks", [2, 3, 4])
def test_gossip_of_gradients_weighs_those_of_two_ranks(ranks):
    algorithm = commrt.Gossip(payload="gradients")

    def body(world):
        model = net()
        replica = commrt.attach(model, None, algorithm, world=world, bucket_cap_mb=1e-4)
        for step in range(4):
            backward(replica, model, [batch(world.rank, step, 0)])
            sources = [each.src[each.dst == world.rank] for each in algorithm.schedule(step, ranks).steps()]
            together = {world.rank, *chain.from_iterable(map(list, sources))}
            parts = [batch(int(rank), step, 0, torch.float64) for rank in together]
            assert is_mean(model, *true_mean(model, parts), 1e-6)

    run_ranks(ranks, body)


@on_ranks(3)
def test_with_backup_workers_only_gradients_that_counted_weigh(world):
    model = net()
    replica = commrt.attach(model, sgd(model), commrt.BackupWorkers(1), world=world, bucket_cap_mb=1e-4)
    for _ in range(4):
        replica.drain()
        before, step = deepcopy(model), replica.step
        backward(replica, model, [batch(world.rank, step, 0)])
        if replica.last.counted:
            parts = [batch(rank, step, 0, torch.float64) for rank in replica.last.members]
            assert is_mean(model, *true_mean(before, parts), 1e-6)
        replica._optimizers[0].step()


@on_ranks(2)
def test_local_sgd_steps_by_a_mean_wherever_passes_end_and_skips_weigh_nothing(world):
    model, optimizer, replica = attached(world, net(), plain_sgd, algorithm=LocalSGD(1), bucket_cap_mb=1e-4)
    parts = [batch(world.rank, 0, part) for part in range(2)]
    with replica.no_sync():
        for x, y in parts:
            replica.weigh(loss_of(model, x, y), len(x)).backward()
    replica.average()
    assert is_mean(model, *true_mean(model, [(x.double(), y.double()) for x, y in parts]), 1e-6)
    optimizer.step()
    replica.consolidate()
    optimizer.zero_grad()
    before = deepcopy(model)
    if world.rank:
        replica.skip()
    x, y = batch(0, 1, 0)
    replica.weigh(loss_of(model, x, y), 1e6 if world.rank else 3).backward()
    if not replica.skipping:
        optimizer.step()
    replica.consolidate()
    grads, _ = true_mean(before, [(x.double(), y.double())])
    moved = [own - old for own, old in zip(model.parameters(), before.parameters(), strict=True)]
    torch.testing.assert_close(torch.cat([each.detach().flatten() for each in moved]), -0.1 * grads.float())


@for_each("period", [1, 2])
@on_ranks(3)
def test_local_sgd_weighs_what_each_rank_has_seen_in_a_period(world, period):
    model, optimizer, replica = attached(world, net(), plain_sgd, algorithm=LocalSGD(period), bucket_cap_mb=1e-4)
    others = [net() for _ in range(world.size)]
    for end in range(2):
        seen = [0] * world.size
        for step in range(end * period, (end + 1) * period):
            backward(replica, model, [batch(world.rank, step, part) for part in range(1 + world.rank)])
            optimizer.step()
            for rank, other in enumerate(others):
                parts = [batch(rank, step, part) for part in range(1 + rank)]
                grads, _ = true_mean(other, [(x.double(), y.double()) for x, y in parts])
                sizes = [param.numel() for param in other.parameters()]
                with torch.no_grad():
                    for param, grad in zip(other.parameters(), grads.split(sizes), strict=True):
                        param.sub_(grad.view(param.shape), alpha=0.1)
                seen[rank] += sum(len(x) for x, _ in parts)
        with torch.no_grad():
            for param, *theirs in zip(model.parameters(), *(other.parameters() for other in others), strict=True):
                mean = sum(count * one for count, one in zip(seen, theirs, strict=True)) / sum(seen)
                torch.testing.assert_close(param, mean, rtol=1e-5, atol=1e-6)
                for one in theirs:
                    one.copy_(mean)


@on_ranks(2)
def test_local_sgd_goes_on_with_the_weights_of_a_checkpoint(world):
    def trained(saves):
        model, optimizer, replica = attached(world, net(), plain_sgd, algorithm=LocalSGD(3, 1))
        for step in range(8):
            if saves and step in {4, 5}:
                kept = deepcopy([model.state_dict(), replica.state_dict()])
                replica.detach()
                model, optimizer, replica = attached(world, net(), plain_sgd, algorithm=LocalSGD(3, 1))
                model.load_state_dict(kept[0])
                replica.load_state_dict(kept[1])
            optimizer.zero_grad()
            replica.weigh(loss_of(model, *batch(world.rank, step, 0)), 1 + 9 * world.rank + step).backward()
            optimizer.step()
        replica.consolidate()
        replica.detach()
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    assert torch.equal(trained(saves=False), trained(saves=True))


@for_each("dtype", [torch.float32, torch.float16])
@on_ranks(2)
def test_weights_of_any_size_do_not_leave_the_range_of_fp16(world, dtype):
    model = net().to(dtype)
    replica = commrt.attach(model, None, world=world, wire=torch.float16, bucket_cap_mb=1e-4)
    for weight in (1e5, 1e6, 1e-4, 3e3):
        model.zero_grad()
        x, y = torch.full((2, 6), 0.5, dtype=dtype), torch.zeros(2, 3, dtype=dtype)
        replica.weigh(loss_of(model, x, y), weight).backward()
        assert is_mean(model, *true_mean(model, [(x.double(), y.double())]), 2.0**-9)


GOSSIP = commrt.Gossip(payload="gradients")
NO_WEIGHTS = [
    (torch.float32, {"algorithm": GOSSIP, "wire": torch.float16}, "gossip in float16"),
    (torch.float32, {"same_bits": True}, "same_bits"),
    (torch.float16, {"gradients": "views"}, "views"),
]


@for_each(("dtype", "way", "says"), NO_WEIGHTS)
@on_ranks(2)
def test_weights_are_refused_where_they_would_break_a_promise(world, dtype, way, says):
    model = net().to(dtype)
    replica = commrt.attach(model, None, world=world, **way)
    with pytest.raises(UsageError, match=says):
        replica.weigh(loss_of(model, *batch(0, 0, 0, dtype)), 3)


@for_each("call", ["stop", "skip", "stopping", "skipping"])
@on_ranks(2)
def test_with_gossip_of_gradients_no_rank_stops_or_skips_alone(world, call):
    replica = commrt.attach(net(), None, GOSSIP, world=world)
    with pytest.raises(UsageError, match="only partners hear of it"):
        getattr(replica, call, replica.stop)()
    replica.detach()
    replica.stop()  # of a handler that is still there


@on_ranks(3)
def test_a_rank_without_data_learns_of_a_stop_at_the_end_of_join(world):
    model, optimizer, replica = attached(world, net())
    with replica.join():
        for step in range(1 + world.rank):
            if step == 2:
                replica.stop()
            optimizer.zero_grad()
            loss_of(model, *batch(world.rank, step, 0)).backward()
            optimizer.step()
    assert replica.stopping == (2,)


@on_ranks(2)
def test_two_optimizers_may_take_turns_at_weighed_steps(world):
    model = net()
    optimizers = [plain_sgd(model[0]), plain_sgd(model[2])]
    replica = commrt.attach(model, optimizers, world=world)
    for step, optimizer in enumerate([optimizers[0], *optimizers, optimizers[1]]):
        optimizer.zero_grad()
        loss = replica.weigh(loss_of(model, *batch(world.rank, step, 0)), 3)
        loss.backward(inputs=[*optimizer.param_groups[0]["params"]])
        optimizer.step()


SOME = r"some ranks say with replica.weigh\(\)"


@for_each(
    ("who", "weight", "says"),
    [
        (lambda rank, step: rank == 1, 3, SOME),
        (lambda rank, step: step == 0 or rank == 1, 3, SOME),
        (lambda rank, step: True, 0, "together weigh nothing"),
    ],
)
def test_weights_that_make_no_mean_are_refused_on_all_ranks(who, weight, says):
    def body(world):
        model = net()
        replica = commrt.attach(model, None, world=world)

        def train():
            for step in range(2):
                loss = loss_of(model, *batch(world.rank, step, 0))
                (replica.weigh(loss, weight) if who(world.rank, step) else loss).backward()

        with pytest.raises(DisagreementError, match=says):
            train()
        return True

    assert run_ranks(3, body) == [True] * 3


@for_each("set_to_none", [True, False])
@on_ranks(2)
def test_weights_follow_their_gradients(world, set_to_none):
    model, optimizer, replica = attached(world, net())
    with replica.no_sync():
        loss_of(model, *batch(world.rank, 9, 1)).backward()
        optimizer.zero_grad()
        replica.weigh(loss_of(model, *batch(world.rank, 9, 0)), 99).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    x, y = batch(world.rank, 0, 0)
    replica.weigh(loss_of(model, x, y), len(x)).backward()
    assert is_mean(model, *true_mean(model, [batch(rank, 0, 0, torch.float64) for rank in range(2)]), 1e-6)
    with pytest.raises(UsageError, match=r"put all but the last pass of an accumulation into replica\.no_sync"):
        replica.weigh(loss_of(model, *batch(world.rank, 1, 0)), 3).backward()
    loss = replica.weigh(loss_of(model, *batch(world.rank, 1, 0)), len(batch(world.rank, 1, 0)[0]))
    torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    optimizer.zero_grad()
    loss.backward()
    assert is_mean(model, *true_mean(model, [batch(rank, 1, 0, torch.float64) for rank in range(2)]), 1e-6)
    with pytest.raises(UsageError, match="weighs already"):
        replica.weigh(loss, 3)
    optimizer.zero_grad()
    loss = sum(replica.weigh(param.sum(), 3) for param in model.parameters())
    with pytest.raises(UsageError, match="in one backward pass: weigh each in a pass of its own"):
        loss.backward()
    replica.detach()
    with pytest.raises(UsageError, match="was detached"):
        replica.weigh(loss_of(model, *batch(world.rank, 1, 0)), 3)


@for_each("algorithm", [commrt.Torus2D(), commrt.BackupWorkers(0), LocalSGD(1)])
@for_each("first", [True, False])
@on_ranks(2)
def test_an_accumulation_of_which_only_some_passes_weigh_is_refused(world, algorithm, first):
    model = net()
    replica = commrt.attach(model, sgd(model), algorithm, world=world)
    losses = [loss_of(model, *batch(world.rank, 0, part)) for part in range(2)]
    replica.weigh(losses[not first], 3)
    with replica.no_sync():
        losses[0].backward()
    with pytest.raises(UsageError, match=f"pass {'is not' if first else 'is'} weighed .* of every pass or of none"):
        losses[1].backward()


@on_ranks(2)
def test_a_rank_that_averages_what_does_not_weigh_differs_from_one_that_weighs(world):
    model, _, replica = attached(world, net())
    loss = loss_of(model, *batch(world.rank, 0, 0))

    def average():
        with replica.no_sync():
            loss.backward()
        replica.average()

    with pytest.raises(DisagreementError, match=SOME):
        replica.weigh(loss, 3).backward() if world.rank else average()


WEIGHTS = [-1, float("nan"), float("inf"), 1e30, True, "3", torch.ones(2), torch.ones((), device="meta")]
NUMBERS = [{"loss": "1"}, {"loss": None}, {f"n{i}": 0.0 for i in range(9)}]


@for_each(("weight", "numbers"), [*product(WEIGHTS, [{}]), *product([1.0], NUMBERS)])
@on_ranks(1)
def test_what_is_no_weight_and_no_number_is_refused(world, weight, numbers):
    model = net()
    replica = commrt.attach(model, None, world=world)
    with pytest.raises(UsageError, match=r"weigh\(\)|ride"):
        replica.ride(**numbers) if numbers else replica.weigh(loss_of(model, *batch(0, 0, 0)), weight)


@for_each("way", WAYS)
@on_ranks(3)
def test_numbers_of_all_ranks_ride_as_they_are(world, way):
    model = net()
    replica = commrt.attach(model, None, world=world, **way)
    for step in range(3):
        numbers = {"loss": world.rank + 0.1, "seen": 1e300 * world.rank}
        if step != 1:
            replica.ride(**numbers)
        loss_of(model, *batch(world.rank, step, 0)).backward()
        if step == 1:
            assert not replica.rode
        else:
            assert replica.rode["loss"].by_rank == {0: 0.1, 1: 1.1, 2: 2.1}
            assert (replica.rode["seen"].max, replica.rode["loss"].min) == (2e300, 0.1)
            assert (replica.rode["seen"].sum, replica.rode["loss"].mean) == (3e300, (0.1 + 1.1 + 2.1) / 3)


@for_each("algorithm", [commrt.Torus2D(), LocalSGD(2)])
@on_ranks(2)
def test_of_numbers_given_twice_in_a_step_the_second_is_refused(world, algorithm):
    model, optimizer, replica = attached(world, net(), algorithm=algorithm)
    for step in range(2):
        replica.ride(seen=step)
        with pytest.raises(UsageError, match=r"ride\(seen=\) twice"):
            replica.ride(loss=9, seen=9)
        loss_of(model, *batch(world.rank, step, 0)).backward()
        optimizer.step()
    assert replica.rode["seen"].by_rank == {0: 1, 1: 1}


@on_ranks(2)
def test_numbers_of_other_names_are_named(world):
    model = net()
    replica = commrt.attach(model, None, world=world)
    replica.ride(**{f"of {world.rank}": 1.0})
    loss_of(model, *batch(world.rank, 0, 0)).backward()
    with pytest.raises(DisagreementError, match="lets other numbers ride"):
        _ = replica.rode


@for_each("algorithm", [commrt.Torus2D(), commrt.BackupWorkers(0)])
def test_the_wish_of_one_rank_to_skip_or_to_stop_is_known_to_all_after_the_same_step(algorithm):
    def body(world):
        model, optimizer, replica = attached(world, net(), algorithm=algorithm)
        seen = []
        for step in range(5):
            if (world.rank, step) == (1, 1):
                replica.skip()
            if (world.rank, step) == (2, 3):
                replica.stop()
            optimizer.zero_grad()
            loss_of(model, *batch(world.rank, step, 0)).backward()
            seen.append((replica.skipping, replica.stopping))
            if not replica.skipping:
                optimizer.step()
        return seen

    expected = [((), ()), ((1,), ()), ((), ()), ((), (2,)), ((), (2,))]
    assert run_ranks(3, body) == [expected] * 3


@for_each(("period", "delay"), [(1, 0), (2, 0), (3, 1)])
def test_with_local_sgd_all_ranks_stop_after_the_same_step_and_skip_alone(period, delay):
    def body(world):
        model, optimizer, replica = attached(world, net(), algorithm=LocalSGD(period, delay))
        skipped = []
        for step in range(20):
            if (world.rank, step) == (1, 1):
                replica.skip()
            if (world.rank, step) == (2, 3):
                replica.stop()
            replica.ride(step=step)
            optimizer.zero_grad()
            loss_of(model, *batch(world.rank, step, 0)).backward()
            skipped += [step] if replica.skipping else []
            if not replica.skipping:
                optimizer.step()
            if replica.stopping:
                return step, skipped
        return None

    ends = run_ranks(3, body)
    assert len({step for step, _ in ends}) == 1
    assert [skipped for _, skipped in ends] == [[], [1], []]


def test_a_late_rank_says_that_it_wants_to_stop_and_is_told_that_all_do():
    def body(loop, world):
        rank = Trainee(loop, world)
        while not rank.replica.stopping:
            if (world.rank, at(rank.replica)) == (LATE, AT):
                rank.replica.stop()
            rank.step()
        rank.replica.consolidate()
        return rank.replica.step

    assert len({*Loop(late_by=2).run(body)}) == 1


HARMS = {
    "a flipped bit": lambda model: model[0].weight.data.view(torch.int32)[1, 2].bitwise_xor_(1),
    "a rank's own write": lambda model: model[0].bias.data.mul_(1.001),
}


@for_each(("way", "harm"), taking_turns([{}, {"gradients": "views"}, {"algorithm": commrt.BackupWorkers(0)}], [*HARMS]))
def test_a_watch_names_the_rank_whose_weights_came_to_differ_in_the_next_step(way, harm):
    def body(world):
        model, optimizer, _ = attached(world, net(), watch=True, bucket_cap_mb=1e-4, **way)
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(model, *batch(world.rank, step, 0))
            if step == 5:
                with pytest.raises(DisagreementError, match=r"before step 5 .* those of ranks \[2\] differ"):
                    loss.backward()
                return True
            loss.backward()
            optimizer.step()
            if (world.rank, step) == (2, 4):
                HARMS[harm](model)
        return False

    assert run_ranks(3, body) == [True] * 3


@on_ranks(2)
def test_a_watch_compares_the_anchors_of_local_sgd(world):
    model, optimizer, replica = attached(world, net(), algorithm=LocalSGD(2), watch=True)
    for step in range(5):
        loss_of(model, *batch(world.rank, step, 0)).backward()
        optimizer.step()
    replica._fragments[0].anchors[0].mul_(1 + 0.001 * world.rank)
    loss_of(model, *batch(world.rank, 5, 0)).backward()
    with pytest.raises(DisagreementError, match="held different weights"):
        optimizer.step()


@for_each("algorithm", [commrt.Torus2D(), LocalSGD(2)])
def test_a_watch_compares_the_weights_of_the_last_step_in_consolidate(algorithm):
    def body(world):
        model, optimizer, replica = attached(world, net(), algorithm=algorithm, watch=True)
        loss_of(model, *batch(world.rank, 0, 0)).backward()
        optimizer.step()
        tags, run_now = [], world.run_now
        world.run_now = lambda schedule, flat, tag, members: (tags.append(tag), run_now(schedule, flat, tag, members))
        replica.consolidate()
        assert {tag.step for tag in tags} == {replica.step}
        loss_of(model, *batch(world.rank, 1, 0)).backward()
        optimizer.step()
        held = model[0].weight if algorithm == commrt.Torus2D() else replica._fragments[0].anchors[0]
        if world.rank == 1:
            held.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        with pytest.raises(DisagreementError, match=r"before step 2 .* those of ranks \[1\] differ"):
            replica.consolidate()

    run_ranks(3, body)


@on_ranks(2)
def test_local_sgd_forgets_a_step_that_was_left_out_and_keeps_one_of_held_back_passes(world):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    replica = commrt.attach(model, optimizer, LocalSGD(3), world=world)

    def backward(weight):  # rank 0 moves by 1, rank 1 by 2
        optimizer.zero_grad()
        replica.weigh(-(1 + world.rank) * model(torch.ones(1, 1)).sum(), weight).backward()

    backward(1 + 999 * world.rank)
    if world.rank == 0:
        optimizer.step()  # rank 1 leaves it out
        backward(1)
    else:
        optimizer.zero_grad()
        replica.average()
    optimizer.step()
    backward(1)
    optimizer.step()
    assert model.weight.item() == 11 / 4  # of 3 steps to 3, and 1 to 2
    with replica.no_sync():
        backward(1)
    optimizer.step()
    replica.consolidate()
    assert model.weight.item() == 11 / 4 + 1.5
    for weight in (1 + 999 * world.rank, 1):
        replica.overwrite_with_first()  # begins anew: what rank 1 had learned is gone, and weighs nothing
        backward(weight)
        optimizer.step()
    replica.consolidate()
    assert model.weight.item() == 11 / 4 + 1.5 + 1 + 1.5


TENSORS = [
    torch.randn(3, 5),
    torch.randn(7).bfloat16(),
    torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.randn(6, 4).double().T,
    torch.randn(9, 9)[::2, ::3],
    torch.randn(5, dtype=torch.complex64),
    torch.randn(1 << 15),
]


@for_each("tensor", TENSORS)
def test_one_flipped_bit_changes_a_digest(tensor):
    kept = nn.Parameter(tensor.clone())
    digest = Digest([kept, torch.ones(3)])
    before = digest.now()
    raw = torch.view_as_real(kept.data) if kept.is_complex() else kept.data
    words = raw.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[raw.itemsize])
    place = tuple(size // 2 for size in words.shape)
    for bit in range(8 * raw.itemsize - 1):
        words[place] ^= 1 << bit
        assert digest.now() != before
        words[place] ^= 1 << bit
    assert digest.now() == before
    kept.data.copy_(tensor.flip(0))
    assert digest.now() != before


@for_each(("ranks", "algorithm"), [(2, {}), (3, {}), (4, {"staleness": 1}), (5, {}), (8, {"topology": "hypercube"})])
def test_with_gossip_all_ranks_stop_after_the_same_step(ranks, algorithm):
    def body(world):
        model, optimizer, replica = attached(world, net(), algorithm=commrt.Gossip(**algorithm))
        with pytest.raises(UsageError, match="are not added up"):
            replica.ride(loss=1.0)
        for step in range(60):
            if (world.rank, step) in {(ranks - 1, 4), (0, 6)}:
                replica.stop()
            optimizer.zero_grad()
            loss_of(model, *batch(world.rank, step, 0)).backward()
            optimizer.step()
            if replica.stopping:
                replica.consolidate()
                return step, replica.stopping
        return None

    (end,) = {*run_ranks(ranks, body)}
    assert end[0] <= 4 + 20
    assert end[1] == (ranks - 1,)


def test_a_watch_on_gossip_names_the_rank_whose_message_came_with_a_flipped_bit(monkeypatch):
    bind = GossipExchange._bind

    def flipping(self, program, message):
        bound = bind(self, program, message)

        def run_and_flip(tag):
            bound.run(tag)
            if (self._world.rank, tag.step) == (1, 3):
                message.received.view(torch.int32)[-20] ^= 1

        return bound._replace(run=run_and_flip)

    def body(world):
        model, optimizer, _ = attached(world, net(), algorithm=commrt.Gossip(), watch=True)
        for step in range(6):
            loss_of(model, *batch(world.rank, step, 0)).backward()
            optimizer.step()

    monkeypatch.setattr(GossipExchange, "_bind", flipping)
    with pytest.raises(DisagreementError, match="in step 3 other weights came from rank 0"):
        run_ranks(2, body)


ALONE = [commrt.Gossip(), LocalSGD(2)]  # with which a rank leaves out a step alone


@for_each(("algorithm", "scales"), product([commrt.Torus2D(), commrt.BackupWorkers(0), *ALONE], [False, True]))
@on_ranks(2)
def test_a_step_that_is_not_finite_on_one_rank_leaves_nothing_behind(world, algorithm, scales):
    def trained(spoils):
        model = net()
        optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scales)
        replica = commrt.attach(model, optimizer, algorithm, world=world)
        for step in range(12):
            optimizer.zero_grad()
            x, y = batch(world.rank, step, 0)
            is_left_out = step == 3 and (world.rank == 1 or algorithm not in ALONE)
            if is_left_out and not spoils:
                if algorithm in ALONE:
                    replica.average()
                continue
            loss = loss_of(model, x * torch.nan if (world.rank, step) == (1, 3) else x, y)
            if not loss.isfinite():
                replica.skip()
            scaler.scale(loss).backward()
            if scales or not replica.skipping:
                scaler.step(optimizer)
            scaler.update()
        replica.consolidate()
        assert replica.replicas_equal()
        replica.detach()
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    torch.testing.assert_close(trained(spoils=True), trained(spoils=False), rtol=1e-6, atol=1e-7)
