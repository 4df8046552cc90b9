# SPDX-License-Identifier: Apache-2.0
"""Collectives in callbacks of futures, on each rank of torch.distributed: what came, what should."""

from __future__ import annotations

import torch
import torch.distributed as dist


def own():
    return torch.arange(4.0) + dist.get_rank()


def total(added=0.0):
    """The sum of what all ranks have."""
    size = dist.get_world_size()
    return torch.arange(4.0) * size + sum(range(size)) + added * size


def after_a_sum(more):
    """What `more` makes of a sum, in a callback."""
    future = dist.all_reduce(own(), async_op=True).get_future().then(lambda future: more(future.value()[0]))
    return future.wait().tolist()


def summed(tensor, group=None):
    dist.all_reduce(tensor, group=group)
    return tensor


def twice_summed():
    return (total() * dist.get_world_size()).tolist()


def a_callback_waits_for_a_work():
    def more(tensor):
        dist.all_reduce(tensor, async_op=True).wait()
        return tensor

    return after_a_sum(more), twice_summed()


def a_callback_waits_for_a_future():
    found = after_a_sum(lambda tensor: dist.all_reduce(tensor, async_op=True).get_future().wait()[0])
    return found, twice_summed()


def a_callback_uses_another_group():
    group = dist.new_group()
    return after_a_sum(lambda tensor: summed(tensor, group)), twice_summed()


def a_callback_makes_other_collectives():
    def more(tensor):
        dist.barrier()
        dist.broadcast(tensor, 1)
        rows = [torch.empty(4) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, tensor + dist.get_rank())
        return torch.stack(rows)

    return after_a_sum(more), [(total() + rank).tolist() for rank in range(dist.get_world_size())]


def a_callback_sends_and_receives():
    rank, size = dist.get_rank(), dist.get_world_size()

    def more(tensor):
        received = torch.empty(4)
        sending = dist.isend(tensor + rank, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        sending.wait()
        return received

    return after_a_sum(more), (total() + (rank - 1) % size).tolist()


def a_callback_of_a_callback_makes_a_collective():
    def more(tensor):
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda one: summed(one.value()[0])).wait()

    return after_a_sum(more), (total() * dist.get_world_size() ** 2).tolist()


def callbacks_begin_collectives_between_those_of_a_loop():
    works = (dist.all_reduce(own() + n, async_op=True) for n in range(10))
    futures = [work.get_future().then(lambda one: summed(one.value()[0])) for work in works]
    expected = [(total(n) * dist.get_world_size()).tolist() for n in range(10)]
    return [future.wait().tolist() for future in futures], expected


BODIES = [
    a_callback_waits_for_a_work,
    a_callback_waits_for_a_future,
    a_callback_uses_another_group,
    a_callback_makes_other_collectives,
    a_callback_sends_and_receives,
    a_callback_of_a_callback_makes_a_collective,
    callbacks_begin_collectives_between_those_of_a_loop,
]
