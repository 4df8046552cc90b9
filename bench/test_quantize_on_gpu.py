# SPDX-License-Identifier: Apache-2.0
"""Check on a GPU that the kernels of quantization give what their definitions say, bit by bit.

Without a GPU the definitions are compared with themselves, which shows that this file runs.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from kernel_variants import DEVICE
from test_on_gpu import random, same, there
from torch import Tensor

from commrt.kernels import quantize
from commrt.quantizer import NEAREST, STOCHASTIC, Float8, Quantizer

NUMELS = (1, 255, 2048, 5000, 1_000_003)
KEY = 0x9E37_79B9_7F4A_7C15
KINDS = [*(Quantizer(bits) for bits in (2, 3, 4, 5, 6, 7, 8)), Float8(), Quantizer(8, 64), Quantizer(4, 1024)]
ENCODED = [
    *(Quantizer(bits, feedback=feedback) for bits, feedback in product((2, 4, 8), (False, True))),
    *(Quantizer(bits, rounding=STOCHASTIC) for bits in (2, 4, 8)),
    *(Float8(feedback=feedback) for feedback in (False, True)),
]

pytestmark = pytest.mark.usefixtures("one_thread")


def values(numel: int, seed: int) -> Tensor:
    """Return values of many magnitudes; some blocks hold zeros, infinity or NaN."""
    x = random(numel, torch.float32, seed)
    x[300:812] = 0.0
    x[1100:1101] = -float("inf")
    x[1400:1401] = float("nan")
    x[1792:2048] *= 1e-38
    return x


def quantized(quantizer: Quantizer, numel: int, count: int) -> Tensor:
    """Return `count` rows of codes, [count, nbytes]."""
    rows = torch.zeros(count, quantizer.nbytes(numel), dtype=torch.uint8)
    for seed, row in enumerate(rows):
        quantize.quantize(values(numel, 50 + seed), row, quantizer)
    return rows


@pytest.mark.parametrize("quantizer", ENCODED, ids=lambda c: f"{c}, {c.rounding}" if c.rounding != NEAREST else str(c))
def test_codes_and_what_they_lose_are_their_definition(quantizer: Quantizer):
    for numel in NUMELS:
        here, left = values(numel, 0), values(numel, 1) * 0.01
        want = torch.full((quantizer.nbytes(numel),), 0xEE, dtype=torch.uint8)
        away, away_left, got = there(here), there(left), there(want)
        quantize.quantize(here, want, quantizer, left if quantizer.feedback else None, KEY)
        quantize.quantizing(away, got, quantizer, away_left if quantizer.feedback else None)(KEY)
        assert torch.equal(got.cpu(), want)
        assert same(away_left, left)


@pytest.mark.parametrize("quantizer", KINDS, ids=str)
def test_decoding_and_adding_codes_are_their_definitions(quantizer: Quantizer):
    for numel, count in zip(NUMELS, (1, 2, 7, 3, 2), strict=True):
        rows, total = quantized(quantizer, numel, count), values(numel, 9).nan_to_num(3.0, 3.0, 3.0)
        away, dequantized, away_total = there_rows(rows), torch.empty(numel, device=DEVICE), there(total)
        want = torch.empty(numel)
        quantize.dequantize(rows[0], want, quantizer)
        quantize.dequantizing(away[0], dequantized, quantizer)()
        quantize.add_quantized(total, list(rows), quantizer)
        quantize.adding_quantized(away_total, list(away), quantizer)()
        assert same(dequantized, want)
        assert same(away_total, total)


def there_rows(rows: Tensor) -> Tensor:
    """Return a copy on the device."""
    return rows.to(DEVICE)
