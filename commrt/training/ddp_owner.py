# SPDX-License-Identifier: Apache-2.0
"""Which model of DistributedDataParallel a state of a communication hook was registered with, and
whether its ranks are those of a world.

It only looks, once per world, on the thread that runs the backward pass.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from commrt.errors import UsageError
from commrt.runtime.world import World

T = TypeVar("T")


def ddp_owner(state: object, param: Tensor) -> DistributedDataParallel | None:
    """Return the model with the parameter `param` with which `state` was registered.

    DDP does not tell its hook, so this asks the garbage collector. It must not list all objects: a
    tuple in such a list could not be completed by the thread that makes it.
    """
    hooks = _holders(list, _holders(tuple, [state]))
    models = _holders(DistributedDataParallel, [*hooks, *_holders(dict, hooks)])
    owners = [
        one for one in models if any(state is known for _, known in getattr(one, "_comm_hooks", ()))
    ]
    return next((one for one in owners if any(each is param for each in one.parameters())), None)


def _holders(kind: type[T], things: Sequence[object]) -> list[T]:
    return [one for one in gc.get_referrers(*things) if issubclass(type(one), kind)]


def require_same_ranks(world: World, model: DistributedDataParallel | None) -> None:
    """Raise `UsageError` if gradients would be averaged over other ranks than DDP's."""
    group = None if model is None else model.process_group
    try:
        rank = dist.get_rank(group)
        size = dist.get_world_size(group)
    except ValueError as error:
        raise UsageError(
            "DDP's process group was destroyed: make a new DDP model in the group there is now"
        ) from error
    if model is not None and (rank, size) != (world.rank, world.size):
        raise UsageError(
            f"DDP has rank {rank} of {size}, and commrt's world rank {world.rank} of {world.size}:"
            " call init_process_group() before commrt.init(), and make DDP over all ranks"
        )
