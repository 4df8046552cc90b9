# SPDX-License-Identifier: Apache-2.0
"""A sharded model that is saved, forgotten and loaded in every way of torch's, with two backends.

Each way takes a folder. It trains, saves, loads into a model of other weights, and returns the losses from there on.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import wraps
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from c10d_trainers import samples
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.api import FullOptimStateDictConfig, ShardedOptimStateDictConfig, ShardedStateDictConfig
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BEFORE, AFTER = 4, 3
"""Steps until the model is saved, and from there on."""
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
EVERYWHERE = StateDictOptions(full_state_dict=True)
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

    def __init__(self, seed, shard=None):
        torch.manual_seed(seed)
        layers = torch.nn.Linear(6, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3)
        self.model = (shard or sharded)(torch.nn.Sequential(*layers))
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

    def take(self, state, options=None):
        """Go on from `state`."""
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts, options=options)


def sharded(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hybrid(model):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def _resumed(save, load, options=None, shard=None):
    """The losses of a run that is saved, and of another one that takes its state."""
    first, second = Run(0, shard), Run(1, shard)
    before = first.losses(0, BEFORE)
    save(first.state(options))
    state = second.state(options)
    load(state)
    second.take(state, options)
    return before + second.losses(BEFORE, AFTER)


def _saved(folder, options=None, shard=None, reader=None, writer=None, **saving):
    """`_resumed`, by `dcp.save` and `dcp.load`."""

    def save(state):
        dcp.save(state, checkpoint_id=folder, storage_writer=writer, **saving)

    def load(state):
        dcp.load(state, checkpoint_id=folder, storage_reader=reader)

    return _resumed(save, load, options, shard)


def _saved_meanwhile(folder, **saving):
    """`_resumed`, where the ranks train on while a group of its own saves."""
    group = dist.new_group()
    first = Run(0)
    losses = first.losses(0, BEFORE)
    in_flight = dcp.async_save(first.state(), checkpoint_id=folder, process_group=group, **saving)
    losses += first.losses(BEFORE, AFTER)
    getattr(in_flight, "upload_completion", in_flight).result()
    second = Run(1)
    state = second.state()
    dcp.load(state, checkpoint_id=folder, process_group=group)
    second.take(state)
    return losses + second.losses(BEFORE, AFTER)


@in_a_folder
def plain(folder):
    return _saved(folder)


@in_a_folder
def flattened(folder):
    return _saved(folder, StateDictOptions(flatten_optimizer_state_dict=True))


@in_a_folder
def offloaded(folder):
    return _saved(folder, StateDictOptions(cpu_offload=True))


@in_a_folder
def hybrid_shards(folder):
    return _saved(folder, shard=hybrid)


@in_a_folder
def other_planners(folder):
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True, flatten_sharded_tensors=False)
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=False, thread_count=2)
    return _saved(folder, planner=planner, writer=writer, reader=dcp.FileSystemReader(folder))


@in_a_folder
def cached_plans(folder):
    return _saved(folder, planner=DefaultSavePlanner(enable_plan_caching=True))


@in_a_folder
def partly(folder):
    """A model that lacks a part of what is loaded takes the rest."""
    first, second = Run(0), Run(1)
    before = first.losses(0, BEFORE)
    dcp.save({"model": first.state()["model"]}, checkpoint_id=folder)
    state = second.state()
    dcp.load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    second.take(state)
    return before + second.losses(BEFORE, AFTER)


@in_a_folder
def broadcast_from_rank_0(folder):
    """Rank 0 has the whole state; the others ask for it."""
    first, second = Run(0), Run(1)
    before = first.losses(0, BEFORE)
    state = first.state(FULL)
    model, optimizer = (state["model"], state["optimizer"]) if dist.get_rank() == 0 else ({}, {})
    set_model_state_dict(second.model, model, options=FROM_RANK_0)
    set_optimizer_state_dict(second.model, second.optimizer, optimizer, options=FROM_RANK_0)
    return before + second.losses(BEFORE, AFTER)


@in_a_folder
def onto_meta(folder):
    """A model without memory takes the weights of rank 0."""
    first = Run(0)
    before = first.losses(0, BEFORE)
    state = first.state(FULL)
    with torch.device("meta"):
        second = Run(1)
    set_model_state_dict(second.model, state["model"], options=FROM_RANK_0)
    second.optimizer = torch.optim.AdamW(second.model.parameters(), lr=0.05)
    return before + second.losses(BEFORE, AFTER)


@in_a_folder
def through_torch_save(folder):
    """A checkpoint becomes a file of `torch.save`, which rank 0 reads for all; torch's reader takes plain tensors."""
    file = Path(folder) / "whole.pt"

    def save(state):
        dcp.save(state["model"], checkpoint_id=folder)
        if dist.get_rank() == 0:
            format_utils.dcp_to_torch_save(folder, file)
        dist.barrier()

    def load(state):
        reader, planner = format_utils.BroadcastingTorchSaveReader(), format_utils.DynamicMetaLoadPlanner()
        dcp.load(state["model"], checkpoint_id=file, storage_reader=reader, planner=planner)

    return _resumed(save, load, shard=DistributedDataParallel)


@in_a_folder
def over_a_group_of_its_own(folder):
    return _saved(folder, process_group=dist.new_group())


@in_a_folder
def without_collectives(folder):
    return _saved(folder, use_collectives=False)


@in_a_folder
def asynchronous(folder):
    return _saved_meanwhile(folder)


# FSDP1 ----------------------------------------------------------------------------------------------------------------


def kind_of(name):
    """The arguments of `state_dict_type`; torch writes to them."""
    if name == "full":
        return StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
    return StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()


def fsdp1(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), device_mesh=mesh, use_orig_params=True)


def fsdp1_alone(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def _fsdp1_resumed(kind, shard):
    first, second = Run(0, shard), Run(1, shard)
    before = first.losses(0, BEFORE)
    with FullyShardedDataParallel.state_dict_type(first.model, *kind_of(kind)):
        weights = first.model.state_dict()
        moments = FullyShardedDataParallel.optim_state_dict(first.model, first.optimizer)
    with FullyShardedDataParallel.state_dict_type(second.model, *kind_of(kind)):
        second.model.load_state_dict(weights)
        loaded = FullyShardedDataParallel.optim_state_dict_to_load(second.model, second.optimizer, moments)
        second.optimizer.load_state_dict(loaded)
    return before + second.losses(BEFORE, AFTER)


@in_a_folder
def fsdp1_full(folder):
    return _fsdp1_resumed("full", fsdp1)


@in_a_folder
def fsdp1_sharded(folder):
    return _fsdp1_resumed("sharded", fsdp1)


@in_a_folder
def fsdp1_without_a_mesh(folder):
    return _fsdp1_resumed("sharded", fsdp1_alone)


@in_a_folder
def fsdp1_by_dcp(folder):
    return _saved(folder, shard=fsdp1)


@in_a_folder
def fsdp1_by_dcp_full(folder):
    return _saved(folder, EVERYWHERE, shard=fsdp1)


DCP = [
    plain,
    flattened,
    offloaded,
    hybrid_shards,
    other_planners,
    cached_plans,
    partly,
    broadcast_from_rank_0,
    onto_meta,
    through_torch_save,
    over_a_group_of_its_own,
    without_collectives,
    asynchronous,
]
FSDP1 = [fsdp1_full, fsdp1_sharded, fsdp1_without_a_mesh, fsdp1_by_dcp, fsdp1_by_dcp_full]
