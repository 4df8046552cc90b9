# SPDX-License-Identifier: Apache-2.0
"""What a gradient is on the wire: a number, or a code of few bits. By their names on the command line."""

from __future__ import annotations

from commrt.options import require_compatible
from commrt.quantization.short_sums import require_short_sums
from commrt.quantizer import Float8, Int2, Int4, Int8, Quantizer
from commrt.schedule import Algorithm

__all__ = ["GRADIENT_NBYTES", "ITEMS", "QUANTIZERS", "Item", "require_carried", "values_share", "wire_nbytes"]

Item = int | Quantizer
"""The bytes of a gradient on the wire, or the codes that stand for it."""

GRADIENT_NBYTES = 4
QUANTIZERS: dict[str, Quantizer] = {"int8": Int8(), "int4": Int4(), "int2": Int2(), "float8": Float8()}
ITEMS: dict[str, Item] = {"fp32": GRADIENT_NBYTES, "bf16": 2, "fp16": 2, **QUANTIZERS}


def wire_nbytes(numel: int, item: Item) -> float:
    """Return the bytes of `numel` gradients on the wire.

    >>> wire_nbytes(1_000_000, ITEMS["bf16"]), wire_nbytes(1_000_000, ITEMS["int4"])
    (2000000.0, 508560.0)
    """
    return float(item.nbytes(numel) if isinstance(item, Quantizer) else numel * item)


def values_share(quantizer: Quantizer | None) -> float:
    """Return the bytes of codes and scales, divided by those of the fp32 values; 1 if values travel as they are."""
    return 1.0 if quantizer is None else quantizer.tile_nbytes / (GRADIENT_NBYTES * quantizer.tile_numel)


def require_carried(algorithm: Algorithm, ranks: int, wire: str) -> None:
    """Raise `UsageError` if `algorithm` on `ranks` ranks cannot carry the codes of `wire`."""
    if wire in QUANTIZERS:
        require_compatible(algorithm, QUANTIZERS[wire])
        require_short_sums(algorithm.schedule(0, ranks), QUANTIZERS[wire])
