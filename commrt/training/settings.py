# SPDX-License-Identifier: Apache-2.0
"""Digest the numeric settings of optimizers, which ranks compare in each step: a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from struct import pack
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from commrt.buckets.header import WIDTHS

NUMBERS = (int, float, np.integer, np.floating, np.bool_)
PLAIN = frozenset({int, float, bool})


def settings_digest(
    optimizers: Sequence[Optimizer], step: int, scales: Sequence[float] = ()
) -> int:
    """Return 8 bits of all numeric settings of `optimizers` and of `scales`, equal in any process.

    Ranks compare them in each step, since schedulers change settings. Two different settings have
    equal bits once in 256 times, and other ones in another `step`: a difference that lasts is
    found. Numbers on a GPU are left out, because reading them would wait for it. Cost: 8 us for
    AdamW with one group.
    """
    numbers: list[Any] = [*scales]
    salt = step % (1 << WIDTHS.step)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # sorted, as loaded ones have another order
            for value in map(group.get, sorted(group.keys() - {"params"})):
                if type(value) in PLAIN:  # nearly all: this calls nothing
                    numbers += (value,)
                elif value is not None:
                    numbers += _numbers_in(value)
    return blake2b(pack(f"q{len(numbers)}d", salt, *numbers), digest_size=1).digest()[0]


def _numbers_in(value: object) -> list[float]:
    """Return `value`, or the values in it, if they are numbers on the host."""
    if isinstance(value, tuple | list):
        return [*chain.from_iterable(map(_numbers_in, value))]
    on_host = (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and value.numel() == 1
        and not value.is_complex()
    )
    return [float(value)] if on_host or isinstance(value, NUMBERS) else []  # type: ignore[arg-type]
