# SPDX-License-Identifier: Apache-2.0
"""What torch's own Python code asks of a process group and of its backend."""

from __future__ import annotations

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
    c10d = dist.distributed_c10d
    return asked(
        {
            "cpu in _device_types": lambda: CPU in group._device_types,
            "_get_backend(meta)": lambda: group._get_backend(torch.device("meta")),
            "_get_backend is kept": lambda: group._get_backend(CPU) is backend,
            "rank": lambda: group.rank() == backend.rank() == dist.get_rank(),
            "size": lambda: group.size() == backend.size() == 2,
            "group_name": lambda: group.group_name,
            "name": lambda: group.name() == backend.name() == dist.get_backend(),
            "_get_backend_name": lambda: group._get_backend_name() == dist.get_backend(),
            "bound_device_id": lambda: group.bound_device_id,
            "_has_hooks": group._has_hooks,
            "_set_sequence_number_for_group": group._set_sequence_number_for_group,
            "_get_sequence_number_for_group": lambda: type(group._get_sequence_number_for_group()).__name__,
            "get_group_store": lambda: isinstance(group.get_group_store(), dist.Store),
            "set_timeout": lambda: group.set_timeout(c10d.default_pg_timeout),
            "unbox": lambda: dist.ProcessGroup.unbox(group.boxed()) is group,
            "hash": lambda: {group: 1}[group],
            "config": lambda: dist.get_backend_config().startswith(f"cpu:{dist.get_backend()}"),
            "default device": lambda: c10d._get_pg_default_device(group),
            "object device": lambda: c10d._get_object_coll_device(group),
            "ranks": lambda: dist.get_process_group_ranks(group),
            "split_group": lambda: dist.split_group(group, [[0, 1]]),
            "resolve": lambda: c10d._resolve_process_group(group.group_name) is group,
        }
    )


def of_the_backend():
    """What torch asks of the backend of a device."""
    _, backend = groups()
    return asked(
        {
            "supports_coalescing": lambda: backend.supports_coalescing,
            "supports_shrinking": lambda: backend.supports_shrinking,
            "memory_stats": backend.memory_stats,
            "options": lambda: backend.options._timeout.total_seconds() > 0,
            "_set_default_timeout": lambda: backend._set_default_timeout(dist.distributed_c10d.default_pg_timeout),
            "_set_sequence_number_for_group": backend._set_sequence_number_for_group,
            "eager_connect_single_device": lambda: backend.eager_connect_single_device(CPU),
        }
    )
