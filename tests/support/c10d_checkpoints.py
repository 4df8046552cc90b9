# SPDX-License-Identifier: Apache-2.0
"""A sharded model that is saved, forgotten and loaded in several ways of torch's, with two backends.

Each way takes a folder. It trains, saves, loads into a model of other weights, and returns the losses from there on.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import wraps

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from c10d_trainers import samples
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.api import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
)
from torch.nn.functional import cross_entropy

BEFORE, AFTER = 4, 3
"""Steps until the model is saved, and from there on."""
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def in_a_folder(way):
    """Run `way` in a folder of all ranks."""

    @wraps(way)
    def run():
        name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(name)
        try:
            return way(name[0])
        finally:
            dist.barrier()
            shutil.rmtree(name[0], ignore_errors=True)

    return run


class Run:
    """A model and an optimizer of these ranks; another seed, other weights."""

    def __init__(self, seed, shard):
        torch.manual_seed(seed)
        layers = torch.nn.Linear(6, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3)
        self.model = shard(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def losses(self, first, steps):
        """Train `steps` steps, from the number `first` on."""
        return [self._step(number) for number in range(first, first + steps)]

    def _step(self, number):
        x, y = (part.chunk(8)[(number + dist.get_rank()) % 8] for part in samples().tensors)
        loss = cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss)

    def state(self, options=None):
        """What DCP saves of this."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def take(self, state):
        """Go on from `state`."""
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)


def sharded(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), device_mesh=mesh, use_orig_params=True)


def fsdp1_without_a_mesh(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def _resumed(shard, hand_over):
    """The losses of a run, and of another one to which its state is handed over."""
    first, second = Run(0, shard), Run(1, shard)
    before = first.losses(0, BEFORE)
    hand_over(first, second)
    return before + second.losses(BEFORE, AFTER)


def _saved(folder, shard):
    """`_resumed`, by `dcp.save` and `dcp.load`."""

    def hand_over(first, second):
        dcp.save(first.state(), checkpoint_id=folder)
        state = second.state()
        dcp.load(state, checkpoint_id=folder)
        second.take(state)

    return _resumed(shard, hand_over)


@in_a_folder
def shards(folder):
    return _saved(folder, sharded)


@in_a_folder
def shards_of_fsdp1(folder):
    return _saved(folder, fsdp1)


@in_a_folder
def meanwhile(folder):
    """The ranks train on while a group of its own saves."""
    group, more = dist.new_group(), []

    def hand_over(first, second):
        in_flight = dcp.async_save(first.state(), checkpoint_id=folder, process_group=group)
        more.extend(first.losses(BEFORE, AFTER))
        getattr(in_flight, "upload_completion", in_flight).result()
        state = second.state()
        dcp.load(state, checkpoint_id=folder, process_group=group)
        second.take(state)

    return _resumed(sharded, hand_over) + more


@in_a_folder
def broadcast_from_rank_0(folder):
    """Rank 0 has the whole state; the others ask for it."""

    def hand_over(first, second):
        state = first.state(FULL)
        model, optimizer = (state["model"], state["optimizer"]) if dist.get_rank() == 0 else ({}, {})
        set_model_state_dict(second.model, model, options=FROM_RANK_0)
        set_optimizer_state_dict(second.model, second.optimizer, optimizer, options=FROM_RANK_0)

    return _resumed(sharded, hand_over)


def shards_of_fsdp1_without_a_mesh():
    def of(model):  # torch writes to the options
        options = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        return FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *options)

    def hand_over(first, second):
        with of(first.model):
            weights = first.model.state_dict()
            moments = FullyShardedDataParallel.optim_state_dict(first.model, first.optimizer)
        with of(second.model):
            second.model.load_state_dict(weights)
            loaded = FullyShardedDataParallel.optim_state_dict_to_load(second.model, second.optimizer, moments)
            second.optimizer.load_state_dict(loaded)

    return _resumed(fsdp1_without_a_mesh, hand_over)


WAYS = [shards, shards_of_fsdp1, shards_of_fsdp1_without_a_mesh, meanwhile, broadcast_from_rank_0]
