# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of quantization against their definition bit by bit, in Triton's interpreter; and the latter."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import complaint, interpret, interpreted_gpu, watched
from quantize_bugs import BUGS
from quantizers import KINDS, QUANTIZERS, same
from torch.utils._python_dispatch import TorchDispatchMode

import commrt
from commrt.kernels import quantize
from commrt.kernels.device import quantize as device
from commrt.kernels.device import variants
from commrt.kernels.device.quantize import add_quantized_kernel, dequantize_kernel, quantize_kernel
from commrt.kernels.quantize import PIECE_NUMEL
from commrt.quantizer import BITS, NEAREST, STOCHASTIC, TILE_BLOCKS, Float8, Int2, Int4, Int8, Quantizer
from commrt.testing.ranks import run_ranks

KEY = 0x9E37_79B9_7F4A_7C15
NUMELS = {64: (1, 255, 2701), 256: (255, 5000)}
STEP = 1.2890625
"""A bfloat16 whose inverse is not exact."""


def values(numel, seed=0):
    """Values over many magnitudes, with zeros, ties, tiny and huge ones; some blocks hold infinity or NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x *= 10 ** torch.empty(numel).uniform_(-4, 2, generator=generator)
    x[300:812] = 0.0
    x[1030:1040] = 1e-42
    x[1100:1101] = -float("inf")
    x[1400:1401] = float("nan")
    x[1792:2048] *= 1e-38
    x[2050:2051] = -1.5e38
    x[2600:2601] = 8e37
    return x


def ties(quantizer):
    """A block of values between two codes, whose scale is `STEP`."""
    if quantizer.is_float:
        every = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        between = (every[1:] + every[:-1]) / 2
        between = torch.cat([between, -between])
    else:
        between = torch.arange(-quantizer.most, quantizer.most) + 0.5
    block = between.repeat(-(-quantizer.block // len(between)))[: quantizer.block] * STEP
    block[0] = quantizer.largest * 0.9995 * STEP
    return block


def rows_of(quantizer, numel, count):
    """`count` rows of codes, [count, nbytes]."""
    rows = torch.zeros(count, quantizer.nbytes(numel), dtype=torch.uint8)
    for seed, row in enumerate(rows):
        quantize.quantize(values(numel, 50 + seed), row, quantizer)
    return rows


def options(quantizer):
    return {"BLOCK": quantizer.block, "BITS": quantizer.bits, "IS_FLOAT": quantizer.is_float}


def tiles(quantizer, numel):
    return -(-numel // quantizer.tile_numel)


def quantize_alike(quantizer, numel):
    """True if the kernel's codes and residual are those of the definition."""
    x, left = values(numel), values(numel, 1) * 0.01
    if numel > quantizer.block:
        x[: quantizer.block], left[: quantizer.block] = ties(quantizer), 0.0
    return quantized_alike(quantizer, x, left, KEY)


def quantized_alike(quantizer, x, left, key):
    numel = len(x)
    want_left, got = left.clone(), torch.full((2, quantizer.nbytes(numel)), 0xEE, dtype=torch.uint8)
    quantize.quantize(x, got[0], quantizer, want_left if quantizer.feedback else None, key)
    more = {"FEEDBACK": quantizer.feedback, "STOCHASTIC": quantizer.rounding == STOCHASTIC}
    with watched([x, left, got[1]]):
        quantize_kernel[(tiles(quantizer, numel),)](x, left, got[1], numel, key, **options(quantizer), **more)
    return torch.equal(got[0], got[1]) and same(left, want_left)


def dequantize_alike(quantizer, numel, source=None):
    source = rows_of(quantizer, numel, 1)[0] if source is None else source
    want, got = torch.full((2, numel), -1.0)
    quantize.dequantize(source, want, quantizer)
    with watched([source, got]):
        dequantize_kernel[(tiles(quantizer, numel),)](source, got, numel, **options(quantizer))
    return same(got, want)


