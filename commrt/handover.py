# SPDX-License-Identifier: Apache-2.0
"""State goes from the first member of a step to the others: a model's tensors, and what optimizers and others keep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from commrt.buckets import MIB
from commrt.engine import Engine
from commrt.state import Stateful, batches, dump, flatten, load, restore, unread_buffers

__all__ = ["overwrite_buffers", "overwrite_model", "overwrite_states"]


def overwrite_model(engine: Engine, model: nn.Module, step: int) -> None:
    """Parameters and buffers; collective."""
    _overwrite(engine, [*model.parameters(), *model.buffers()], unread_buffers(model), step)


def overwrite_buffers(engine: Engine, model: nn.Module, step: int) -> None:
    """Buffers alone; collective."""
    _overwrite(engine, list(model.buffers()), unread_buffers(model), step)


def _overwrite(engine: Engine, tensors: Sequence[Tensor], unread: frozenset[int], step: int) -> None:
    for batch in batches(tensors, 25 * MIB):
        flat = flatten(batch)
        engine.submit_broadcast(flat, step).result()
        restore(flat, batch, unread)


def overwrite_states(engine: Engine, owners: Sequence[Stateful], step: int) -> None:
    """The state of `owners`, which the others may not have yet; collective.

    The first member loads its own as well: it then fails where the others fail.
    """
    if not owners or engine.world.size == 1:
        return
    first = engine.members[0] == engine.world.rank
    flat = dump(owners) if first else torch.empty(0, dtype=torch.uint8, device="cpu")
    nbytes = torch.tensor([flat.numel()], device="cpu")
    engine.submit_broadcast(nbytes, step).result()
    flat = flat if first else flat.new_empty(int(nbytes))
    if flat.numel():
        engine.submit_broadcast(flat, step).result()
    load(flat, owners)
