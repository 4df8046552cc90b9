# SPDX-License-Identifier: Apache-2.0
"""What gradients weigh that came together, read from the slots of all ranks. Writes nothing."""

from __future__ import annotations

from commrt.buckets.riders import WEIGHS, Slots
from commrt.errors import DisagreementError


def total_weight(slots: Slots, *, may_be_zero: bool) -> float | None:
    """Return what all gradients that came together weigh; None where none is weighed. The same on
    all their ranks.

    Where all ranks together weigh nothing, raises `DisagreementError`; None if that `may_be_zero`.
    """
    weighing = (slots["flags"] & WEIGHS) != 0
    if not weighing.any():
        return None
    total = float(slots["weight"][weighing].sum())
    if not total and may_be_zero:
        return None
    if not total:
        raise DisagreementError(
            "the gradients of all ranks together weigh nothing, so they have no mean: leave"
            " such a step out on all ranks"
        )
    return total