def add_alike(quantizer, numel, count):
    rows = rows_of(quantizer, numel, count)
    want = values(numel).nan_to_num(3.0, 3.0, 3.0)
    got = want.clone()
    quantize.add_quantized(want, list(rows), quantizer)
    with watched([got, rows]):
        grid, stride = (tiles(quantizer, numel),), rows.stride(0) // 16
        add_quantized_kernel[grid](got, rows, stride, count, numel, **options(quantizer))
    return same(got, want)


def require(check, rows):
    """Require that no row is one for which `check` finds something wrong."""
    assert {row: said for row in rows if (said := complaint(check, *row))} == {}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_encode_is_its_definition_bit_by_bit_and_touches_nothing_else(kind):
    quantizers = [
        quantizer for quantizer in QUANTIZERS if (quantizer.bits, quantizer.is_float) == (kind.bits, kind.is_float)
    ]
    require(quantize_alike, [(quantizer, numel) for quantizer in quantizers for numel in NUMELS[quantizer.block]])


def test_decode_is_its_definition_bit_by_bit():
    quantizers = [replace(kind, block=block) for kind, block in product(KINDS, NUMELS)]
    require(dequantize_alike, [(quantizer, numel) for quantizer in quantizers for numel in NUMELS[quantizer.block]])


@pytest.mark.parametrize(("block", "sizes"), [(64, ((1, 7), (255, 2), (2701, 3))), (256, ((255, 1), (5000, 2)))])
def test_add_codes_is_its_definition_bit_by_bit(block, sizes):
    require(add_alike, [(replace(kind, block=block), *size) for kind, size in product(KINDS, sizes)])


def test_blocks_of_all_sizes_are_coded_alike():
    quantizers = [
        replace(QUANTIZERS[place], block=block) for place, block in zip((0, 10, -1), (128, 512, 1024), strict=True)
    ]
    require(quantize_alike, [(quantizer, 8 * quantizer.block + 777) for quantizer in quantizers])
    require(dequantize_alike, [(quantizer, 8 * quantizer.block + 777) for quantizer in quantizers])
    require(add_alike, [(quantizer, 8 * quantizer.block + 777, 2) for quantizer in quantizers])


def any_bytes_decode_alike(kind):
    quantizer = replace(kind, block=64)
    return dequantize_alike(quantizer, 700, torch.arange(quantizer.nbytes(700)).mul(37).to(torch.uint8))


def test_any_bytes_decode_alike():
    require(any_bytes_decode_alike, [(kind,) for kind in KINDS])


def is_far_program_alike():
    """True if a program finds its tile where no int32 counts: values, codes and random numbers."""
    quantizer, far, numel = Int8(64, rounding=STOCHASTIC), 2**31 // 512 + 3, 500
    x, want, got = values(numel), *torch.zeros(2, quantizer.tile_nbytes, dtype=torch.uint8)
    y = quantized(x, quantizer, far)
    variant = replace(variants.quantize(quantizer, feedback=False), kernel=quantize_kernel)
    bases = [
        (buffer.data_ptr() - far * nbytes) % 2**64 for buffer, nbytes in ((x, 4 * 512), (x, 4 * 512), (got, len(got)))
    ]
    with watched([x, got]):
        interpret(variant, [far], *bases, far * 512 + numel, KEY)
    want.copy_(y)
    return torch.equal(got, want)


