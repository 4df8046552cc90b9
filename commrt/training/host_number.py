# SPDX-License-Identifier: Apache-2.0
"""A number that a loop gives, which must be one on the host: a pure function."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from commrt.errors import UsageError


def require_number(what: str, number: object) -> float:
    """Return `number` as a float; raise `UsageError` if it is none, or lies on a GPU."""
    if isinstance(number, Tensor) and number.numel() == 1 and number.device.type == "cpu":
        number = number.item()
    if isinstance(number, bool) or not isinstance(number, int | float | np.number):
        raise UsageError(
            f"{what} needs a number on the host and got {number!r:.60}: of a tensor on a GPU its"
            " item()"
        )
    try:
        return float(number)
    except (OverflowError, TypeError) as error:  # of an int that is too large, of a complex number
        raise UsageError(f"{what} needs a real number of float64 and got {number!r:.60}") from error
