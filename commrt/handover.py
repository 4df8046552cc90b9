# SPDX-License-Identifier: Apache-2.0
"""State goes from the first member of a step to the others: a model's tensors, and what optimizers and others keep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from commrt.buckets import MIB
from commrt.engine import Engine
from commrt.state import Stateful, batches, dump, flatten, load, restore

__all__ = ["overwrite", "overwrite_model", "overwrite_states"]


def overwrite_model(engine: Engine, model: nn.Module, step: int) -> None:
    """Parameters and buffers; collective."""
    for batch in batches([*model.parameters(), *model.buffers()], 25 * MIB):
        overwrite(engine, batch, step)


def overwrite(engine: Engine, tensors: Sequence[Tensor], step: int) -> None:
    """Any `tensors` of equal kinds; collective."""
    if tensors:
        flat = flatten(tensors)
        engine.submit_broadcast(flat, step).result()
        restore(flat, tensors)


def overwrite_states(engine: Engine, owners: Sequence[Stateful], step: int) -> None:
    """The state of `owners`, which the others may not have yet; collective.

    The first member loads its own as well: it then fails where the others fail.
    """
    if not owners or engine.world.size == 1:
        return
    first = engine.members[0] == engine.world.rank
    flat = dump(owners) if first else torch.empty(0, dtype=torch.uint8)
    nbytes = torch.tensor([flat.numel()])
    engine.submit_broadcast(nbytes, step).result()
    flat = flat if first else flat.new_empty(int(nbytes))
    if flat.numel():
        engine.submit_broadcast(flat, step).result()
    load(flat, owners)
