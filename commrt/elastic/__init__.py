# SPDX-License-Identifier: Apache-2.0
"""Ranks that come and go: generations, membership and recovery."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commrt.lazy import names_in

if TYPE_CHECKING:
    from commrt.errors import Evicted, QuorumLost
    from commrt.runtime.membership import Loss

_HOMES = {
    "commrt.errors": (
        "Evicted",
        "QuorumLost",
    ),
    "commrt.runtime.membership": ("Loss",),
}

__all__ = ["Evicted", "Loss", "QuorumLost"]

__getattr__ = names_in(__name__, _HOMES)
