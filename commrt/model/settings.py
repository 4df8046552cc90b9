# SPDX-License-Identifier: Apache-2.0
"""The numbers with which optimizers step, as few bits: compared in each step, since schedulers change them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from struct import pack

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["digest"]


def digest(optimizers: Sequence[Optimizer], salt: int) -> int:
    """8 bits of all numeric settings of `optimizers`, the same in every process.

    Two different settings have the same bits once in 256 times, and for another `salt` others do: a difference that
    lasts is found. Numbers on a GPU are left out, reading them would wait for it. Cost: 8 us for AdamW with one group.
    """
    numbers = [float(number) for optimizer in optimizers for number in _settings(optimizer)]
    return blake2b(pack(f"q{len(numbers)}d", salt, *numbers), digest_size=1).digest()[0]


def _settings(optimizer: Optimizer) -> Iterator[float]:
    for group in optimizer.param_groups:
        for key in sorted(group):  # a group that was loaded may have another order
            if key != "params":
                yield from _numbers(group[key])


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, int | float | np.integer | np.floating | np.bool_):
        yield float(value)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1 and not value.is_complex():
        yield float(value)
