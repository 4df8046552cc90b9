# SPDX-License-Identifier: Apache-2.0
"""Backup workers under loops that do more than step: own buffers, skipped batches, own counters, several optimizers."""

from copy import deepcopy

import pytest
import torch
from cases import for_each, on_ranks, taking_turns
from late_ranks import AT, MODEL, Loop, Progress, Trainee, all_are_equal, at, backward, batch, on_loop, trainee, weights
from torch import nn

import commrt
from commrt.backup_workers.final_calls import FinalCalls
from commrt.errors import DeadlineExceeded, DisagreementError, PeerLost, Place, QuorumLost, UsageError
from commrt.testing.ranks import run_ranks
from commrt.training.stateful import dump, load

PLACE = Place(0)


class Net(nn.Module):
    """Has what loops change by themselves: a frozen teacher, and a flag among the buffers."""

    def __init__(self):
        super().__init__()
        self.student = deepcopy(MODEL)
        self.teacher = deepcopy(self.student).requires_grad_(False)
        self.register_buffer("observes", torch.ones(1, dtype=torch.uint8))

    def forward(self, x):
        return torch.cat([self.student(x) - self.teacher(x), self.student(x)])


def student_of(loop, world):
    net = Net()
    optimizer = torch.optim.SGD(net.student.parameters(), lr=0.05, momentum=0.9)
    return Trainee(loop, world, net, optimizer, also=[net.teacher])


@on_loop(student_of)
def test_a_frozen_teacher_that_the_loop_moves_goes_along_with_the_weights(rank):
    def follow():
        pairs = zip(rank.model.teacher.parameters(), rank.model.student.parameters(), strict=True)
        for theirs, ours in pairs:
            theirs.data.lerp_(ours.data, 0.1)  # which autograd does not count

    rank.train(follow)
    assert rank.replica.replicas_equal()


@on_loop(student_of)
def test_a_buffer_that_the_loop_sets_after_a_step_stays_as_it_set_it(rank):
    def freeze():
        if rank.replica.step == AT + 1:
            rank.model.observes.zero_()

    rank.train(freeze)
    assert rank.model.observes.item() == 0
    assert rank.replica.replicas_equal()


@on_loop()
def test_states_that_were_taken_in_inference_mode_can_be_stepped(rank):
    rank.train_to_the_late_step()
    with torch.inference_mode():
        assert rank.replica.replicas_equal()
    rank.train()
    assert rank.replica.replicas_equal()


@on_ranks(4)
def test_a_batch_that_does_not_fit_into_memory_may_be_skipped(world):
    model, optimizer, replica = trainee(world, commrt.BackupWorkers(1))
    failed = []

    def fail(gradient):
        if world.rank == 1 and replica.step >= AT and not failed:
            failed.append(True)
            world.store.set("rank 1 has failed", "")
            raise MemoryError
        return gradient

    model[0].weight.register_hook(fail)
    while at(replica) < AT + 3:
        if world.rank == 0 and replica.step >= AT:  # so the others need rank 1 for that step
            world.store.wait(["rank 1 has failed"])
        try:
            backward(model, world.rank, replica.step)
        except MemoryError:
            continue
        optimizer.step()
    assert replica.replicas_equal()
    assert failed or world.rank != 1


def test_changes_of_weights_after_a_dropped_batch_are_undone(caplog):
    def body(world):
        model, optimizer, replica = trainee(world, commrt.BackupWorkers(1))
        for _ in range(4 if world.rank < 2 else 7):  # the last three have too few ranks for a step
            backward(model, world.rank, replica.step)
            optimizer.step()
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.99)
        replica.consolidate()  # a rank that ended before the others did takes what they have
        return replica.replicas_equal()

    assert run_ranks(4, body) == [True] * 4
    assert "differed between ranks" not in caplog.text


def test_weights_that_differ_at_one_version_are_made_equal_with_a_warning(caplog):
    def body(loop, world):
        rank = Trainee(loop, world)
        rank.train(until=2)
        with torch.no_grad():
            rank.model[0].weight.add_(world.rank)
        rank.replica.consolidate()
        return rank.replica.replicas_equal()

    assert Loop().run(body) == [True] * 4
    assert "weights or buffers differed between ranks" in caplog.text


def test_an_optimizer_with_other_groups_is_an_error_in_words():
    model = deepcopy(MODEL)
    one = torch.optim.SGD(model[0].parameters(), lr=0.1)
    two = torch.optim.SGD(model[0].parameters(), lr=0.1)
    one.add_param_group({"params": model[2].parameters()})
    with pytest.raises(UsageError, match=r"SGD has 1 param_groups here and 2 on the rank .* add_param_group\(\)"):
        load(dump([one]), [two])


