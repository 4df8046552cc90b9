# SPDX-License-Identifier: Apache-2.0
"""The wires of the command line: what a gradient is on each, and how many bytes that takes."""

from __future__ import annotations

from commrt.options import require_compatible, require_short_sums
from commrt.pricing.price import GRADIENT_NBYTES
from commrt.quantizer import Float8, Int2, Int4, Int8, Quantizer
from commrt.schedule import Algorithm

Item = int | Quantizer
"""The bytes of a gradient on the wire, or the codes that stand for it."""
QUANTIZERS: dict[str, Quantizer] = {"int8": Int8(), "int4": Int4(), "int2": Int2(), "float8": Float8()}
ITEMS: dict[str, Item] = {"fp32": GRADIENT_NBYTES, "bf16": 2, "fp16": 2, **QUANTIZERS}
"""What a gradient is on the wire, by its name on the command line."""


def wire_nbytes(numel: int, item: Item) -> float:
    """Return the bytes of `numel` gradients on the wire.

    >>> wire_nbytes(1_000_000, ITEMS["bf16"]), wire_nbytes(1_000_000, ITEMS["int4"])
    (2000000.0, 508560.0)
    """
    return float(item.nbytes(numel) if isinstance(item, Quantizer) else numel * item)


def require_carried(algorithm: Algorithm, ranks: int, wire: str) -> None:
    """Raise `UsageError` if `algorithm` on `ranks` ranks cannot carry the codes of `wire`."""
    if wire in QUANTIZERS:
        require_compatible(algorithm, QUANTIZERS[wire])
        require_short_sums(algorithm.schedule(0, ranks), QUANTIZERS[wire])
