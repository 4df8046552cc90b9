# SPDX-License-Identifier: Apache-2.0
"""State goes from the first member of a step to the others: parameters, buffers, the optimizers' state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from commrt.buckets import MIB
from commrt.engine import Engine
from commrt.state import batches, dump, flatten, load, restore

__all__ = ["overwrite", "overwrite_model", "overwrite_optimizers"]


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


def overwrite_optimizers(engine: Engine, optimizers: Sequence[Optimizer], step: int) -> None:
    """Settings and state of `optimizers`, which the others may not have yet; collective."""
    first = engine.members[0] == engine.world.rank
    flat = dump(optimizers) if first else torch.empty(0, dtype=torch.uint8)
    nbytes = torch.tensor([flat.numel()])
    engine.submit_broadcast(nbytes, step).result()
    flat = flat if first else flat.new_empty(int(nbytes))
    engine.submit_broadcast(flat, step).result()
    if not first:
        load(flat, optimizers)
