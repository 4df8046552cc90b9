# SPDX-License-Identifier: Apache-2.0
"""What detach(), dropping, copying and failed attaching leave behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from threading import Event
from types import SimpleNamespace

import averaging_ranks
import pytest
import torch
from cases import for_each, on_ranks
from small_models import backward, data, gradients, local_gradients, net, sgd, trainee
from torch import nn
from torch.nn.functional import cross_entropy

import commrt
from commrt.algorithms import ring
from commrt.elastic.elastic_membership import make_elastic
from commrt.errors import TransportClosed, TransportError
from commrt.testing.faults import fail_at, with_faults
from commrt.testing.processes import run_processes
from commrt.testing.ranks import local_worlds, run_ranks


def test_detach_gives_back_a_plain_model_that_can_be_attached_again():
    def body(world):
        model, _, replica = trainee(world)
        replica.detach()
        replica.detach()
        backward(model, world.rank)
        plain = gradients(model)
        model.zero_grad()
        commrt.attach(model, sgd(model), world=world)
        backward(model, world.rank)
        return plain, gradients(model)

    results = run_ranks(2, body)
    for rank, (plain, averaged) in enumerate(results):
        assert all(map(torch.equal, plain, local_gradients(net(), rank)))
        assert all(map(torch.equal, averaged, results[0][1]))


def test_a_detach_in_the_middle_of_a_step_leaves_alone_what_is_on_its_way():
    def body(world):
        model = net()
        replica = commrt.attach(model, world=world, bucket_cap_mb=1e-9)
        detached = Event()
        world.comm_thread.submit(lambda: detached.wait(10))
        model[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(model, world.rank)
        replica.detach()
        detached.set()
        world.run(ring.all_reduce(2), torch.ones(2))  # all that was submitted before has run
        return gradients(model[2])

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first, second))


@on_ranks(2)
def test_backward_after_the_world_was_closed_says_so(world):
    model, _, _ = trainee(world)
    world.close()
    with pytest.raises(TransportClosed, match=r"the world was closed, .* call init\(\)"):
        backward(model, world.rank)


def test_an_attach_that_failed_leaves_a_plain_model():
    def body(world):
        model = net()
        with pytest.raises(TransportError):
            commrt.attach(model, sgd(model), world=world)
        backward(model, world.rank)
        return gradients(model)

    for rank, found in enumerate(run_ranks(2, body, wrap=with_faults(fail_at(bucket="state")))):
        assert all(map(torch.equal, found, local_gradients(net(), rank)))


@for_each("keep", [True, False], ids=["replica kept", "replica dropped"])
def test_a_model_that_is_dropped_is_freed_without_detach(keep):
    def body(world):
        model = net()
        replica = commrt.attach(model, world=world)
        backward(model, world.rank)
        return weakref.ref(model), weakref.ref(replica), replica if keep else None

    with local_worlds(1)[0] as world:
        model, replica, kept = body(world)
        gc.collect()
        assert (model() is not None) == keep
        del kept
        gc.collect()
        assert model() is None
        assert replica() is None


def test_hooks_live_as_long_as_any_part_of_the_model():
    def body(world):
        parts = [nn.Linear(6, 8), nn.Linear(8, 3)]
        commrt.attach(nn.ModuleList(parts), world=world)
        gc.collect()
        x, y = data(world.rank)
        cross_entropy(parts[1](parts[0](x)), y).backward()
        return [param.grad for part in parts for param in part.parameters()]

    assert all(map(torch.equal, *run_ranks(2, body)))


def test_copies_and_pickles_of_an_attached_model_are_plain():
    def body(world):
        model = net()
        commrt.attach(model, world=world)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]  # noqa: S301  # its own
        for other in copies:
            backward(other, world.rank)
        return [gradients(other) for other in copies]

    for rank, found in enumerate(run_ranks(2, body)):
        for own in found:
            assert all(map(torch.equal, own, local_gradients(net(), rank)))


def test_detaching_frees_the_buckets_without_the_garbage_collector():
    def body(world):
        gc.collect()
        gc.disable()
        try:
            model = net()
            replica = commrt.attach(model, world=world)
            backward(model, 0)
            wires = [weakref.ref(bucket.wire) for bucket in replica.buckets]
            replica.detach()
            world.wait()  # they are freed behind what is in flight
            return [wire() is None for wire in wires]
        finally:
            gc.enable()

    assert run_ranks(1, body) == [[True]]


@pytest.mark.processes
@pytest.mark.parametrize("algorithm", [commrt.Gossip(), commrt.BackupWorkers()], ids=repr)
def test_a_rank_that_holds_the_store_stays_until_all_have_detached(algorithm, tmp_path):
    outcomes = run_processes(3, averaging_ranks.detached_first, algorithm, tmp_path / "what rank 0 does")
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, "stays")] * 3


def test_a_ctrl_c_while_a_membership_ends_loses_nothing():
    (world,) = local_worlds(1)
    done, interrupts = [], [KeyboardInterrupt()]

    def depart(why, *, finished):
        if interrupts:
            raise interrupts.pop()
        done.append((why, finished))

    elastic = make_elastic(world)
    elastic.on_store = SimpleNamespace(
        generation=elastic.generation,
        depart=depart,
        close=lambda: done.append("closed"),
        has_begun=False,
        store=SimpleNamespace(),
    )
    with pytest.raises(KeyboardInterrupt):
        world.close()
    world.close()
    assert done[:2] == [("it closed its world", True), "closed"]


def test_after_a_gossiping_model_was_detached_a_call_returns_at_once_again():
    def body(world):
        commrt.attach(net(), algorithm=commrt.Gossip(), world=world).detach()
        gate = Event()
        world.comm_thread.submit(gate.wait)
        work = world.all_reduce(torch.ones(2), "sum", async_op=True)
        was_done = work.is_completed()
        gate.set()
        work.wait()
        return was_done

    assert run_ranks(2, body) == [False, False]
