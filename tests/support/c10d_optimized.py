# SPDX-License-Identifier: Apache-2.0
"""What torch does with DistributedDataParallel besides training it: its own hooks, and a sharded optimizer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from c10d_trainers import loss_of, network, optimizer_of, samples
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STEPS = 12
SMALL_MB = 0.0003
"""A bucket for each layer."""


def losses(wrapped, optimizer):
    """Of each step on this rank's part of the samples, and of the trained model on all samples."""
    found = []
    for step in range(STEPS):
        x, y = (part.chunk(8)[(step + dist.get_rank()) % 8] for part in samples().tensors)
        wrapped.zero_grad()
        loss = cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return [*found, loss_of(wrapped)]


def hooked(hook, state, optimizer=None):
    """The losses of a model whose gradients travel by `hook`."""
    wrapped = DistributedDataParallel(network(), bucket_cap_mb=SMALL_MB)
    wrapped.register_comm_hook(state, hook)
    return losses(wrapped, optimizer or optimizer_of(wrapped))


def power_sgd():
    def hook(state, bucket):
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        if dist.get_backend() == "gloo":  # where callbacks of two buckets disturb each other
            future.wait()
        return future

    rates = {"matrix_approximation_rank": 1, "min_compression_rate": 1}
    return hooked(hook, powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, **rates))


def half_precision():
    return hooked(default_hooks.fp16_compress_hook, None)


def post_local_sgd():
    state = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=2)
    return hooked(post_localSGD_hook.post_localSGD_hook, state)


def optimizer_in_the_hook():
    from torch.distributed.optim.functional_sgd import _FunctionalSGD  # noqa: PLC0415  # it warns

    state = _OptimizerHookState(_FunctionalSGD([], lr=0.1, _allow_empty_param_list=True))
    idle = torch.optim.SGD([torch.zeros(1)])
    return hooked(_hook_then_optimizer(default_hooks.allreduce_hook, state), None, idle)


def zero_redundancy():
    """Each rank keeps a part of the optimizer's state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415  # it warns

    wrapped = DistributedDataParallel(network(), bucket_cap_mb=SMALL_MB)
    return losses(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.02))


WAYS = [power_sgd, post_local_sgd, optimizer_in_the_hook, zero_redundancy]
