# SPDX-License-Identifier: Apache-2.0
"""Rows of numbers, as users give them: nothing is rounded, cut off or taken for something else."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from commrt.errors import UsageError

__all__ = ["row", "whole"]


def whole(name: str, given: ArrayLike) -> NDArray[np.int64]:
    """As whole numbers; raises `UsageError`.

    >>> whole("src", [0.0, 2.0]).tolist()
    [0, 2]
    """
    column = row(name, given)
    with np.errstate(invalid="ignore"):  # looked at next
        whole = column.astype(np.int64, copy=False)
    if whole is not column and not (whole == column).all():
        raise UsageError(f"{name} holds {column[whole != column][0]}: give whole numbers below 2^63")
    return whole


def row(name: str, given: ArrayLike) -> NDArray[Any]:
    """As a row [n] of numbers of any type; raises `UsageError`."""
    try:
        column = np.asarray(given)
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"{name} is no row of numbers: {error}") from error
    if column.ndim != 1 or column.dtype.kind not in "biuf":
        raise UsageError(
            f"{name} is of {column.dtype}, of shape {column.shape}: give a row of numbers, one per transfer"
        )
    return column
