# SPDX-License-Identifier: Apache-2.0
"""What torch does with DistributedDataParallel besides training it: PowerSGD, a sharded optimizer, compilers."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed as dist
from c10d_trainers import loss_of, network, optimizer_of, samples
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
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
        optimizer.zero_grad()
        loss = cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return [*found, loss_of(wrapped)]


def power_sgd(**choice):
    """The losses in one bucket; over Gloo callbacks of several begin their collectives in any order."""
    model = network()
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2, **choice), powerSGD_hook)
    return losses(wrapped, optimizer_of(model))


def of_rank_1():
    return power_sgd(matrix_approximation_rank=1, min_compression_rate=1)


def of_rank_2():
    return power_sgd(matrix_approximation_rank=2, min_compression_rate=0.5)


def without_memory():
    return power_sgd(matrix_approximation_rank=1, min_compression_rate=1, use_error_feedback=False, warm_start=False)


def zero_redundancy():
    """Each rank keeps a part of the optimizer's state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415  # it warns

    wrapped = DistributedDataParallel(network(), bucket_cap_mb=SMALL_MB)
    return losses(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.02))


def uncompiled():
    return trained_by_ddp(lambda wrapped: wrapped)


def compiled_outside():
    return trained_by_ddp(torch.compile, backend="aot_eager")


def compiled_in_one_graph():
    with torch._dynamo.config.patch(optimize_ddp=False):
        return trained_by_ddp(torch.compile, backend="aot_eager")


def compiled_by_inductor():
    return trained_by_ddp(torch.compile, backend="inductor")


def trained_by_ddp(change, **choice):
    """The losses of DDP that `change` has changed. Dynamo cuts its graph where a bucket is full."""
    torch._dynamo.reset()
    model = network()
    with patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", int(SMALL_MB * 2**20)):
        wrapped = change(DistributedDataParallel(model, bucket_cap_mb=SMALL_MB), **choice)
        return losses(wrapped, optimizer_of(model))


POWER_SGD = [of_rank_1, of_rank_2, without_memory]
COMPILED = [compiled_outside, compiled_in_one_graph, compiled_by_inductor]