def quantized(x, quantizer, number):
    """The codes of a tile's values, if it is tile `number` of a buffer."""
    tile = torch.zeros(quantizer.tile_nbytes, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        uniform = quantize.uniform
        patch.setattr(
            quantize, "uniform", lambda key, first, count, quantizer: uniform(key, first + number, count, quantizer)
        )
        quantize.quantize(x, tile, quantizer, key=KEY)
    return tile


def test_a_program_finds_what_no_int32_can_count():
    assert is_far_program_alike()


def is_every_random_bit_alike():
    """True if values that the random numbers just lift to 1 become 1, by the kernel too."""
    quantizer = Int2(64, feedback=False, rounding=STOCHASTIC)
    x = 1 - quantize.uniform(KEY, 0, 2, quantizer).flatten()
    x[:: quantizer.block] = 1.0
    assert torch.equal(quantized_and_back(x, quantizer)[0], torch.ones_like(x))
    return quantized_alike(quantizer, x, x, KEY)


def is_largest_code_alike():
    """True if the largest value of a block keeps its code where rounding lifts the sum with a number close to 1."""
    quantizer = Int8(64, rounding=STOCHASTIC)
    rounded_to_128 = 1 - 2.0**-19
    key = next(key for key in range(5000) if quantize.uniform(key, 0, 1, quantizer).max() > rounded_to_128)
    x = torch.where(quantize.uniform(key, 0, 1, quantizer).flatten() > rounded_to_128, 127.0, 1.0)
    x[:: quantizer.block] = 127.0
    return quantized_alike(quantizer, x, x, key)


def test_every_bit_of_a_random_number_counts_and_no_number_makes_a_code_too_large():
    assert is_every_random_bit_alike()
    assert is_largest_code_alike()


@triton.jit
def randint4x_kernel(out, key, first, COUNT: tl.constexpr):  # noqa: N803
    place = tl.arange(0, COUNT)
    a, b, c, d = tl.randint4x(key, first + place)
    tl.store(out + place, a)
    tl.store(out + COUNT + place, b)
    tl.store(out + 2 * COUNT + place, c)
    tl.store(out + 3 * COUNT + place, d)


def is_random_alike(key):
    quantizer, first = Int8(64), 5
    quarter = quantizer.tile_numel // 4
    words = torch.zeros(4, quarter, dtype=torch.int32)
    randint4x_kernel[(1,)](words, key, first * quarter, COUNT=quarter)
    want = (words.long() & 0xFFFFFFFF) >> 8
    return torch.equal(quantize.uniform(key, first, 1, quantizer), want.float().mul(2.0**-24).view(1, -1))


def test_random_numbers_are_those_of_triton():
    require(is_random_alike, [(0,), (1,), (KEY,), (2**64 - 1,)])


def test_random_numbers_are_philox():
    known = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # of Random123 for key 0 and counter 0
    numbers = quantize.uniform(0, 0, 1, Int8(64))[0, ::128]
    assert numbers.tolist() == [(word >> 8) * 2.0**-24 for word in known]


def test_launches_on_a_gpu_give_what_a_cpu_gives():
    quantizer, numel = Int4(64, rounding=STOCHASTIC), 1500
    x, left, wire = values(numel), values(numel, 1), torch.zeros(quantizer.nbytes(numel), dtype=torch.uint8)
    out, before = torch.zeros(numel), left.clone()
    rows = rows_of(quantizer, numel, 3)
    total = torch.ones(numel)
    wanted = [tensor.clone() for tensor in (x, left, wire, out, total)]
    run_all(quantizer, rows, *wanted)
    with interpreted_gpu() as launches:
        run_all(quantizer, rows, x, left, wire, out, total)
    assert launches.names == ["quantize_kernel", "dequantize_kernel", "add_quantized_kernel"]
    assert all(map(same, (left, out, total), (wanted[1], wanted[3], wanted[4])))
    assert torch.equal(wire, wanted[2])
    assert not same(left, before)


def run_all(quantizer, rows, x, left, wire, out, total):
    quantize.quantizing(x, wire, quantizer, left)(KEY)
    quantize.dequantizing(wire, out, quantizer)()
    quantize.adding_quantized(total, list(rows), quantizer)()


def trained(world, wire):
    """The weights of a small model after two steps."""
    model = torch.nn.Linear(40, 30)
    with torch.no_grad():
        for param in model.parameters():  # ranks are threads, which share torch's generator
            param.copy_(torch.linspace(-1, 1, param.numel()).view_as(param))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    commrt.attach(model, optimizer, commrt.Direct(), world=world, wire=wire)
    source = torch.Generator().manual_seed(world.rank)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 40, generator=source)).square().sum().backward()
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize("wire", [Int8(64), Int4(64, rounding=STOCHASTIC), Float8(64, feedback=True)], ids=str)
def test_training_with_the_kernels_gives_the_bits_of_plain_torch(wire):
    want = run_ranks(3, lambda world: trained(world, wire))
    with interpreted_gpu() as launches:
        got = run_ranks(3, lambda world: trained(world, wire))
    assert {"quantize_kernel", "dequantize_kernel", "add_quantized_kernel"} <= set(launches.names)
    assert all(map(torch.equal, got, want))


