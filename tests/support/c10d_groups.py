# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, works, messages and objects of torch.distributed, as each of 4 ranks uses them."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def ones():
    return torch.full((3,), float(dist.get_rank() + 1))


def total(group):
    """What the sum of `ones` over a group should be."""
    return [float(sum(rank + 1 for rank in dist.get_process_group_ranks(group)))] * 3


def summed(group=None):
    tensor = ones()
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def sums(*groups):
    """What each group adds up, and what it should."""
    return [summed(group) for group in groups], [total(group) for group in groups]


def require(kind, call):
    """Return the error of type `kind` that `call` must raise, as a text."""
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"no {kind.__name__} was raised")


def meshed():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    return sums(*mesh.get_all_groups())


def interleaved():
    """Works of three groups, begun in turns, waited for in another order on each rank: what came, what should."""
    groups = [dist.group.WORLD, *init_device_mesh("cpu", (2, 2)).get_all_groups()] * 4
    tensors = [ones() for _ in groups]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)]
    for number in torch.randperm(len(works), generator=torch.Generator().manual_seed(dist.get_rank())):
        works[number].wait()
    return [tensor.tolist() for tensor in tensors], [total(group) for group in groups]


def unsorted():
    """In a group of ranks 3, 1 and 0, in this order: the global rank of each, gathered in the group's order."""
    group = dist.new_group([3, 1, 0], sort_ranks=False)
    if dist.get_rank() == 2:
        return group is dist.GroupMember.NON_GROUP_MEMBER
    outputs = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(outputs, torch.tensor([dist.get_rank()]), group=group)
    dist.destroy_process_group(group)  # torch names groups by how many a rank has
    return torch.cat(outputs).tolist()


def of_some():
    """In two groups that only their own ranks make."""
    ranks = [0, 2] if dist.get_rank() % 2 == 0 else [1, 3]
    return sums(dist.new_group(ranks, use_local_synchronization=True))


def of_two_devices():
    """In a group whose devices each have a backend."""
    return sums(dist.new_group(backend="cpu:commrt,cuda:commrt"))


def alone():
    return sums(dist.new_group([dist.get_rank()], use_local_synchronization=True))


def after_a_group():
    """After the end of a group: what it says then, and what another of the same ranks and the world add up."""
    group = dist.new_group(range(4))
    summed(group)
    dist.destroy_process_group(group)
    dist.barrier()
    return require(Exception, lambda: summed(group)), summed(dist.new_group(range(4))), summed()


def after_the_world():
    """The end of the world, then another in the same process: what that adds up, and a new group in it."""
    dist.destroy_process_group()
    dist.init_process_group("commrt", timeout=timedelta(seconds=60))
    return summed(), summed(dist.new_group([0, 1, 2, 3]))


# Works ----------------------------------------------------------------------------------------------------------------


def store():
    return dist.distributed_c10d._get_default_store()


def late():
    """Begun when rank 0 has seen that the others are late: what it saw, and what came in the end."""
    if dist.get_rank() > 0:
        store().wait(["seen"])
        return summed()
    tensor = ones()
    work = dist.all_reduce(tensor, async_op=True)
    before = work.is_completed()
    said = require(dist.DistBackendError, lambda: work.wait(timedelta(milliseconds=50)))
    store().set("seen", "")
    work.wait(timedelta(seconds=30))
    return before, said, work.is_completed(), work.is_success(), tensor.tolist()


def result():
    """What a work says its result is, and whether that is the caller's tensor."""
    tensor = ones()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    (one,) = work.result()
    return one.tolist(), one.data_ptr() == tensor.data_ptr()


def futures():
    """What callbacks of three works make of their results, together."""
    works = [dist.all_reduce(ones(), async_op=True) for _ in range(3)]
    then = [work.get_future().then(lambda future: float(future.value()[0].sum())) for work in works]
    return torch.futures.wait_all(then)


# Objects and messages -------------------------------------------------------------------------------------------------


def thing(rank):
    return {"rank": rank, "text": "x" * 100 * rank}


def all_gather_object():
    things = [None] * 4
    dist.all_gather_object(things, thing(dist.get_rank()))
    return things


def gather_object():
    things = [None] * 4 if dist.get_rank() == 2 else None
    dist.gather_object(thing(dist.get_rank()), things, dst=2)
    return things


def broadcast_object_list():
    things = [thing(1), thing(3)] if dist.get_rank() == 1 else [None, None]
    dist.broadcast_object_list(things, src=1)
    return things


def scatter_object_list():
    things, received = [thing(rank) for rank in range(4)], [None]
    dist.scatter_object_list(received, things if dist.get_rank() == 3 else None, src=3)
    return received[0]


def send_object_list():
    """From each even rank to the next one."""
    rank, things = dist.get_rank(), [None]
    if rank % 2 == 0:
        dist.send_object_list([thing(rank)], rank + 1)
        return thing(rank)
    dist.recv_object_list(things, rank - 1)
    return things[0]


def tags():
    """What arrives at rank 1, by tag, received in another order than rank 0 sent; nothing elsewhere."""
    rank = dist.get_rank()
    if rank == 0:
        for work in [dist.isend(torch.tensor([tag]), 1, tag=tag) for tag in range(4)]:
            work.wait()
    if rank != 1:
        return {}
    received = {tag: torch.zeros(1, dtype=torch.int64) for tag in (2, 0, 3, 1)}
    for tag, tensor in received.items():
        dist.recv(tensor, 0, tag=tag)
    return {tag: int(tensor) for tag, tensor in received.items()}


def around():
    """What each rank gets of the rank before, all at once."""
    rank, before = dist.get_rank(), torch.zeros(3)
    ops = [dist.P2POp(dist.isend, ones(), (rank + 1) % 4), dist.P2POp(dist.irecv, before, (rank - 1) % 4)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return before.tolist()


def from_any():
    """At rank 0: the others, each with what it sent."""
    if dist.get_rank() > 0:
        dist.send(ones(), 0)
        return {}
    received = torch.zeros(3)
    return {dist.recv(received): received.tolist() for _ in range(3)}


def monitored_barrier():
    """What torch's function says, while the group's own method passes."""
    dist.group.WORLD.monitored_barrier(timedelta(seconds=30))
    return require(ValueError, dist.monitored_barrier)
