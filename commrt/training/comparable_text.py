# SPDX-License-Identifier: Apache-2.0
"""Buffers and optimizers as text that is equal on all ranks if they are: pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from commrt.buckets.tensors import Named


def comparable(value: object) -> str:
    """Return `value` as text that ranks can compare, without the addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def describe_buffers(model: nn.Module) -> str:
    """Return names, dtypes and shapes of all buffers, as ranks compare them."""
    return ", ".join(f"{name} {b.dtype}{list(b.shape)}" for name, b in model.named_buffers())


def describe_optimizers(optimizers: Sequence[Optimizer], params: Sequence[Named]) -> str:
    """Return what decides how `optimizers` step, as text: types, settings, and who has state."""
    names = {id(param): name for name, param in params}
    groups = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            members = [
                names.get(id(param), "-") + "*" * (param in optimizer.state)
                for param in group["params"]
            ]
            settings = ", ".join(
                f"{key}={comparable(value.tolist() if isinstance(value, Tensor) else value)}"
                for key, value in group.items()
                if key not in ("params", "param_names")
            )
            groups.append(
                f"{type(optimizer).__name__}({settings}) of {' '.join(members)}, * has state"
            )
    return "; ".join(groups)
