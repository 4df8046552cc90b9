# SPDX-License-Identifier: Apache-2.0
"""What detach(), dropping, copying and failed attaching leave behind."""

import copy
import gc
import pickle
import weakref
from threading import Event

import pytest
import torch
from cases import for_each, on_ranks
from small_models import backward, data, gradients, local_gradients, mean_gradients, net, sgd, train, trainee
from torch import nn
from torch.nn.functional import cross_entropy
from training_ranks import detached_first

import commrt
from commrt.algorithms import ring
from commrt.errors import TransportClosed, TransportError
from commrt.testing.faults import fail_at, with_faults
from commrt.testing.processes import run_processes
from commrt.testing.ranks import local_worlds

WAYS = [commrt.Torus2D(), commrt.Gossip(), commrt.LocalSGD(3, 2), commrt.BackupWorkers(0)]


def require_plain(model, rank):
    """Fail unless a backward pass makes this rank's own gradients."""
    model.zero_grad()
    backward(model, rank)
    assert all(map(torch.equal, gradients(model), local_gradients(net(), rank)))


@for_each("algorithm", WAYS)
@on_ranks(2)
def test_detach_gives_back_a_plain_model_that_can_be_attached_again(world, algorithm):
    model, optimizer, replica = trainee(world, algorithm=algorithm)
    replica.detach()
    replica.detach()
    require_plain(model, world.rank)
    again = commrt.attach(model, optimizer, algorithm, world=world)
    train(model, optimizer, world.rank, steps=4)
    again.detach()  # an exchange may be in flight
    train(model, optimizer, world.rank, steps=3)  # alone
    last = commrt.attach(model, optimizer, algorithm, world=world)
    train(model, optimizer, world.rank, steps=4)
    last.consolidate()
    assert (again.step, last.step, last.replicas_equal()) == (4, 4, True)


@for_each("algorithm", WAYS)
@on_ranks(2)
def test_what_a_model_left_on_the_store_goes_when_the_next_one_is_attached(world, algorithm):
    left = []
    for _ in range(3):
        model, optimizer, replica = trainee(world, algorithm=algorithm)
        train(model, optimizer, world.rank, steps=2)
        replica.consolidate()
        replica.detach()
        world.agree("the end of detach()")
        left.append(len(world.store.list_keys()))
        world.agree("the end of the count")
    assert left[1] == left[2]


@on_ranks(2)
def test_a_detach_in_the_middle_of_a_step_leaves_alone_what_is_on_its_way(world):
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
    assert all(map(torch.equal, gradients(model[2]), mean_gradients(range(2))[2:]))


@on_ranks(2)
def test_backward_after_the_world_was_closed_says_so(world):
    model, _, _ = trainee(world)
    world.close()
    with pytest.raises(TransportClosed, match=r"the world was closed, .* open a new world"):
        backward(model, world.rank)


@on_ranks(2, wrap=with_faults(fail_at(bucket="state")))
def test_an_attach_that_failed_leaves_a_plain_model(world):
    model = net()
    with pytest.raises(TransportError):
        commrt.attach(model, sgd(model), world=world)
    require_plain(model, world.rank)


@for_each("algorithm", WAYS)
@on_ranks(2)
def test_copies_and_pickles_of_an_attached_model_are_plain(world, algorithm):
    model, _, replica = trainee(world, algorithm=algorithm)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  # its own
        require_plain(other, world.rank)
        train(other, sgd(other), world.rank, steps=2)
    assert replica.step == 0


@for_each("keep", [True, False], ids=["replica kept", "replica dropped"])
def test_a_model_that_is_dropped_is_freed_without_detach(keep):
    def trained(world):
        model = net()
        replica = commrt.attach(model, world=world)
        backward(model, world.rank)
        return weakref.ref(model), weakref.ref(replica), replica if keep else None

    with local_worlds(1)[0] as world:
        model, replica, kept = trained(world)
        gc.collect()
        assert (model() is not None) == keep
        del kept
        gc.collect()
        assert model() is None
        assert replica() is None


@on_ranks(2)
def test_hooks_live_as_long_as_any_part_of_the_model(world):
    parts = list(net())
    commrt.attach(nn.ModuleList(parts), world=world)
    gc.collect()
    x, y = data(world.rank)
    cross_entropy(parts[2](parts[1](parts[0](x))), y).backward()
    assert all(map(torch.equal, gradients(nn.Sequential(*parts)), mean_gradients(range(2))))


@on_ranks(1)
def test_detaching_frees_the_buckets(world):
    _, _, replica = trainee(world)
    wire = weakref.ref(replica.buckets[0].wire)
    replica.detach()
    world.wait()  # they are freed behind what is in flight
    assert wire() is None


@pytest.mark.processes
@pytest.mark.parametrize("algorithm", [commrt.Gossip(), commrt.BackupWorkers()], ids=repr)
def test_a_rank_that_holds_the_store_stays_until_all_have_detached(algorithm, tmp_path):
    outcomes = run_processes(3, detached_first, algorithm, tmp_path / "rank 0 has detached")
    assert [outcome.error for outcome in outcomes] == [None] * 3
