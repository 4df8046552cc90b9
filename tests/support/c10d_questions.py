# SPDX-License-Identifier: Apache-2.0
"""What torch's own Python code asks of a process group and of its backend."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


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
