# SPDX-License-Identifier: Apache-2.0
"""Choose the backend that quantizes: Triton on a GPU, Numba on a CPU where it is installed, else plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import cast

from torch import Tensor

from commrt.kernels.dispatch import Combination, on_gpu, suit_kernels
from commrt.kernels.quantize import add_quantized, dequantize, quantize
from commrt.quantizer import Quantizer

__all__ = ["adding_quantized", "compiled_quantize", "dequantizing", "quantizing"]


def suits_numba(values: Tensor) -> bool:
    """Return True if Numba can work on `values`: by their device."""
    return values.device.type == "cpu"


@cache
def compiled_quantize() -> ModuleType | None:
    """Return `cpu_quantize`, or None without one that works, and where Numba finds no folder for what it compiles."""
    if find_spec("numba") is None:
        return None
    try:
        return import_module("commrt.kernels.cpu_quantize")
    except (ImportError, RuntimeError):  # a Numba that does not fit this NumPy, for one
        return None


def quantizing(values: Tensor, codes: Tensor, quantizer: Quantizer, residual: Tensor | None) -> Callable[[int], None]:
    """Return a function of a key that codes `values`; see `quantize.encode`."""
    if suit_kernels(values, codes, *([] if residual is None else [residual])):
        return cast("Callable[[int], None]", on_gpu("quantize")(values, codes, quantizer, residual))
    if suits_numba(values) and (numba := compiled_quantize()):
        return cast("Callable[[int], None]", numba.quantize_call(values, codes, quantizer, residual))
    return lambda key: quantize(values, codes, quantizer, residual, key)


def dequantizing(codes: Tensor, values: Tensor, quantizer: Quantizer) -> Combination:
    """Return a function that dequantizes to `values`; see `quantize.decode`."""
    if suit_kernels(values, codes):
        return cast("Combination", on_gpu("dequantize")(codes, values, quantizer))
    if suits_numba(values) and (numba := compiled_quantize()):
        return cast("Combination", numba.dequantize_call(codes, values, quantizer))
    return lambda: dequantize(codes, values, quantizer)


def adding_quantized(values: Tensor, received: Sequence[Tensor], quantizer: Quantizer) -> Combination:
    """Return a function that adds what `received` codes stand for; see `quantize.add_quantized`.

    On a GPU they lie evenly spaced in one buffer.
    """
    if suit_kernels(values, *received):
        return cast("Combination", on_gpu("add quantized")(values, received, quantizer))
    if suits_numba(values) and (numba := compiled_quantize()):
        return cast("Combination", numba.add_quantized_call(values, received, quantizer))
    return lambda: add_quantized(values, received, quantizer)