def test_buffers_that_begin_elsewhere_are_coded_in_plain_torch():
    quantizer, x = Int8(64), values(513)[1:]
    wire = torch.zeros(quantizer.nbytes(512), dtype=torch.uint8)
    with interpreted_gpu() as launches:
        quantize.quantizing(x, wire, quantizer, None)(KEY)
        quantize.dequantizing(wire, x, quantizer)()
        quantize.adding_quantized(x, [wire], quantizer)()
    assert launches.names == []


def test_rows_that_lie_unevenly_are_refused():
    quantizer, rows = Int8(64), torch.zeros(5, Int8(64).tile_nbytes, dtype=torch.uint8)
    with interpreted_gpu(), pytest.raises(ValueError, match="must lie evenly"):
        quantize.adding_quantized(torch.zeros(512), [rows[0], rows[1], rows[4]], quantizer)


CHECKS = [
    is_far_program_alike,
    lambda: quantize_alike(Int8(64), 512),
    lambda: any_bytes_decode_alike(Float8()),
    is_every_random_bit_alike,
    lambda: add_alike(Quantizer(5, 64), 702, 3),
    lambda: quantize_alike(Float8(64, feedback=True), 2503),
    is_largest_code_alike,
    lambda: quantize_alike(Quantizer(3, 64, feedback=True), 1501),
    lambda: quantize_alike(Quantizer(7, 64, feedback=True, rounding=STOCHASTIC), 2503),
]
"""The quick ones first."""
KERNELS = ("quantize_kernel", "dequantize_kernel", "add_quantized_kernel")


def planted(bug, folder):
    """Import the kernels with `bug` in them."""
    before, after = BUGS[bug]
    source = Path(device.__file__).read_text()
    assert source.count(before) == 1
    path = folder / f"planted_{list(BUGS).index(bug)}.py"
    path.write_text(source.replace(before, after))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_missed(bug, folder):
    with pytest.MonkeyPatch.context() as patch:
        module = planted(bug, folder)
        for name in KERNELS:
            patch.setitem(globals(), name, getattr(module, name))
        return not any(map(complaint, CHECKS))


@pytest.mark.parametrize("part", range(6))
def test_every_planted_bug_is_noticed(tmp_path, part):
    assert [bug for bug in [*BUGS][part::6] if is_missed(bug, tmp_path)] == []


def test_what_looks_for_planted_bugs_passes_without_them():
    assert [*map(complaint, CHECKS)] == [None] * len(CHECKS)


def quantized_and_back(x, quantizer, key=KEY, residual=None):
    """Returns (what x became, its codes' scales [blocks], each block's largest distance from x)."""
    wire, out = torch.zeros(quantizer.nbytes(len(x)), dtype=torch.uint8), torch.zeros(len(x))
    quantize.quantize(x, wire, quantizer, residual, key)
    quantize.dequantize(wire, out, quantizer)
    scales = (
        wire.view(-1, quantizer.tile_nbytes)[:, : 2 * TILE_BLOCKS].contiguous().view(torch.bfloat16).flatten().float()
    )
    return out, scales.repeat_interleave(quantizer.block)[: len(x)]


FINITE = st.floats(-(2.0**125), 2.0**125, width=32)
SMALL_BLOCKS = st.sampled_from([replace(quantizer, block=64) for quantizer in QUANTIZERS])


