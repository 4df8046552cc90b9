# SPDX-License-Identifier: Apache-2.0
"""Choose the backend that quantizes: Triton on a GPU, Numba on a CPU that has it, or plain torch.

Each function compiles what its result needs, and the first on a CPU imports Numba. Results are used
as those of `dispatch`; `commrt.kernels.quantize` defines what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import cast

from torch import Tensor

from commrt.kernels.dispatch import Combination, are_reachable, on_gpu
from commrt.kernels.quantize import add_quantized, dequantize, quantize
from commrt.quantizer import Quantizer


def quantizing(
    values: Tensor, codes: Tensor, quantizer: Quantizer, residual: Tensor | None
) -> Callable[[int], None]:
    """Return a function of a key that does `quantize`."""
    if are_reachable(values, codes, *([] if residual is None else [residual])):
        return cast("Callable[[int], None]", on_gpu("quantize")(values, codes, quantizer, residual))
    numba = _numba_for(values)
    if numba is not None:
        return cast(
            "Callable[[int], None]", numba.quantize_call(values, codes, quantizer, residual)
        )
    return lambda key: quantize(values, codes, quantizer, residual, key)


def dequantizing(codes: Tensor, values: Tensor, quantizer: Quantizer) -> Combination:
    """Return a function that does `dequantize`."""
    if are_reachable(values, codes):
        return cast("Combination", on_gpu("dequantize")(codes, values, quantizer))
    numba = _numba_for(values)
    if numba is not None:
        return cast("Combination", numba.sum_call([codes], values, quantizer, is_added=False))
    return lambda: dequantize(codes, values, quantizer)


def adding_quantized(
    values: Tensor, received: Sequence[Tensor], quantizer: Quantizer
) -> Combination:
    """Return a function that does `add_quantized`; on a GPU `received` are evenly spaced."""
    if are_reachable(values, *received):
        return cast("Combination", on_gpu("add quantized")(values, received, quantizer))
    numba = _numba_for(values)
    if numba is not None:
        return cast("Combination", numba.sum_call(received, values, quantizer, is_added=True))
    return lambda: add_quantized(values, received, quantizer)


def _numba_for(values: Tensor) -> ModuleType | None:
    return compiled_quantize() if values.device.type == "cpu" else None


@cache
def compiled_quantize() -> ModuleType | None:
    """Return `cpu_quantize`, or None without a Numba that works and has a folder for its cache."""
    if find_spec("numba") is None:
        return None
    try:
        return import_module("commrt.kernels.cpu_quantize")
    except (ImportError, RuntimeError):  # a Numba that does not fit this NumPy, for one
        return None
