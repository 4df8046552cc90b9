# SPDX-License-Identifier: Apache-2.0
"""Wires of few bits: quantizers, rules that choose the bits, and how a program quantizes what it sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commrt.lazy import names_in

if TYPE_CHECKING:
    from commrt.quantization.adaptive import Adaptive, Progress, adaquant, dq
    from commrt.quantizer import Float8, Int2, Int4, Int8, Quantizer

_HOMES = {
    "commrt.quantization.adaptive": (
        "Adaptive",
        "Progress",
        "adaquant",
        "dq",
    ),
    "commrt.quantizer": (
        "Float8",
        "Int2",
        "Int4",
        "Int8",
        "Quantizer",
    ),
}

__all__ = ["Adaptive", "Float8", "Int2", "Int4", "Int8", "Progress", "Quantizer", "adaquant", "dq"]

__getattr__ = names_in(__name__, _HOMES)