@for_each("error", [QuorumLost("", PLACE), DeadlineExceeded("", PLACE), PeerLost("", PLACE)])
def test_final_calls_run_once_before_an_error_that_ends_training_and_not_before_another(error):
    said = []
    words = FinalCalls([lambda: said.append("one"), lambda: 1 // 0, lambda: said.append("two")])
    words.make(UsageError())  # a loop may survive it
    assert said == []
    for _ in range(2):
        words.make(error)
    assert said == ["one", "two"]


@on_ranks(3)
def test_a_ring_shuffle_is_refused_as_ranks_do_different_numbers_of_steps(world):
    trainee(world, commrt.BackupWorkers(1))
    with pytest.raises(UsageError, match="with BackupWorkers ranks make different numbers of steps"):
        list(commrt.RingShuffle(torch.ones(4, 2), batch_size=2, world=world))


STEPS, LATE_FROM = 9, 5
"""In loops with several optimizers, a rank is late in each step from `LATE_FROM` on."""

# loops that set the learning rate from a counter of their own, as nanoGPT's does


def rate(iter_num):
    return 0.01 * (iter_num + 1)


def iterate(model, optimizer, replica, iter_num):
    """Sets the rate and steps: one iteration of nanoGPT's loop; returns the step that counted, with its rate."""
    optimizer.param_groups[0]["lr"] = rate(iter_num)
    model(batch(0, iter_num)).square().mean().backward()
    used = replica.last.step, optimizer.param_groups[0]["lr"]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {used} if replica.last.counted else set()


def counting(world, progress, *, counts_for_itself):
    """Rank 1 is late in its first iteration; rank 2 leaves at step 3, so that the gradients of rank 1 count then."""
    model = deepcopy(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world)
    iter_num, used = 0, set()
    while iter_num < STEPS:
        if world.rank == 1 and not iter_num:
            progress.wait_for(3)
        if world.rank == 2 and iter_num == 3:
            progress.wait_for(STEPS)
            if counts_for_itself:
                return None
        used |= iterate(model, optimizer, replica, iter_num)
        iter_num = iter_num + 1 if counts_for_itself else replica.step
        progress.tell_of(replica)
    return used, replica.replicas_equal(), replica.step, replica.lost


def test_the_rate_of_each_step_is_right_on_a_rank_that_was_late_if_the_loop_asks_for_its_step():
    progress = Progress()
    ends = run_ranks(3, lambda world: counting(world, progress, counts_for_itself=False))
    assert [end[1:] for end in ends] == [(True, STEPS, ())] * 3
    rates = [(number, rate(number)) for number in range(STEPS)]
    assert [used for used, *_ in ends] == [{*rates}, {*rates[3:]}, {*rates[:3]}]


def test_a_loop_that_counts_for_itself_is_told_the_line_that_makes_it_right():
    progress = Progress()

    def body(world):
        if world.rank == 2:
            return counting(world, progress, counts_for_itself=True)
        try:
            with pytest.raises(DisagreementError, match=r"put `iter_num = replica\.step` at its top"):
                counting(world, progress, counts_for_itself=True)
        finally:
            progress.tell(STEPS)

    run_ranks(3, body)


def states(parts):
    return deepcopy([part.state_dict() for part in parts])


def load_states(parts, saved):
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)


def test_a_loaded_checkpoint_makes_all_ranks_equal_whatever_each_had_before():
    def body(loop, world):
        rank = Trainee(loop, world)
        parts = rank.model, rank.optimizer, rank.replica
        first = states(parts)
        rank.train_to_the_late_step()
        if world.rank == 0:  # a batch more than the others: nobody uses it
            rank.step()
        load_states(parts, first)
        assert rank.replica.replicas_equal()
        rank.train(until=AT)
        rank.replica.consolidate()
        momenta = [rank.optimizer.state[param]["momentum_buffer"].clone() for param in rank.model.parameters()]
        return [*weights(rank.model), *momenta]

    assert all_are_equal(Loop().run(body))


# several optimizers, of which some do not step after every backward pass


class Parts(nn.Sequential):
    """A generator, a part between, and a critic; a loop may call all or some of them."""

    def call(self, numbers, x):
        """Call these parts, and not the module that was attached."""
        for number in numbers:
            x = self[number](x)
        return x


with torch.random.fork_rng():
    torch.manual_seed(0)
    PARTS = Parts(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()


def drawn(version, width):
    """A batch that is the same on all ranks, so that the weights do not depend on whose gradients count."""
    return torch.randn(5, width, generator=torch.Generator().manual_seed(version), dtype=torch.float64)


def turns(parts, version):
    """Two steps of the critic, then one of the generator, whose gradients reach the critic, too."""
    return (parts.call([2], drawn(version, 4)), [2]) if version % 3 < 2 else (parts(drawn(version, 3)), [0])


def no_pass_in_common(parts, version):
    return (parts.call([0], drawn(version, 3)), [0]) if version % 2 else (parts.call([2], drawn(version, 4)), [2])


def whole(which):
    """All parts are called; ``which(version)`` are the optimizers that step."""
    return lambda parts, version: (parts(drawn(version, 3)), which(version))


all_of_them = whole(lambda _: [0, 1, 2])
LOOPS = {
    "turns": turns,
    "no pass in common": no_pass_in_common,
    "all of them": all_of_them,
    "one never": whole(lambda _: [0, 1]),
    "one that a scaler skips at times": whole(lambda version: [0, 1] if version % 3 == 2 else [0, 1, 2]),
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
    for equal, reached, lost, found in trained_with_a_late_rank(loop, zero, **options):
        assert (equal, reached, lost) == (True, STEPS, ())
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
