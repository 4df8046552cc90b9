# SPDX-License-Identifier: Apache-2.0
"""Objects as rows of bytes, and the schedules that copy rows among the members of a world.

`broadcast_among` and `require_member` also serve ``World.broadcast``, of any tensor. Pure
functions, for any thread; `World` sends what they make.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from commrt.algorithms import ring, tree
from commrt.errors import UsageError
from commrt.runtime.generation import Members
from commrt.schedule import Schedule


def packed(obj: object) -> Tensor:
    """Return `obj` as bytes [nbytes] on the host.

    Raises `UsageError` unless it is of plain values and tensors: `unpacked` runs nothing.
    """
    file = io.BytesIO()
    try:
        torch.save(tree_map_only(np.generic, np.generic.item, obj), file)
        row = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        unpacked(row)
    except Exception as error:
        raise UsageError(
            f"an object of type {type(obj).__name__} cannot be sent to other ranks: send numbers,"
            " strings, bytes, tensors, and lists, tuples or dicts of these only"
        ) from error
    return row


def unpacked(row: Tensor) -> Any:
    """Return the object whose bytes are `row`, its tensors on the host."""
    return torch.load(io.BytesIO(row.numpy().data), map_location="cpu", weights_only=True)


def require_member(root: object, members: Members, what: str) -> None:
    """Raise `UsageError` unless `root` is one of `members`."""
    if type(root) is not int or root not in members:
        raise UsageError(
            f"{what} with root={root!r:.80}: give one of the ranks that take part, world.members,"
            f" {list(members)!s:.80}"
        )


@lru_cache
def broadcast_among(members: Members, root: int, places: int) -> Schedule:
    """Return the schedule that copies a buffer of rank `root` to all `members` of a world."""
    among = tree.broadcast(len(members), members.index(root))
    return among.over(members, world=places)


@lru_cache
def all_gather_among(members: Members, places: int) -> Schedule:
    """Return the schedule that copies chunk i from ``members[i]`` to all `members` of a world."""
    return ring.all_gather(len(members)).over(members, world=places)
