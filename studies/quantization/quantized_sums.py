# SPDX-License-Identifier: Apache-2.0
"""Replay quantized sums in one process, and compare their errors by schedule: for `compare_wires`.

Each schedule is replayed as the runtime would run it. A rank quantizes a chunk again whenever the chunk has changed
since it was quantized last. Copies pass on the same bytes. At the end each rank dequantizes the bytes that it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, stdev

import numpy as np
import torch
from torch import Tensor

import commrt
from commrt.algorithm import Algorithm
from commrt.errors import UsageError
from commrt.kernels.quantize import add_quantized, dequantize, quantize
from commrt.proof.summing import require_short_sums
from commrt.proof.symbols import select
from commrt.schedule import ADD, IntArray, Schedule, Step

__all__ = ["print_errors", "relative_error", "replayed", "replayed_error"]

WORLDS, DRAWS, TILES = (4, 8, 16, 32, 64), 6, 64
"""`TILES` is the number of tiles of the buffer of each rank: chunks of many ranks have one tile."""
WIRES = (commrt.Int8(), commrt.Int4(feedback=False))
ALGORITHMS: dict[str, Algorithm] = {
    "Direct()": commrt.Direct(),
    "Direct(within=4)": commrt.Direct(within=4),
    "HalvingDoubling()": commrt.HalvingDoubling(),
    "Ring()": commrt.Ring(),
}


class _Cells:
    """Values and quantized bytes of all (rank, chunk) pairs, numbered ``rank * chunks + chunk``."""

    def __init__(self, values: Tensor, quantizer: commrt.quantization.Quantizer) -> None:
        ranks, self.chunks, numel = values.shape
        self.values, self.quantizer = values.reshape(-1, numel).clone(), quantizer
        self.quantized = torch.zeros(ranks * self.chunks, quantizer.nbytes(numel), dtype=torch.uint8)
        self.is_quantized = np.zeros(ranks * self.chunks, dtype=bool)

    def play(self, step: Step) -> None:
        """Play one step; all transfers read the bytes from before it."""
        cells = select(step, 0, self.chunks)
        self._quantize(np.unique(cells.src))
        received, adds = self.quantized[cells.src], cells.combine == ADD
        for wave in _waves(cells.dst, adds):
            self._add(cells.dst[wave], received[wave])
        self.quantized[cells.dst[~adds]] = received[~adds]
        self.is_quantized[cells.dst] = ~adds

    def _quantize(self, sent: IntArray) -> None:
        """Quantize those of the cells `sent` that have changed."""
        stale = sent[~self.is_quantized[sent]]
        if len(stale):
            fresh = torch.empty_like(self.quantized[stale])
            quantize(self.values[stale].flatten(), fresh.view(-1), self.quantizer)
            self.quantized[stale], self.is_quantized[stale] = fresh, True

    def _add(self, cells: IntArray, received: Tensor) -> None:
        sums = self.values[cells].flatten()
        add_quantized(sums, [received.contiguous().view(-1)], self.quantizer)
        self.values[cells] = sums.view(len(cells), -1)

    def dequantized(self) -> Tensor:
        """Return the values of all bytes; all ranks must end with bytes in each chunk."""
        if not self.is_quantized.all():
            raise RuntimeError("a rank ends with a chunk that it has never quantized")
        found = torch.empty_like(self.values)
        dequantize(self.quantized.view(-1), found.view(-1), self.quantizer)
        return found


def _waves(dst: IntArray, adds: np.ndarray) -> Iterator[IntArray]:
    """Yield rows that add, in order of sender, so that no wave names a cell twice."""
    rest = np.flatnonzero(adds)
    while len(rest):
        _, first = np.unique(dst[rest], return_index=True)
        yield rest[first]
        rest = np.delete(rest, first)


def replayed(schedule: Schedule, values: Tensor, quantizer: commrt.quantization.Quantizer) -> Tensor:
    """Return what all ranks end with, [ranks, chunks, n], for `values` in fp32 of that shape; n in whole tiles."""
    if values.shape[2] % quantizer.tile_numel:
        raise ValueError(f"chunks of {values.shape[2]} values: give a multiple of {quantizer.tile_numel}")
    cells = _Cells(values, quantizer)
    for step in schedule.checked_steps():
        cells.play(step)
    return cells.dequantized().view(values.shape)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the squared error relative to the square of `exact`, fp64."""
    return float((found.double() - exact).square().sum() / exact.square().sum())


def replayed_error(algorithm: Algorithm, ranks: int, quantizer: commrt.quantization.Quantizer, seed: int) -> float:
    """Return the error of one sum of independent normal gradients; raise `RuntimeError` if ranks differ."""
    schedule = algorithm.schedule(0, ranks)
    numel = quantizer.tile_numel * max(1, TILES // schedule.chunks)
    values = torch.randn(ranks, schedule.chunks, numel, generator=torch.Generator().manual_seed(seed))
    found = replayed(schedule, values, quantizer)
    if not (found == found[0]).all():
        raise RuntimeError(f"{schedule.name}: ranks end with different sums")
    return relative_error(found[0], values.double().sum(0))


def is_refused(algorithm: Algorithm, ranks: int, quantizer: commrt.quantization.Quantizer) -> bool:
    """Return True if attach refuses this schedule for quantized wires."""
    try:
        require_short_sums(algorithm.schedule(0, ranks), quantizer)
    except UsageError:
        return True
    return False


def print_errors() -> None:
    """Print a table for each wire."""
    print(f"relative squared error of one sum of independent normal gradients, mean of {DRAWS} draws, replayed")
    print("in brackets: the ratio to 4 ranks; * attach refuses to quantize this schedule, so it is only replayed here")
    for quantizer in WIRES:
        spreads: list[float] = []
        print(f"\n{quantizer!s:<8}", *(f"{name:>22}" for name in ALGORITHMS), flush=True)
        fewest: dict[str, float] = {}
        for ranks in WORLDS:
            row = [_cell(name, ranks, quantizer, fewest, spreads) for name in ALGORITHMS]
            print(f"{ranks:>2} ranks", *(f"{cell:>22}" for cell in row), flush=True)
        print(f"largest standard error of a mean: {100 * max(spreads):.2f} %")


def _cell(
    name: str, ranks: int, quantizer: commrt.quantization.Quantizer, fewest: dict[str, float], spreads: list[float]
) -> str:
    """Return a cell's text; keeps the value for the fewest ranks, and the relative standard error."""
    errors = [replayed_error(ALGORITHMS[name], ranks, quantizer, 1000 * ranks + draw) for draw in range(DRAWS)]
    error = mean(errors)
    spreads.append(stdev(errors) / error / DRAWS**0.5)
    star = "*" if is_refused(ALGORITHMS[name], ranks, quantizer) else " "
    return f"{error:.3e} ({error / fewest.setdefault(name, error):5.2f}){star}"
