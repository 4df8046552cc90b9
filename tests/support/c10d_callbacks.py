# SPDX-License-Identifier: Apache-2.0
"""What callbacks of futures do on each rank of torch.distributed, over any backend: by hand, and in DDP's own hooks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.nn.parallel import DistributedDataParallel

STEPS = 5
BUCKET_MB = 0.004
"""So that each layer has a bucket of its own."""


def own():
    return torch.arange(4.0) + dist.get_rank()


def after_a_sum(more):
    future = dist.all_reduce(own(), async_op=True).get_future().then(lambda future: more(future.value()[0]))
    return future.wait().tolist()


def summed(tensor):
    dist.all_reduce(tensor)
    return tensor


def waits_for_a_work():
    def more(tensor):
        dist.all_reduce(tensor, async_op=True).wait()
        return tensor

    return [after_a_sum(summed), after_a_sum(more)]


def waits_for_a_future():
    return after_a_sum(lambda tensor: dist.all_reduce(tensor, async_op=True).get_future().wait()[0])


def makes_other_collectives():
    def more(tensor):
        dist.barrier()
        dist.broadcast(tensor, 1)
        rows = [torch.empty(4) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, tensor + dist.get_rank())
        return torch.stack(rows)

    return after_a_sum(more)


def sends_and_receives():
    def more(tensor):
        rank, size, received = dist.get_rank(), dist.get_world_size(), torch.empty(4)
        sending = dist.isend(tensor + rank, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        sending.wait()
        return received

    return after_a_sum(more)


def uses_another_group():
    group = dist.new_group()

    def more(tensor):
        dist.all_reduce(tensor, group=group)
        return tensor

    return after_a_sum(more)


def nests_deeper():
    def more(tensor):
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda one: summed(one.value()[0])).wait()

    return after_a_sum(more)


def takes_turns():
    """Callbacks begin collectives between those of the loop."""
    works = (dist.all_reduce(own() + n, async_op=True) for n in range(10))
    futures = [work.get_future().then(lambda one: summed(one.value()[0])) for work in works]
    return [future.wait().tolist() for future in futures]


def trained(hook, state, *, buckets=1, optimizes=True):
    """Losses of a model whose gradients travel by `hook`."""
    torch.manual_seed(0)
    layers = (
        torch.nn.Linear(24, 40),
        torch.nn.Tanh(),
        torch.nn.Linear(40, 30),
        torch.nn.Tanh(),
        torch.nn.Linear(30, 8),
    )
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=25 if buckets == 1 else BUCKET_MB)
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = (model(torch.randn(6, 24)) - 1).square().mean()
        loss.backward()
        if optimizes:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def power_sgd_state():
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


def power_sgd():
    return trained(powerSGD_hook.powerSGD_hook, power_sgd_state())


def power_sgd_in_buckets():
    def hook(state, bucket):
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        if dist.get_backend() == "gloo":  # where callbacks of two buckets disturb each other
            future.wait()
        return future

    return trained(hook, power_sgd_state(), buckets=3)


def compressed():
    return trained(default_hooks.fp16_compress_hook, None, buckets=3)


def compressed_power_sgd():
    return trained(default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), power_sgd_state())


def post_local_sgd():
    state = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=2)
    return trained(post_localSGD_hook.post_localSGD_hook, state, buckets=3)


def optimizer_in_the_hook():
    from torch.distributed.optim.functional_sgd import _FunctionalSGD  # noqa: PLC0415  # it warns

    state = _OptimizerHookState(_FunctionalSGD([], lr=0.1, _allow_empty_param_list=True))
    return trained(_hook_then_optimizer(default_hooks.allreduce_hook, state), None, optimizes=False)


HOOKS = [
    power_sgd,
    compressed,
    compressed_power_sgd,
    post_local_sgd,
    optimizer_in_the_hook,
    power_sgd_in_buckets,
]
