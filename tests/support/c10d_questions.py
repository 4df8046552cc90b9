# SPDX-License-Identifier: Apache-2.0
"""What torch's own Python code asks of a process group and of its backend, and what it builds on the answers."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

CPU = torch.device("cpu")
FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def groups():
    world = dist.group.WORLD
    return world, world._get_backend(CPU)


def named(value):
    """Return `value` if it is plain, otherwise the name of its type; that of a backend is left out."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [named(each) for each in value]
    return str(value) if isinstance(value, torch.device) else type(value).__name__


def asked(questions):
    """{question: the answer, or the type of the error}"""
    found = {}
    for name, ask in questions.items():
        try:
            found[name] = named(ask())
        except Exception as error:
            found[name] = type(error).__mro__[-4 if isinstance(error, RuntimeError) else 0].__name__
    return found


def of_the_group():
    """What torch asks of a group, in distributed_c10d, device_mesh, checkpoint, fsdp, _dynamo and _inductor."""
    group, backend = groups()
    c10d, kinds = dist.distributed_c10d, dist.ProcessGroup.BackendType
    kind = kinds.GLOO if dist.get_backend() == "gloo" else kinds.CUSTOM
    return asked(
        {
            "cpu in _device_types": lambda: CPU in group._device_types,
            "_get_backend(meta)": lambda: group._get_backend(torch.device("meta")),
            "_get_backend is kept": lambda: group._get_backend(CPU) is backend,
            "rank": lambda: group.rank() == backend.rank() == dist.get_rank(),
            "size": lambda: group.size() == backend.size() == 2,
            "group_name": lambda: group.group_name,
            "group_desc": lambda: group.group_desc,
            "_set_group_desc": lambda: group._set_group_desc("default_pg"),
            "name": lambda: group.name() == backend.name() == dist.get_backend(),
            "_get_backend_name": lambda: group._get_backend_name() == dist.get_backend(),
            "bound_device_id": lambda: group.bound_device_id,
            "_id": lambda: group._id() == group._id(),
            "_backend_id": lambda: type(group._backend_id(kind)).__name__,
            "_has_hooks": group._has_hooks,
            "_wait_for_pending_works": group._wait_for_pending_works,
            "_register_on_completion_hook": lambda: group._register_on_completion_hook(print),
            "_enable_collectives_timing": group._enable_collectives_timing,
            "_set_sequence_number_for_group": group._set_sequence_number_for_group,
            "_get_sequence_number_for_group": lambda: type(group._get_sequence_number_for_group()).__name__,
            "get_group_store": lambda: isinstance(group.get_group_store(), dist.Store),
            "set_timeout": lambda: group.set_timeout(c10d.default_pg_timeout),
            "unbox": lambda: dist.ProcessGroup.unbox(group.boxed()) is group,
            "hash": lambda: {group: 1}[group],
            "pickle": lambda: copy.deepcopy(group),
            "config": lambda: dist.get_backend_config().startswith(f"cpu:{dist.get_backend()}"),
            "default device": lambda: c10d._get_pg_default_device(group),
            "object device": lambda: c10d._get_object_coll_device(group),
            "find": lambda: c10d._find_pg_by_ranks_and_tag("", [0, 1]) is group,
            "get_group_rank": lambda: dist.get_group_rank(group, 1),
            "ranks": lambda: dist.get_process_group_ranks(group),
            "split_group": lambda: dist.split_group(group, [[0, 1]]),
            "shrink_group": lambda: dist.distributed_c10d.shrink_group([1], group),
            "resolve": lambda: dist.distributed_c10d._resolve_process_group(group.group_name) is group,
        }
    )


def of_the_backend():
    """What torch asks of the backend of a device."""
    _, backend = groups()
    return asked(
        {
            "supports_coalescing": lambda: backend.supports_coalescing,
            "supports_shrinking": lambda: backend.supports_shrinking,
            "supports_time_estimate": lambda: backend.supports_time_estimate,
            "supports_tensor_alloc": lambda: backend.supports_tensor_alloc(CPU),
            "allocate_tensor": lambda: backend.allocate_tensor(4, dtype=torch.float32, device=CPU),
            "mem_allocator": lambda: backend.mem_allocator,
            "memory_stats": backend.memory_stats,
            "options": lambda: backend.options._timeout.total_seconds() > 0,
            "_set_default_timeout": lambda: backend._set_default_timeout(dist.distributed_c10d.default_pg_timeout),
            "_set_sequence_number_for_group": backend._set_sequence_number_for_group,
            "eager_connect_single_device": lambda: backend.eager_connect_single_device(CPU),
            "comm_split_count": lambda: backend.comm_split_count,
            "perform_nocolor_split": lambda: backend.perform_nocolor_split(CPU),
            "suspend": backend.suspend,
            "resume": backend.resume,
        }
    )


# What torch builds on the answers -------------------------------------------------------------------------------------


