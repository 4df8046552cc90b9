# SPDX-License-Identifier: Apache-2.0
"""Collective algorithms as pure functions from a rank count to a schedule, and algorithms for training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commrt.lazy import names_in

if TYPE_CHECKING:
    from commrt.algorithms.backup import BackupWorkers
    from commrt.algorithms.direct import Direct
    from commrt.algorithms.double_tree import DoubleTree
    from commrt.algorithms.gossip import Gossip
    from commrt.algorithms.halving_doubling import HalvingDoubling
    from commrt.algorithms.local import LocalSGD
    from commrt.algorithms.ring import Ring, Rings
    from commrt.algorithms.sliced import Sliced
    from commrt.algorithms.torus import Torus2D

_HOMES = {
    "commrt.algorithms.backup": ("BackupWorkers",),
    "commrt.algorithms.direct": ("Direct",),
    "commrt.algorithms.double_tree": ("DoubleTree",),
    "commrt.algorithms.gossip": ("Gossip",),
    "commrt.algorithms.halving_doubling": ("HalvingDoubling",),
    "commrt.algorithms.local": ("LocalSGD",),
    "commrt.algorithms.ring": (
        "Ring",
        "Rings",
    ),
    "commrt.algorithms.sliced": ("Sliced",),
    "commrt.algorithms.torus": ("Torus2D",),
}

__all__ = [
    "BackupWorkers",
    "Direct",
    "DoubleTree",
    "Gossip",
    "HalvingDoubling",
    "LocalSGD",
    "Ring",
    "Rings",
    "Sliced",
    "Torus2D",
]

__getattr__ = names_in(__name__, _HOMES)
