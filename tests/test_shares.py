# SPDX-License-Identifier: Apache-2.0
"""Shares of an epoch: each sample is used in one step of it, whatever happens to the ranks."""

from __future__ import annotations

import json
from collections import Counter, deque
from copy import deepcopy
from itertools import chain, count, islice

import pytest
import torch
from cases import for_each
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from late_ranks import MODEL, Progress, sgd
from torch.utils.data import DataLoader, TensorDataset

import commrt
from commrt.data.positions import order_of
from commrt.errors import UsageError
from commrt.testing.ranks import run_ranks
from commrt.training.step_report import StepReport

EVENTS = ["used"] * 5 + ["dropped", "error", "other ranks", "other batch", "resumed"]


class Ahead:
    """A loader that draws batches before the loop asks for them, as one with workers does."""

    def __init__(self, shares, depth):
        self.shares, self.depth = shares, depth

    def __iter__(self):
        drawn = iter(self.shares)
        ready = deque(islice(drawn, self.depth))
        while ready.extend(islice(drawn, 1)) or ready:
            yield torch.tensor(ready.popleft())


class Rank:
    """One of `group`, with a loop over its batches."""

    def __init__(self, group, rank, size, batch_size, make_loader):
        self.shares = commrt.Shares(range(size), batch_size, seed=rank, place=lambda: (rank, len(group)))
        self.loader, self.loop = make_loader(self.shares), iter(())

    def batch(self):
        if (batch := next(self.loop, None)) is None:
            self.loop = self.shares.batches(self.loader)
        return tuple((next(self.loop) if batch is None else batch).tolist())


def resize(group, ranks, *arguments, state=None):
    """Let so many ranks be there; new ones take the state of the first, or `state`, as from a file."""
    for rank in range(len(group), ranks):
        new = Rank(group, rank, *arguments)
        state = group[0].shares.state_dict() if group else state or new.shares.state_dict()
        new.shares.load_state_dict(json.loads(json.dumps(state)))
        group.append(new)


def used_in(batches, counted):
    """The samples of a step: those of all ranks that counted, which are disjoint, or the same on all ranks."""
    used = [batches[rank] for rank in counted]
    return used[0] if len({*batches}) == 1 and used else [*chain(*used)]


def finish(group, counted):
    for each in group:
        each.shares.done(counted)
        assert each.shares.state_dict() == group[0].shares.state_dict()
    return group[0].shares.epoch


def happens(event, draw, group, size, batch_size, make_loader):
    """Let `event` happen between two steps; return the batch size from then on."""
    ranks = draw(st.integers(1, 7)) if event in {"other ranks", "resumed"} else len(group)
    batch_size = draw(st.integers(1, 5)) if event == "other batch" else batch_size
    for each in group:
        each.shares.batch_size = batch_size
    state = group[0].shares.state_dict()
    del group[0 if event == "resumed" else ranks :]
    resize(group, ranks, size, batch_size, make_loader, state=state)
    return batch_size


@cases(100)
@given(st.data(), st.integers(1, 60), st.integers(1, 7), st.integers(1, 5), st.integers(0, 4))
def test_each_sample_is_used_in_one_step_whatever_happens(data, size, ranks, batch_size, depth):
    group, used, make_loader = [], [], lambda shares: Ahead(shares, depth)
    resize(group, ranks, size, batch_size, make_loader)
    for step in count():
        event = data.draw(st.sampled_from(EVENTS)) if step < 40 else "used"
        batch_size = happens(event, data.draw, group, size, batch_size, make_loader)
        epoch, left, everybody = group[0].shares.epoch, len(group[0].shares), {*range(len(group))}
        batches = [each.batch() for each in group]
        assert max(map(len, batches)) <= batch_size
        if event == "error":  # in the loops, which begin anew
            for each in group:
                each.loop = iter(())
            continue
        counted = data.draw(st.sets(st.sampled_from([*everybody]))) if event == "dropped" else everybody
        used += used_in(batches, counted)
        now = finish(group, counted)
        assert now > epoch or len(group[0].shares) == left - 1 or counted != everybody
        if now > epoch:
            assert Counter(used) == Counter(range(size))
            used = []
        if now > 1:
            return


@for_each("ranks", [1, 2, 5])
def test_the_order_of_an_epoch_depends_on_no_ranks(ranks):
    each = [[*commrt.Shares(range(30), 4, seed=4, place=lambda r=r: (r, ranks))] for r in range(ranks)]
    order = order_of(30, seed=4, epoch=0).tolist()
    assert [*chain(*chain(*zip(*each, strict=True)))] == order
    assert order != order_of(30, seed=4, epoch=1).tolist() != order_of(30, seed=5, epoch=0).tolist()


