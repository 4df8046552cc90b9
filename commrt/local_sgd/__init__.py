# SPDX-License-Identifier: Apache-2.0
"""Train by local SGD: ranks train alone for a period, and average what they have learned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commrt.lazy import names_in

if TYPE_CHECKING:
    from commrt.algorithms.local import LocalSGD, Mix, cocod, dasgd, diloco, noloco, streaming_diloco
    from commrt.algorithms.outer import HeavyBall, Nesterov, Outer, SlowMomentum

_HOMES = {
    "commrt.algorithms.local": (
        "LocalSGD",
        "Mix",
        "cocod",
        "dasgd",
        "diloco",
        "noloco",
        "streaming_diloco",
    ),
    "commrt.algorithms.outer": (
        "HeavyBall",
        "Nesterov",
        "Outer",
        "SlowMomentum",
    ),
}

__all__ = [
    "HeavyBall",
    "LocalSGD",
    "Mix",
    "Nesterov",
    "Outer",
    "SlowMomentum",
    "cocod",
    "dasgd",
    "diloco",
    "noloco",
    "streaming_diloco",
]

__getattr__ = names_in(__name__, _HOMES)