@given(quantizer=SMALL_BLOCKS, x=st.lists(FINITE, min_size=1, max_size=130), key=st.integers(0, 2**64 - 1))
@settings(max_examples=200)
def test_a_code_is_at_most_half_a_step_away_and_the_residual_is_the_rest(quantizer, x, key):
    x = torch.tensor(x)
    left = torch.zeros_like(x)
    out, steps = quantized_and_back(x, quantizer, key, left)
    lost = x.double() - out.double()
    assert torch.equal(left, x - out)
    if quantizer.rounding == NEAREST:
        assert torch.equal(left.double(), lost)  # nothing is lost from the loss
    most = 1.0 if quantizer.rounding == STOCHASTIC else 0.5
    allowed = steps * most if not quantizer.is_float else torch.maximum(x.abs() / 16, steps / 1024)
    assert torch.all((lost.abs() <= allowed * 1.0001) | (x.abs() < 2.0**-99))


def bias(quantizer):
    """The mean error of quantizing in units of its standard error, by estimate."""
    x = torch.full((65536,), 0.3)
    x[:: quantizer.block] = 1.0
    total = torch.zeros_like(x)
    for key in range(4):
        out, steps = quantized_and_back(x, quantizer, key)
        total += out
    error = ((total / 4 - x) / steps)[x != 1.0]
    return abs(error.mean()) / (0.5 / (4 * len(error)) ** 0.5)


def test_stochastic_rounding_is_unbiased():
    assert max(bias(Quantizer(bits, rounding=STOCHASTIC)) for bits in BITS) < 5


def unpacked(bits):
    """Random codes of so many bits, and what they are after packing and unpacking."""
    quantizer = Quantizer(bits, 64)
    generator = torch.Generator().manual_seed(bits)
    q = torch.randint(-quantizer.most, quantizer.most + 1, (1024,), generator=generator).float()
    wire = torch.zeros(quantizer.nbytes(1024), dtype=torch.uint8)
    tiles = wire.view(-1, quantizer.tile_nbytes)
    quantize._pack(q.view(len(tiles), -1), tiles, quantizer)
    quantize._unpack(tiles, back := torch.empty_like(q), quantizer)
    return q, back


def test_what_is_packed_is_unpacked():
    assert [bits for bits in BITS if not torch.equal(*unpacked(bits))] == []


def spoils_its_block_only(quantizer, value):
    x, left = torch.ones(512), torch.zeros(512)
    x[100] = value
    out, _ = quantized_and_back(x, quantizer, residual=left)
    spoilt = not out[64:128].isfinite().any() and bool(out[64:128].isnan().all()) == (value != value)  # noqa: PLR0124  # NaN
    return spoilt and bool(((out[:64] - 1).abs() <= 0.01).all()) and not left[64:128].any()


def test_a_block_that_is_not_finite_spoils_no_other_and_leaves_no_residual():
    rows = product((Int8(64), Int2(64), Float8(64, feedback=True)), (float("inf"), float("nan"), 3e38))
    require(spoils_its_block_only, rows)


class LargeResults(TorchDispatchMode):
    """Keeps the memory of all floats that fill a piece."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32 and result.numel() == PIECE_NUMEL:
            memory = result.untyped_storage()
            self.kept[memory.data_ptr()] = memory
        return result


@pytest.mark.parametrize("quantizer", [Int8(), Int4(), Float8()])
def test_all_pieces_of_a_call_share_the_memory_of_their_codes(quantizer):
    x, codes = torch.ones(4 * PIECE_NUMEL), torch.empty(quantizer.nbytes(4 * PIECE_NUMEL), dtype=torch.uint8)
    calls = {
        "quantize": lambda: quantize.quantize(x, codes, quantizer, x.clone()),
        "dequantize": lambda: quantize.dequantize(codes, x, quantizer),
        "add": lambda: quantize.add_quantized(x, [codes, codes], quantizer),
    }
    used = {}
    for name, call in calls.items():
        with LargeResults() as results:
            call()
        used[name] = len(results.kept.keys() - {x.data_ptr()})
    assert used == {"quantize": 2, "dequantize": 1, "add": 1}  # with the residual
