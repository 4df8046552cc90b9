# SPDX-License-Identifier: Apache-2.0
"""Codes by Triton, in its interpreter, and by Numba are those of the definition bit by bit; and the definition."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreter import interpret, interpreted_gpu, require, watched
from quantizers import KINDS, ODD, QUANTIZERS, same, ties, values

from commrt.kernels import philox, quantize, quantize_dispatch
from commrt.kernels.device import variants
from commrt.quantizer import NEAREST, STOCHASTIC, TILE_BLOCKS, Float8, Int2, Int4, Int8, Quantizer

KEY = 0xF234_5678_9ABC_DEF1
DEFINITION = SimpleNamespace(
    quantizing=lambda x, codes, quantizer, left: lambda key: quantize.quantize(x, codes, quantizer, left, key),
    dequantizing=lambda codes, out, quantizer: lambda: quantize.dequantize(codes, out, quantizer),
    adding_quantized=lambda total, rows, quantizer: lambda: quantize.add_quantized(total, rows, quantizer),
)
BACKENDS = {"triton": interpreted_gpu, "numba": nullcontext}


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "numba":
        pytest.importorskip("commrt.kernels.cpu_quantize", reason="Numba is an extra")
    return BACKENDS[request.param]


def coded(ways, x, quantizer, left, key=KEY):
    """The codes of `x`, and what `left` becomes."""
    codes = torch.full((quantizer.nbytes(len(x)),), 0xEE, dtype=torch.uint8)
    left = left.clone() if quantizer.feedback else None
    ways.quantizing(x, codes, quantizer, left)(key)
    return codes, left


def decoded(ways, rows, quantizer, numel):
    """The values of the first row of codes, and what the sum with all rows is."""
    out, total = torch.full((numel,), -1.0), values(numel, quantizer.block, seed=2).nan_to_num(3.0, 3.0, 3.0)
    ways.dequantizing(rows[0], out, quantizer)()
    ways.adding_quantized(total, [*rows], quantizer)()
    return out, total


def rows_of(quantizer, numel, count):
    rows = torch.zeros(count, quantizer.nbytes(numel), dtype=torch.uint8)
    for seed, row in enumerate(rows):
        quantize.quantize(values(numel, quantizer.block, 50 + seed), row, quantizer)
    return rows


def is_coded_alike(backend, quantizer, x, left, key=KEY):
    with backend():
        got, got_left = coded(quantize_dispatch, x, quantizer, left, key)
    want, want_left = coded(DEFINITION, x, quantizer, left, key)
    return torch.equal(got, want) and (want_left is None or same(got_left, want_left))


def are_values_coded_alike(backend, quantizer, numel):
    x, left = values(numel, quantizer.block), values(numel, quantizer.block, seed=1) * 0.01
    if numel > quantizer.block:
        x[: quantizer.block] = ties(quantizer)
        left[: quantizer.block] = 0.0
    return is_coded_alike(backend, quantizer, x, left)


def are_ties_coded_alike(backend, quantizer):
    return is_coded_alike(backend, quantizer, ties(quantizer), torch.zeros(quantizer.block))


def are_decoded_alike(backend, quantizer, numel, rows):
    with backend():
        got = decoded(quantize_dispatch, rows, quantizer, numel)
    return all(map(same, got, decoded(DEFINITION, rows, quantizer, numel)))


def are_rows_decoded_alike(backend, quantizer, numel, count):
    return are_decoded_alike(backend, quantizer, numel, rows_of(quantizer, numel, count))


def are_any_bytes_decoded_alike(backend, quantizer):
    row = torch.arange(quantizer.nbytes(700)).mul(37).to(torch.uint8)
    return are_decoded_alike(backend, quantizer, 700, row[None])


def over_two_tiles(block):
    """So many values that each odd one has a block, that some blocks are as others, and one value is left."""
    return (len(ODD) + 3) * block + 13


def test_codes_are_those_of_the_definition_and_nothing_else_is_touched(backend):
    require(are_values_coded_alike, [(each, over_two_tiles(each.block)) for each in QUANTIZERS], backend)
    require(are_values_coded_alike, [(replace(each, block=64), 255) for each in KINDS], backend)
    require(are_values_coded_alike, [(Int4(64), 1), (Int4(64), 1024), (Int8(64), 512)], backend)
    quantizers = Quantizer(3, 64, feedback=True), Float8(64, feedback=True)
    require(are_values_coded_alike, [(each, over_two_tiles(64)) for each in quantizers], backend)
    require(are_ties_coded_alike, [(Float8(64, feedback=True),)], backend)


def test_what_is_decoded_is_that_of_the_definition(backend):
    require(are_rows_decoded_alike, [(replace(each, block=64), over_two_tiles(64), 2) for each in KINDS], backend)
    require(are_rows_decoded_alike, [(Int4(64), *size) for size in ((1, 7), (255, 1), (1024, 2))], backend)
    require(are_rows_decoded_alike, [(Quantizer(5, 64), 702, 3)], backend)
    require(are_any_bytes_decoded_alike, [(replace(each, block=64),) for each in KINDS], backend)


def test_blocks_of_all_sizes_are_coded_alike(backend):
    for block, kind in zip((128, 256, 512, 1024), (0, 10, 14, -1), strict=True):
        quantizer = replace(QUANTIZERS[kind], block=block)
        require(are_values_coded_alike, [(quantizer, over_two_tiles(block))], backend)
        require(are_rows_decoded_alike, [(quantizer, over_two_tiles(block), 2)], backend)


def test_a_program_finds_its_tile_where_no_int32_counts_values_codes_and_random_numbers():
    quantizer, far, numel = Int8(64, rounding=STOCHASTIC), 2**31 // 512 + 3, 500
    x, want, got = values(numel, 64), *torch.zeros(2, quantizer.tile_nbytes, dtype=torch.uint8)
    numbers = philox.uniform(KEY, far, 1, quantizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "uniform", lambda *_: numbers)
        quantize.quantize(x, want, quantizer)
    bases = [(x.data_ptr() - far * 4 * 512) % 2**64] * 2
    bases += [(got.data_ptr() - far * len(got)) % 2**64]
    with watched([x, got]):
        interpret(variants.quantize(quantizer, feedback=False), [far], *bases, far * 512 + numel, KEY)
    assert torch.equal(got, want)


def does_every_random_bit_count(backend):
    """True if values that the random numbers just lift to 1 become 1, and are coded as such."""
    quantizer = Int2(64, feedback=False, rounding=STOCHASTIC)
    x = 1 - philox.uniform(KEY, 0, 2, quantizer).flatten()
    x[:: quantizer.block] = 1.0
    assert torch.equal(quantized_and_back(x, quantizer)[0], torch.ones_like(x))
    return is_coded_alike(backend, quantizer, x, x)


def is_largest_code_alike(backend):
    """True if the largest value of a block keeps its code where rounding lifts the sum with a number close to 1."""
    quantizer, key = Int8(64, rounding=STOCHASTIC), 1
    lifts_to_128 = philox.uniform(key, 0, 1, quantizer).flatten() > 1 - 2.0**-19
    assert lifts_to_128.any()
    x = torch.where(lifts_to_128, 127.0, 1.0)
    x[:: quantizer.block] = 127.0
    return is_coded_alike(backend, quantizer, x, x, key)


def test_every_bit_of_a_random_number_counts_and_no_number_makes_a_code_too_large(backend):
    assert does_every_random_bit_count(backend)
    assert is_largest_code_alike(backend)


def test_random_numbers_are_philox():
    known = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # of Random123 for key 0 and counter 0
    numbers = philox.uniform(0, 0, 1, Int8(64))[0, ::128]
    assert numbers.tolist() == [(word >> 8) * 2.0**-24 for word in known]


SMALL_BLOCKS = st.sampled_from([replace(quantizer, block=64) for quantizer in QUANTIZERS])
KEYS = st.integers(0, 2**64 - 1)


def test_tensors_of_several_pieces_are_coded_alike():
    """Numba codes in one piece, and adds in other pieces than the definition."""
    pytest.importorskip("commrt.kernels.cpu_quantize", reason="Numba is an extra")
    numel = quantize.PIECE_NUMEL + 77
    require(are_values_coded_alike, [(Int4(rounding=STOCHASTIC), numel)], nullcontext)
    require(are_rows_decoded_alike, [(Int4(), numel, 3)], nullcontext)


def test_memory_that_a_transport_lends_after_binding_is_read():
    sum_call = pytest.importorskip("commrt.kernels.cpu_quantize", reason="Numba is an extra").sum_call
    quantizer, x = Int8(), torch.randn(2048)
    received, lent = torch.zeros(2, quantizer.nbytes(len(x)), dtype=torch.uint8)
    quantize.quantize(x, lent, quantizer)
    want, got = torch.zeros(2, len(x))
    add = sum_call([received], got, quantizer, is_added=True)
    received.set_(lent)
    quantize.dequantize(lent, want, quantizer)
    add()
    assert torch.equal(got, want)


@pytest.mark.parametrize("error", [RuntimeError("cannot cache function"), ImportError("Numba needs NumPy 2.3 or less")])
def test_plain_torch_codes_where_numba_cannot(monkeypatch, error):
    def refuse(_):
        raise error

    monkeypatch.setattr(quantize_dispatch, "import_module", refuse)
    quantize_dispatch.compiled_quantize.cache_clear()
    try:
        assert is_coded_alike(nullcontext, Int8(), torch.randn(100), None)
    finally:
        quantize_dispatch.compiled_quantize.cache_clear()


def test_buffers_that_begin_elsewhere_are_coded_in_plain_torch():
    quantizer, x = Int8(64), values(513, 64)[1:]
    with interpreted_gpu() as launches:
        codes, _ = coded(quantize_dispatch, x, quantizer, None)
        quantize_dispatch.dequantizing(codes, x, quantizer)()
        quantize_dispatch.adding_quantized(x, [codes], quantizer)()
    assert launches.names == []


def test_rows_that_lie_unevenly_are_refused():
    quantizer, rows = Int8(64), torch.zeros(5, Int8(64).tile_nbytes, dtype=torch.uint8)
    with interpreted_gpu(), pytest.raises(ValueError, match="must lie evenly"):
        quantize_dispatch.adding_quantized(torch.zeros(512), [rows[0], rows[1], rows[4]], quantizer)


def quantized_and_back(x, quantizer, key=KEY, residual=None):
    """What `x` becomes, and the scale of each value's code."""
    codes, out = torch.zeros(quantizer.nbytes(len(x)), dtype=torch.uint8), torch.zeros(len(x))
    quantize.quantize(x, codes, quantizer, residual, key)
    quantize.dequantize(codes, out, quantizer)
    scales = codes.view(-1, quantizer.tile_nbytes)[:, : 2 * TILE_BLOCKS].contiguous().view(torch.bfloat16)
    return out, scales.flatten().float().repeat_interleave(quantizer.block)[: len(x)]


FINITE = st.lists(st.floats(-(2.0**125), 2.0**125, width=32), min_size=1, max_size=130).map(torch.tensor)


@given(quantizer=SMALL_BLOCKS, x=FINITE, key=KEYS)
def test_a_code_is_at_most_half_a_step_away_and_the_residual_is_the_rest(quantizer, x, key):
    left = torch.zeros_like(x)
    out, steps = quantized_and_back(x, quantizer, key, left)
    lost = x.double() - out.double()
    assert torch.equal(left, x - out)
    if quantizer.rounding == NEAREST:
        assert torch.equal(left.double(), lost)  # nothing is lost from the loss
    most = 1.0 if quantizer.rounding == STOCHASTIC else 0.5
    allowed = steps * most if not quantizer.is_float else torch.maximum(x.abs() / 16, steps / 1024)
    assert torch.all((lost.abs() <= allowed * 1.0001) | (x.abs() < 2.0**-99))