def model_of(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def total(state):
    """The sum of the magnitudes in a state, to compare."""
    if isinstance(state, torch.Tensor):
        return float(state.double().abs().sum())
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return sum(total(each) for each in parts)


def model_from_rank_0():
    """Rank 0 has the state, the others get it: the program of the case."""
    model = model_of(dist.get_rank())
    state = {name: value.clone() for name, value in model.state_dict().items()} if dist.get_rank() == 0 else {}
    fully_shard(model, mesh=mesh())
    set_model_state_dict(model, state, options=FROM_RANK_0)
    return total(get_model_state_dict(model, options=FULL))


def meta_model_from_rank_0():
    """The other ranks' models have no memory at first."""
    state = model_of(7).state_dict() if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        model = model_of(0)
    fully_shard(model, mesh=mesh())
    model.to_empty(device="cpu")
    set_model_state_dict(model, state, options=FROM_RANK_0)
    return total(get_model_state_dict(model, options=FULL))


def optimizer_from_rank_0():
    model = model_of(0)
    fully_shard(model, mesh=mesh())
    optimizer = stepped(model)
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    again = torch.optim.AdamW(model.parameters(), lr=0.1)
    set_optimizer_state_dict(model, again, state if dist.get_rank() == 0 else {}, options=FROM_RANK_0)
    return total(get_optimizer_state_dict(model, again, options=FULL)["state"])


def fsdp1_full():
    return fsdp1(StateDictType.FULL_STATE_DICT)


def fsdp1_sharded():
    return fsdp1(StateDictType.SHARDED_STATE_DICT)


def fsdp1_local():
    return fsdp1(StateDictType.LOCAL_STATE_DICT)


def fsdp1(kind):
    """The names in a state dict of FSDP1 of this kind, and the weights of another model that loaded it."""
    models = [FullyShardedDataParallel(model_of(seed), device_id=CPU) for seed in (3, 4)]
    stepped(models[0])
    with FullyShardedDataParallel.state_dict_type(models[0], kind):
        state = models[0].state_dict()
    with FullyShardedDataParallel.state_dict_type(models[1], kind):
        models[1].load_state_dict(state)
    with FullyShardedDataParallel.summon_full_params(models[1]):
        return sorted(state), total([param.detach() for param in models[1].parameters()])


def alone():
    """The same weights, trained without FSDP: every rank has the same batch."""
    model = model_of(3)
    stepped(model)
    return total([param.detach() for param in model.parameters()])


def folder():
    """A new folder, the same on both ranks."""
    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    return Path(told[0])


def saved_and_loaded():
    model = model_of(0)
    fully_shard(model, mesh=mesh())
    where = folder()
    dcp.save(get_model_state_dict(model), checkpoint_id=where)
    other = model_of(5)
    fully_shard(other, mesh=mesh())
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=where)
    set_model_state_dict(other, state)
    return total(get_model_state_dict(other, options=FULL))


def saved_meanwhile():
    """dcp.async_save with a group of its own, beside collectives of the world."""
    model = model_of(0)
    fully_shard(model, mesh=mesh())
    group, where = dist.new_group(backend=dist.get_backend()), folder()
    saving = dcp.async_save(get_model_state_dict(model), checkpoint_id=where, process_group=group)
    tensor = torch.ones(3)
    for _ in range(3):
        dist.all_reduce(tensor)
    saving.result()
    state = get_model_state_dict(model)
    before = total(get_model_state_dict(model, options=FULL))
    dcp.load(state, checkpoint_id=where, process_group=group)
    return tensor.tolist(), total(get_model_state_dict(model, options=FULL)) == before


def meshes():
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    flat = two["a", "b"]._flatten("ab")
    sums = []
    for group in (two["a"].get_group(), two["b"].get_group(), flat.get_group()):
        tensor = torch.full((2,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.tolist())
    return sums, dist.get_process_group_ranks(flat.get_group())


def subgroups():
    mine, every = dist.new_subgroups(1)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mine)
    return tensor.tolist(), [dist.get_process_group_ranks(group) for group in every if group is mine], len(every)


def coalesced():
    """Several collectives that are waited for as one."""
    tensors = [torch.full((2,), dist.get_rank() + 1.0) for _ in range(3)]
    with dist._coalescing_manager(device=CPU, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return [tensor.tolist() for tensor in tensors]


def objects():
    rank, thing = dist.get_rank(), {"rank": dist.get_rank()}
    every, at_one, told, mine = [None, None], [None, None] if rank == 1 else None, [thing], [None]
    dist.all_gather_object(every, thing)
    dist.gather_object(thing, at_one, 1)
    dist.broadcast_object_list(told, 1)
    dist.scatter_object_list(mine, ["a", "b"] if rank == 0 else None, 0)
    if rank == 0:
        dist.send_object_list(["sent"], 1)
    else:
        dist.recv_object_list(told, 0)
    return every, at_one, told, mine
