# SPDX-License-Identifier: Apache-2.0
"""The wires of the command line: what a gradient is on each, its price, and which can carry it.

Pure arithmetic: nothing runs, and nothing changes once it is made.
"""

from __future__ import annotations

from math import ceil, inf

import numpy as np
from numpy.typing import ArrayLike

from commrt.algorithm import Algorithm
from commrt.options import require_compatible
from commrt.pricing.cluster import Cluster, seconds
from commrt.pricing.price import Price, Pricing
from commrt.proof.summing import require_short_sums
from commrt.quantizer import QUANTIZERS, Quantizer
from commrt.schedule import Schedule

GRADIENT_NBYTES = 4
Item = int | Quantizer
"""The bytes of a gradient on the wire, or the codes that stand for it."""
ITEMS: dict[str, Item] = {"fp32": GRADIENT_NBYTES, "bf16": 2, "fp16": 2, **QUANTIZERS}
"""What a gradient is on the wire, by its name on the command line."""


class WirePricing(Pricing):
    """As `Pricing`, with the time to pack, and with `quantizer` of codes instead of values.

    A rank then also turns all its values into codes before the first step, and all codes into
    values after the last one. Chunks are whole tiles. It replaces `price`, which its parent never
    calls itself.
    """

    def __init__(
        self, schedule: Schedule, cluster: Cluster, quantizer: Quantizer | None = None
    ) -> None:
        self.quantizer = quantizer
        # bytes on the wire of a byte of gradients
        self._share = (
            1.0
            if quantizer is None
            else quantizer.tile_nbytes / (GRADIENT_NBYTES * quantizer.tile_numel)
        )
        # codes are added as fp32 values
        is_known = quantizer is not None and cluster.code_gbytes_per_s is not None
        speed = cluster.code_gbytes_per_s if is_known else cluster.reduce_gbytes_per_s
        super().__init__(schedule, cluster, seconds(1.0, speed) / self._share)

    def price(self, nbytes: float, start_s: ArrayLike = 0.0) -> Price:
        """Return the price for `nbytes` of values or codes per rank; see `Pricing.price`."""
        code_s = self.code_s(nbytes)
        price = super().price(
            self.moved_nbytes(nbytes), np.asarray(start_s, dtype=np.float64) + code_s
        )
        return price._replace(finish_s=price.finish_s + code_s)

    def moved_nbytes(self, nbytes: float) -> float:
        """Return the size of the buffer if all chunks are as large as the largest one."""
        if self.quantizer is None or not 0 <= nbytes < inf:
            return nbytes
        tiles = (
            ceil(nbytes / self.quantizer.tile_nbytes / self.schedule.chunks) * self.schedule.chunks
        )
        return float(tiles * self.quantizer.tile_nbytes)

    def code_s(self, nbytes: float) -> float:
        """Return the seconds to turn values into `nbytes` of codes; back takes as many."""
        is_quantized = self.quantizer is not None and self.steps
        return (
            seconds(nbytes / self._share, self.cluster.code_gbytes_per_s) if is_quantized else 0.0
        )

    def pack_s(self, nbytes: float) -> float:
        """Return the seconds that packing, or unpacking, a bucket of `nbytes` on the wire takes."""
        return seconds(nbytes / self._share, self.cluster.pack_gbytes_per_s)


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
