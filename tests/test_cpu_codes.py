# SPDX-License-Identifier: Apache-2.0
"""What Numba compiles for codes on CPUs, against their definition in plain torch bit by bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from codings import ENCODINGS, same
from hypothesis import given
from hypothesis import strategies as st

from commrt.kernels import codes, quantizing
from commrt.quantizer import BLOCKS, STOCHASTIC, Float8, Int4, Int8, Quantizer

cpu_codes = pytest.importorskip("commrt.kernels.cpu_codes", reason="Numba is an extra")
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


def coded_alike(x, coding, key=KEY):
    """Return True if codes, residual, decoded values and sums are equal."""
    left, tiles = values(len(x), 1) * 0.01, torch.full((2, coding.nbytes(len(x))), 0xEE, dtype=torch.uint8)
    left = left.nan_to_num(0.0, 0.0, 0.0)
    owed = [left.clone(), left.clone()] if coding.feedback else [None, None]
    codes.encode(x, tiles[0], coding, owed[0], key)
    cpu_codes.encode_call(x, tiles[1], coding, owed[1])(key)
    out, total = torch.full((2, len(x)), -1.0), left.repeat(2, 1)
    codes.decode(tiles[0], out[0], coding)
    cpu_codes.decode_call(tiles[0], out[1], coding)()
    codes.add_codes(total[0], [tiles[0], tiles[1]], coding)
    cpu_codes.add_codes_call(total[1], [tiles[0], tiles[1]], coding)()
    owes_alike = not coding.feedback or same(*owed)
    return torch.equal(*tiles) and owes_alike and same(*out) and same(*total)


def test_each_coding_gives_the_bits_of_its_definition():
    rows = product((1, 2047, 6000), ENCODINGS)
    assert [(numel, coding) for numel, coding in rows if not coded_alike(values(numel), coding)] == []


def test_blocks_of_all_sizes_do():
    kinds = (Int8(), Quantizer(3, feedback=True, rounding=STOCHASTIC), Float8(feedback=True))
    codings = [replace(kind, block=block) for block, kind in product(BLOCKS, kinds)]
    assert [coding for coding in codings if not coded_alike(values(9000), coding)] == []


@given(x=VALUES, coding=st.sampled_from(ENCODINGS), key=st.integers(0, 2**64 - 1))
def test_any_values_and_any_key_do(x, coding, key):
    assert coded_alike(torch.tensor(x), replace(coding, block=64), key)


def test_rows_are_added_in_their_order_over_many_pieces():
    coding, numel = Int4(feedback=False), cpu_codes.PIECE_NUMEL * 2 + 77
    rows = torch.zeros(3, coding.nbytes(numel), dtype=torch.uint8)
    for seed, row in enumerate(rows):
        codes.encode(torch.randn(numel) * (seed + 1), row, coding)
    want = torch.randn(numel)
    got = want.clone()
    codes.add_codes(want, list(rows), coding)
    cpu_codes.add_codes_call(got, list(rows), coding)()
    assert torch.equal(got, want)


def test_memory_that_a_transport_lends_after_binding_is_read():
    coding, x = Int8(), torch.randn(2048)
    received, lent = torch.zeros(2, coding.nbytes(len(x)), dtype=torch.uint8)
    codes.encode(x, lent, coding)
    want, got = torch.zeros(2, len(x))
    add = cpu_codes.add_codes_call(got, [received], coding)
    received.set_(lent)
    codes.decode(lent, want, coding)
    add()
    assert torch.equal(got, want)


@pytest.mark.parametrize("error", [RuntimeError("cannot cache function"), ImportError("Numba needs NumPy 2.3 or less")])
def test_plain_torch_codes_where_numba_cannot(monkeypatch, error):
    def refuse(_):
        raise error

    monkeypatch.setattr(quantizing, "import_module", refuse)
    quantizing.compiled_codes.cache_clear()
    try:
        x, tiles = torch.randn(100), torch.zeros(2, Int8().nbytes(100), dtype=torch.uint8)
        quantizing.encoding(x, tiles[0], Int8(), None)(0)
        codes.encode(x, tiles[1], Int8())
        assert torch.equal(*tiles)
    finally:
        quantizing.compiled_codes.cache_clear()