@pytest.mark.slow  # it starts many processes
@for_each("persistent", [False, True])
def test_what_workers_of_a_loader_have_read_ahead_is_not_done(persistent):
    options = {"num_workers": 2, "persistent_workers": persistent, "multiprocessing_context": "forkserver"}
    arguments = 60, 3, lambda shares: DataLoader(range(60), batch_sampler=shares, **options)
    group, used, epoch, events = [], [], 0, iter(["", "dropped", "", "other ranks", "", "resumed"])
    resize(group, 2, *arguments)
    while not epoch:
        happens(event := next(events, ""), lambda _: 3 if event == "other ranks" else 2, group, *arguments)
        counted = [0] if event == "dropped" else range(len(group))
        used += used_in([each.batch() for each in group], counted)
        epoch = finish(group, counted)
    group.clear()  # ends its workers now
    assert Counter(used) == Counter(range(60))


def trained(world, algorithm, used, progress):
    """Train for two epochs; note what was used by epoch, step and rank. A rank 3 is late twice."""
    model, data = deepcopy(MODEL), TensorDataset(torch.ones(40, 5).double(), torch.arange(40))
    optimizer, shares = sgd(model), commrt.Shares(data, 3, place=lambda: (world.rank, world.size))
    replica = commrt.attach(model, optimizer, algorithm, world=world, also=[shares])
    while shares.epoch < 2:
        for x, numbers in shares.batches(DataLoader(data, batch_sampler=shares), replica):
            key = shares.epoch, replica.step, world.rank
            if world.rank == 3 and replica.step in {1, 4}:
                progress.wait_for(replica.step + 2)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            used[key] = tuple(numbers.tolist()) if replica.last is None or replica.last.counted else ()
            progress.tell(replica.step)
            shares.done()
    return shares.state_dict()


@for_each("algorithm", [commrt.BackupWorkers(1), commrt.Torus2D(), commrt.Gossip(), commrt.LocalSGD(2)])
def test_ranks_that_train_use_each_sample_once_also_if_gradients_are_dropped(algorithm):
    backups, used, progress = getattr(algorithm, "backups", 0), {}, Progress()
    states = run_ranks(3 + backups, lambda world: trained(world, algorithm, used, progress))
    assert all(state == states[0] for state in states)
    assert (() in used.values()) is bool(backups)  # dropped
    for epoch in range(2):
        steps = {step for of, step, _ in used if of == epoch}
        parts = [[part for (*of, _), part in used.items() if of == [epoch, step] and part] for step in steps]
        assert {len(part) for part in parts} == {3}
        assert Counter(chain(*(used_in(part, range(3)) for part in parts))) == Counter(range(40))


class Reports:
    """A replica that says how its latest step went, and takes the state of another rank when it catches up."""

    stopping, drops_gradients = (), True

    def __init__(self, shares, **last):
        self.shares, self.last = shares, StepReport(0, (0,), 0.0, (), **last) if last else None

    def drain(self):
        self.shares.load_state_dict(self.shares.state_dict() | {"epoch": 5})


def refused(words, call):
    with pytest.raises(UsageError, match=words):
        call()


def one_rank(size=8):
    shares = commrt.Shares(range(size), 2, place=lambda: (0, 1))
    return shares, DataLoader(range(size), batch_sampler=shares)


def test_what_cannot_be_shared_and_batches_of_something_else_are_refused():
    for arguments in [(iter([1]), 2), ([], 2), ([1], 0), ([1], True), ([1], 1.5)]:
        refused("give a dataset with a length and samples, a batch size", lambda a=arguments: commrt.Shares(*a))
    refused(r"without a world: call commrt.init\(\) first, or pass place=", lambda: commrt.Shares([1], 1))
    refused(r"place\(\) returned \(2, 2\)", lambda: next(iter(commrt.Shares([1], 1, place=lambda: (2, 2)))))
    shares, _ = one_rank()
    next(shares.batches(Ahead(shares, 2)))  # which leaves batches that were drawn
    shares.done()
    for other in [DataLoader(range(8)), []]:
        refused("gave no batch of these Shares: make it with", lambda other=other: next(shares.batches(other)))
    refused("in_order=False", lambda: next(shares.batches(DataLoader([1], batch_sampler=shares, in_order=False))))
    refused("a state of 9 samples, and the dataset has 8", lambda: shares.load_state_dict(one_rank(9)[0].state_dict()))


def test_a_loop_that_forgets_a_call_or_goes_on_alone_is_told_so():
    shares, loader = one_rank()
    refused(r"the next batch came before shares.done\(\): call it once", lambda: list(shares.batches(loader)))
    refused(r"done\(\) without a batch", one_rank()[0].done)
    next(shares.batches(loader, replica := Reports(shares, counted=True)))
    replica.drain()  # in a forward pass
    refused(r"done\(\) without a batch of the position that is loaded", shares.done)
    next(shares.batches(loader, replica))
    replica.last = Reports(shares, counted=False, ended=True).last
    refused("the other ranks have left the loop", shares.done)
    next(shares.batches(loader, replica))
    replica.stopping = (0,)  # so all leave it, this one now
    shares.done()


def test_a_process_that_comes_late_catches_up_before_its_first_batch():
    for last in [{}, {"counted": False}]:
        shares, loader = one_rank()
        assert next(shares.batches(loader, Reports(shares, **last))).tolist() == order_of(8, 0, epoch=5)[:2].tolist()
