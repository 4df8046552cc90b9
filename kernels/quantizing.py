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

from commrt.kernels.codes import add_codes, decode, encode
from commrt.kernels.dispatch import Combination, suit_kernels
from commrt.quantizer import Quantizer

__all__ = ["adding_codes", "compiled_codes", "decoding", "encoding"]


def suits_numba(values: Tensor) -> bool:
    """Return True if Numba can work on `values`: by their device."""
    return values.device.type == "cpu"


@cache
def compiled_codes() -> ModuleType | None:
    """Return `cpu_codes`, or None without one that works, and where Numba finds no folder for what it compiles."""
    if find_spec("numba") is None:
        return None
    try:
        return import_module("commrt.kernels.cpu_codes")
    except (ImportError, RuntimeError):  # a Numba that does not fit this NumPy, for one
        return None


def encoding(values: Tensor, codes: Tensor, coding: Quantizer, residual: Tensor | None) -> Callable[[int], None]:
    """Return a function of a key that codes `values`; see `codes.encode`."""
    if suit_kernels(values, codes, *([] if residual is None else [residual])):
        from commrt.kernels.device.coding_launches import encode_launch  # noqa: PLC0415

        return encode_launch(values, codes, coding, residual)
    if suits_numba(values) and (numba := compiled_codes()):
        return cast("Callable[[int], None]", numba.encode_call(values, codes, coding, residual))
    return lambda key: encode(values, codes, coding, residual, key)


def decoding(codes: Tensor, values: Tensor, coding: Quantizer) -> Combination:
    """Return a function that decodes to `values`; see `codes.decode`."""
    if suit_kernels(values, codes):
        from commrt.kernels.device.coding_launches import decode_launch  # noqa: PLC0415

        return decode_launch(codes, values, coding)
    if suits_numba(values) and (numba := compiled_codes()):
        return cast("Combination", numba.decode_call(codes, values, coding))
    return lambda: decode(codes, values, coding)


def adding_codes(values: Tensor, received: Sequence[Tensor], coding: Quantizer) -> Combination:
    """Return a function that adds what `received` codes stand for; see `codes.add_codes`.

    On a GPU they lie evenly spaced in one buffer.
    """
    if suit_kernels(values, *received):
        from commrt.kernels.device.coding_launches import add_codes_launch  # noqa: PLC0415

        return add_codes_launch(values, received, coding)
    if suits_numba(values) and (numba := compiled_codes()):
        return cast("Combination", numba.add_codes_call(values, received, coding))
    return lambda: add_codes(values, received, coding)
