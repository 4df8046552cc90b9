# SPDX-License-Identifier: Apache-2.0
"""Losses of one small model on any backend: with DDP's own hooks, a sharded optimizer, compiled, and saved by torch.

A way that saves trains, saves, loads into a model of other weights, and returns the losses from there on too.
"""

import os
import shutil
import tempfile
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from c10d_trainers import network, samples
from small_models import sgd
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import commrt

BEFORE, AFTER = 8, 4
"""Steps until the model is saved, and from there on."""
SMALL_MB = 0.0003
"""A bucket for each layer."""
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def losses(model, optimizer, steps=range(BEFORE + AFTER)):
    """Of each step on this rank's part of the samples."""
    found = []
    for step in steps:
        x, y = (part.chunk(8)[(step + dist.get_rank()) % 8] for part in samples().tensors)
        model.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return found


def hooked(hook, state):
    """The losses of a model whose gradients travel by `hook`."""
    model = DistributedDataParallel(network(), bucket_cap_mb=SMALL_MB)
    model.register_comm_hook(state, hook)
    return losses(model, sgd(model))


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


def zero_redundancy():
    """Each rank keeps a part of the optimizer's state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415  # it warns

    model = DistributedDataParallel(network(), bucket_cap_mb=SMALL_MB)
    return losses(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.02))


@contextmanager
def folder_of_all_ranks():
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    yield name[0]
    dist.barrier()
    shutil.rmtree(name[0], ignore_errors=True)


class Run:
    """A model in shards, and its optimizer; another seed, other weights."""

    def __init__(self, shard, seed):
        torch.manual_seed(seed)
        layers = torch.nn.Linear(6, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3)
        self.model = shard(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def losses(self, *steps):
        return losses(self.model, self.optimizer, range(*steps))

    def state(self, options=None):
        """What DCP saves of this."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def take(self, state):
        """Go on from `state`."""
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)


def fsdp2(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), device_mesh=mesh, use_orig_params=True)


def resumed(shard, hand_over):
    """The losses of a run, and of another one to which its state is handed over."""
    first, second = Run(shard, 0), Run(shard, 1)
    before = first.losses(BEFORE)
    hand_over(first, second)
    return before + second.losses(BEFORE, BEFORE + AFTER)


def saved(shard):
    def hand_over(first, second):
        with folder_of_all_ranks() as folder:
            dcp.save(first.state(), checkpoint_id=folder)
            state = second.state()
            dcp.load(state, checkpoint_id=folder)
            second.take(state)

    return resumed(shard, hand_over)


def saved_shards():
    return saved(fsdp2)


def saved_shards_of_fsdp1():
    return saved(fsdp1)


def saved_meanwhile():
    """The ranks train on while a group of its own saves."""

    def hand_over(first, second):
        group = dist.new_group()
        with folder_of_all_ranks() as folder:
            in_flight = dcp.async_save(first.state(), checkpoint_id=folder, process_group=group)
            first.losses(BEFORE, BEFORE + AFTER)
            getattr(in_flight, "upload_completion", in_flight).result()
            state = second.state()
            dcp.load(state, checkpoint_id=folder, process_group=group)
            second.take(state)

    return resumed(fsdp2, hand_over)


def broadcast_from_rank_0():
    """Rank 0 has the whole state; the others ask for it."""

    def hand_over(first, second):
        state = first.state(FULL)
        model, optimizer = (state["model"], state["optimizer"]) if dist.get_rank() == 0 else ({}, {})
        set_model_state_dict(second.model, model, options=FROM_RANK_0)
        set_optimizer_state_dict(second.model, second.optimizer, optimizer, options=FROM_RANK_0)

    return resumed(fsdp2, hand_over)


def compiled(thing):
    torch._dynamo.reset()  # or what was compiled for another model serves this one
    return torch.compile(thing, backend=os.environ["COMPILER"])


def compiled_ddp():
    with patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", int(SMALL_MB * 2**20)):  # or torch's compiler refuses it
        model = compiled(DistributedDataParallel(network(), bucket_cap_mb=SMALL_MB))
        return losses(model, sgd(model))


def compiled_inside_ddp():
    model = DistributedDataParallel(compiled(network()))
    return losses(model, sgd(model))


def compiled_ddp_with_a_hook():
    model = DistributedDataParallel(network())
    state = commrt.DDPState(commrt.Ring())
    model.register_comm_hook(state, commrt.ddp_hook)
    found = losses(compiled(model), sgd(model))
    commrt.init().close()
    return found


def compiled_fsdp():
    model = fsdp2(network())
    return losses(compiled(model), sgd(model))


def compiled_with_a_world():
    world = commrt.init()

    @compiled
    def both(x):
        y = x * 2
        world.all_reduce(y, "sum")
        return y + 1

    found = [*both(torch.arange(4.0)).tolist(), *both(torch.ones(4)).tolist()]
    world.close()
    return found


ON_ANY = [power_sgd, post_local_sgd, zero_redundancy, saved_shards]
ON_TWO = [saved_shards_of_fsdp1, saved_meanwhile, broadcast_from_rank_0, half_precision]
"""On two ranks alone: of more, the sums of half precision depend on their order, and the others show nothing else."""
COMPILED = {
    "aot_eager": [compiled_ddp, compiled_inside_ddp, compiled_ddp_with_a_hook, compiled_fsdp, compiled_with_a_world],
    "inductor": [compiled_ddp],
}
"""By compiler."""
