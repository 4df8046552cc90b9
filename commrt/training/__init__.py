# SPDX-License-Identifier: Apache-2.0
"""Ways to train a model on many ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commrt.lazy import names_in

if TYPE_CHECKING:
    from commrt.training.replica import Stats, StepReport

_HOMES = {
    "commrt.training.replica": (
        "Stats",
        "StepReport",
    ),
}

__all__ = ["Stats", "StepReport"]

__getattr__ = names_in(__name__, _HOMES)
