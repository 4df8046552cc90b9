# SPDX-License-Identifier: Apache-2.0
"""What travels for values: a dtype, or a quantized wire, which names the module that carries it.

Pure checks and choices, for any thread. See `wire_carrier` for what such a module offers.
"""

from __future__ import annotations

import zlib
from typing import ClassVar, Protocol, TypeGuard, cast

import torch


class QuantizedWire(Protocol):
    """A wire of few bits, as `attach` takes it: hashable, ``repr`` equal on ranks that agree."""

    carried_by: ClassVar[str]
    """The module that offers what `Carrier` says."""

    @property
    def traits(self) -> tuple[str, ...]:
        """What `commrt.options` calls it: at least "quantized wire", by which options refuse it."""

    @property
    def feedback(self) -> bool:
        """True if what rounding lost is added in the next step."""

    def __hash__(self) -> int: ...


AnyWire = torch.dtype | QuantizedWire


def is_quantized(wire: object) -> TypeGuard[QuantizedWire]:
    """Return True for a wire that is no dtype."""
    return isinstance(getattr(wire, "carried_by", None), str) and not isinstance(wire, type)


def as_wire(wire: object) -> AnyWire | None:
    """Return `wire`, or the one that is called so; raises `UsageError` for what cannot travel.

    >>> as_wire("bf16"), as_wire("bfloat16"), as_wire(torch.bfloat16), as_wire(None)
    (torch.bfloat16, torch.bfloat16, torch.bfloat16, None)
    """
    if wire is None:
        return None
    from commrt.quantizer import DTYPES, QUANTIZERS, require_wire  # noqa: PLC0415  # an option

    require_wire(wire)
    if not isinstance(wire, str):
        return cast("AnyWire", wire)
    name = wire.lower()
    if name in QUANTIZERS:
        return QUANTIZERS[name]
    return cast("torch.dtype", getattr(torch, DTYPES.get(name, name)))


def travels_as(own: torch.dtype, wire: AnyWire | None) -> AnyWire:
    """Return what travels for values of dtype `own`: `wire` if that is narrower."""
    if wire is None or not own.is_floating_point:
        return own
    narrower = is_quantized(wire) or cast("torch.dtype", wire).itemsize < own.itemsize
    return wire if narrower else own


def buffer_dtype(travels: AnyWire) -> torch.dtype:
    """Return the dtype of the wire buffer: fp32 for values that will be quantized."""
    return torch.float32 if is_quantized(travels) else cast("torch.dtype", travels)


def wire_text(wire: AnyWire) -> str:
    """Return `wire` as a short text that ranks compare; it need not tell a wire's whole name."""
    if not is_quantized(wire):
        return str(wire)
    return f"{wire!s:.32} {zlib.crc32(repr(wire).encode()):08x}"
