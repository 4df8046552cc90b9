# SPDX-License-Identifier: Apache-2.0
"""What Numba compiles for codes on CPUs, against their definition in plain torch bit by bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantizers import QUANTIZERS, same

from commrt.kernels import quantize
from commrt.quantizer import BLOCKS, STOCHASTIC, Float8, Int4, Int8, Quantizer

cpu_quantize = pytest.importorskip("commrt.kernels.cpu_quantize", reason="Numba is an extra")
KEY = 0xF234_5678_9ABC_DEF1
ODD = (0.0, -0.0, 1e-42, 1e-38, 7.9e-31, 8.6e37, 1.5e38, -3e38, float("inf"), -float("inf"), float("nan"))
VALUES = st.lists(st.floats(width=32) | st.sampled_from(ODD), min_size=1, max_size=150)


def values(numel, seed=0):
    """Values over many magnitudes, with zeros, ties, and values that make a block infinite, NaN or zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * 10 ** torch.empty(numel).uniform_(-4, 2, generator=generator)
    x[300:900] = 0.0
    x[1024:1536] = torch.arange(len(x[1024:1536])).remainder(15) - 7.5
    for number, odd in enumerate(ODD):
        x[2048 + 300 * number : 2049 + 300 * number] = odd
    return x


def quantized_alike(x, quantizer, key=KEY):
    """Return True if codes, residual, dequantized values and sums are equal."""
    left, tiles = values(len(x), 1) * 0.01, torch.full((2, quantizer.nbytes(len(x))), 0xEE, dtype=torch.uint8)
    left = left.nan_to_num(0.0, 0.0, 0.0)
    owed = [left.clone(), left.clone()] if quantizer.feedback else [None, None]
    quantize.quantize(x, tiles[0], quantizer, owed[0], key)
    cpu_quantize.quantize_call(x, tiles[1], quantizer, owed[1])(key)
    out, total = torch.full((2, len(x)), -1.0), left.repeat(2, 1)
    quantize.dequantize(tiles[0], out[0], quantizer)
    cpu_quantize.sum_call([tiles[0]], out[1], quantizer, is_added=False)()
    quantize.add_quantized(total[0], [tiles[0], tiles[1]], quantizer)
    cpu_quantize.sum_call([tiles[0], tiles[1]], total[1], quantizer, is_added=True)()
    owes_alike = not quantizer.feedback or same(*owed)
    return torch.equal(*tiles) and owes_alike and same(*out) and same(*total)


def test_each_coding_gives_the_bits_of_its_definition():
    rows = product((1, 2047, 6000), QUANTIZERS)
    assert [(numel, quantizer) for numel, quantizer in rows if not quantized_alike(values(numel), quantizer)] == []


def test_blocks_of_all_sizes_do():
    kinds = (Int8(), Quantizer(3, feedback=True, rounding=STOCHASTIC), Float8(feedback=True))
    quantizers = [replace(kind, block=block) for block, kind in product(BLOCKS, kinds)]
    assert [quantizer for quantizer in quantizers if not quantized_alike(values(9000), quantizer)] == []


@given(x=VALUES, quantizer=st.sampled_from(QUANTIZERS), key=st.integers(0, 2**64 - 1))
def test_any_values_and_any_key_do(x, quantizer, key):
    assert quantized_alike(torch.tensor(x), replace(quantizer, block=64), key)


def test_rows_are_added_in_their_order_over_many_pieces():
    quantizer, numel = Int4(feedback=False), cpu_quantize.PIECE_NUMEL * 2 + 77
    rows = torch.zeros(3, quantizer.nbytes(numel), dtype=torch.uint8)
    for seed, row in enumerate(rows):
        quantize.quantize(torch.randn(numel) * (seed + 1), row, quantizer)
    want = torch.randn(numel)
    got = want.clone()
    quantize.add_quantized(want, list(rows), quantizer)
    cpu_quantize.sum_call(list(rows), got, quantizer, is_added=True)()
    assert torch.equal(got, want)


def test_memory_that_a_transport_lends_after_binding_is_read():
    quantizer, x = Int8(), torch.randn(2048)
    received, lent = torch.zeros(2, quantizer.nbytes(len(x)), dtype=torch.uint8)
    quantize.quantize(x, lent, quantizer)
    want, got = torch.zeros(2, len(x))
    add = cpu_quantize.sum_call([received], got, quantizer, is_added=True)
    received.set_(lent)
    quantize.dequantize(lent, want, quantizer)
    add()
    assert torch.equal(got, want)


@pytest.mark.parametrize("error", [RuntimeError("cannot cache function"), ImportError("Numba needs NumPy 2.3 or less")])
def test_plain_torch_codes_where_numba_cannot(monkeypatch, error):
    def refuse(_):
        raise error

    monkeypatch.setattr(quantize, "import_module", refuse)
    quantize.compiled_quantize.cache_clear()
    try:
        x, tiles = torch.randn(100), torch.zeros(2, Int8().nbytes(100), dtype=torch.uint8)
        quantize.quantizing(x, tiles[0], Int8(), None)(0)
        quantize.quantize(x, tiles[1], Int8())
        assert torch.equal(*tiles)
    finally:
        quantize.compiled_quantize.cache_clear()
