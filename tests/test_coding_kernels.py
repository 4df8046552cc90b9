# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of coding against their definition bit by bit, in Triton's interpreter; and that definition."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from coding_bugs import BUGS
from codings import ENCODINGS, KINDS, same
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import complaint, interpret, interpreted_gpu, watched

import commrt
from commrt.kernels import codes, quantizing
from commrt.kernels.device import coding as device
from commrt.kernels.device import variants
from commrt.kernels.device.coding import add_codes_kernel, decode_kernel, encode_kernel
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


def ties(coding):
    """A block of values between two codes, whose scale is `STEP`."""
    if coding.is_float:
        every = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        between = (every[1:] + every[:-1]) / 2
        between = torch.cat([between, -between])
    else:
        between = torch.arange(-coding.most, coding.most) + 0.5
    block = between.repeat(-(-coding.block // len(between)))[: coding.block] * STEP
    block[0] = coding.largest * 0.9995 * STEP
    return block


def rows_of(coding, numel, count):
    """`count` rows of codes, [count, nbytes]."""
    rows = torch.zeros(count, coding.nbytes(numel), dtype=torch.uint8)
    for seed, row in enumerate(rows):
        codes.encode(values(numel, 50 + seed), row, coding)
    return rows


def options(coding):
    return {"BLOCK": coding.block, "BITS": coding.bits, "IS_FLOAT": coding.is_float}


def tiles(coding, numel):
    return -(-numel // coding.tile_numel)


def encode_alike(coding, numel):
    """True if the kernel's codes and residual are those of the definition."""
    x, left = values(numel), values(numel, 1) * 0.01
    if numel > coding.block:
        x[: coding.block], left[: coding.block] = ties(coding), 0.0
    return encoded_alike(coding, x, left, KEY)


def encoded_alike(coding, x, left, key):
    numel = len(x)
    want_left, got = left.clone(), torch.full((2, coding.nbytes(numel)), 0xEE, dtype=torch.uint8)
    codes.encode(x, got[0], coding, want_left if coding.feedback else None, key)
    more = {"FEEDBACK": coding.feedback, "STOCHASTIC": coding.rounding == STOCHASTIC}
    with watched([x, left, got[1]]):
        encode_kernel[(tiles(coding, numel),)](x, left, got[1], numel, key, **options(coding), **more)
    return torch.equal(got[0], got[1]) and same(left, want_left)


def decode_alike(coding, numel, source=None):
    source = rows_of(coding, numel, 1)[0] if source is None else source
    want, got = torch.full((2, numel), -1.0)
    codes.decode(source, want, coding)
    with watched([source, got]):
        decode_kernel[(tiles(coding, numel),)](source, got, numel, **options(coding))
    return same(got, want)


def add_alike(coding, numel, count):
    rows = rows_of(coding, numel, count)
    want = values(numel).nan_to_num(3.0, 3.0, 3.0)
    got = want.clone()
    codes.add_codes(want, list(rows), coding)
    with watched([got, rows]):
        grid, stride = (tiles(coding, numel),), rows.stride(0) // 16
        add_codes_kernel[grid](got, rows, stride, count, numel, **options(coding))
    return same(got, want)


def require(check, rows):
    """Require that no row is one for which `check` finds something wrong."""
    assert {row: said for row in rows if (said := complaint(check, *row))} == {}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_encode_is_its_definition_bit_by_bit_and_touches_nothing_else(kind):
    codings = [coding for coding in ENCODINGS if (coding.bits, coding.is_float) == (kind.bits, kind.is_float)]
    require(encode_alike, [(coding, numel) for coding in codings for numel in NUMELS[coding.block]])


def test_decode_is_its_definition_bit_by_bit():
    codings = [replace(kind, block=block) for kind, block in product(KINDS, NUMELS)]
    require(decode_alike, [(coding, numel) for coding in codings for numel in NUMELS[coding.block]])


@pytest.mark.parametrize(("block", "sizes"), [(64, ((1, 7), (255, 2), (2701, 3))), (256, ((255, 1), (5000, 2)))])
def test_add_codes_is_its_definition_bit_by_bit(block, sizes):
    require(add_alike, [(replace(kind, block=block), *size) for kind, size in product(KINDS, sizes)])


def test_blocks_of_all_sizes_are_coded_alike():
    codings = [
        replace(ENCODINGS[place], block=block) for place, block in zip((0, 10, -1), (128, 512, 1024), strict=True)
    ]
    require(encode_alike, [(coding, 8 * coding.block + 777) for coding in codings])
    require(decode_alike, [(coding, 8 * coding.block + 777) for coding in codings])
    require(add_alike, [(coding, 8 * coding.block + 777, 2) for coding in codings])


def any_bytes_decode_alike(kind):
    coding = replace(kind, block=64)
    return decode_alike(coding, 700, torch.arange(coding.nbytes(700)).mul(37).to(torch.uint8))


def test_any_bytes_decode_alike():
    require(any_bytes_decode_alike, [(kind,) for kind in KINDS])


def is_far_program_alike():
    """True if a program finds its tile where no int32 counts: values, codes and random numbers."""
    coding, far, numel = Int8(64, rounding=STOCHASTIC), 2**31 // 512 + 3, 500
    x, want, got = values(numel), *torch.zeros(2, coding.tile_nbytes, dtype=torch.uint8)
    y = coded(x, coding, far)
    variant = replace(variants.encode(coding, feedback=False), kernel=encode_kernel)
    bases = [
        (buffer.data_ptr() - far * nbytes) % 2**64 for buffer, nbytes in ((x, 4 * 512), (x, 4 * 512), (got, len(got)))
    ]
    with watched([x, got]):
        interpret(variant, [far], *bases, far * 512 + numel, KEY)
    want.copy_(y)
    return torch.equal(got, want)


def coded(x, coding, number):
    """The codes of a tile's values, if it is tile `number` of a buffer."""
    tile = torch.zeros(coding.tile_nbytes, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        uniform = codes.uniform
        patch.setattr(codes, "uniform", lambda key, first, count, coding: uniform(key, first + number, count, coding))
        codes.encode(x, tile, coding, key=KEY)
    return tile


def test_a_program_finds_what_no_int32_can_count():
    assert is_far_program_alike()


def is_every_random_bit_alike():
    """True if values that the random numbers just lift to 1 become 1, by the kernel too."""
    coding = Int2(64, feedback=False, rounding=STOCHASTIC)
    x = 1 - codes.uniform(KEY, 0, 2, coding).flatten()
    x[:: coding.block] = 1.0
    assert torch.equal(coded_and_decoded(x, coding)[0], torch.ones_like(x))
    return encoded_alike(coding, x, x, KEY)


def is_largest_code_alike():
    """True if the largest value of a block keeps its code where rounding lifts the sum with a number close to 1."""
    coding = Int8(64, rounding=STOCHASTIC)
    rounded_to_128 = 1 - 2.0**-19
    key = next(key for key in range(5000) if codes.uniform(key, 0, 1, coding).max() > rounded_to_128)
    x = torch.where(codes.uniform(key, 0, 1, coding).flatten() > rounded_to_128, 127.0, 1.0)
    x[:: coding.block] = 127.0
    return encoded_alike(coding, x, x, key)


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
    coding, first = Int8(64), 5
    quarter = coding.tile_numel // 4
    words = torch.zeros(4, quarter, dtype=torch.int32)
    randint4x_kernel[(1,)](words, key, first * quarter, COUNT=quarter)
    want = (words.long() & 0xFFFFFFFF) >> 8
    return torch.equal(codes.uniform(key, first, 1, coding), want.float().mul(2.0**-24).view(1, -1))


def test_random_numbers_are_those_of_triton():
    require(is_random_alike, [(0,), (1,), (KEY,), (2**64 - 1,)])


def test_random_numbers_are_philox():
    known = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # of Random123 for key 0 and counter 0
    numbers = codes.uniform(0, 0, 1, Int8(64))[0, ::128]
    assert numbers.tolist() == [(word >> 8) * 2.0**-24 for word in known]


def test_launches_on_a_gpu_give_what_a_cpu_gives():
    coding, numel = Int4(64, rounding=STOCHASTIC), 1500
    x, left, wire = values(numel), values(numel, 1), torch.zeros(coding.nbytes(numel), dtype=torch.uint8)
    out, before = torch.zeros(numel), left.clone()
    rows = rows_of(coding, numel, 3)
    total = torch.ones(numel)
    wanted = [tensor.clone() for tensor in (x, left, wire, out, total)]
    run_all(coding, rows, *wanted)
    with interpreted_gpu() as launches:
        run_all(coding, rows, x, left, wire, out, total)
    assert launches.names == ["encode_kernel", "decode_kernel", "add_codes_kernel"]
    assert all(map(same, (left, out, total), (wanted[1], wanted[3], wanted[4])))
    assert torch.equal(wire, wanted[2])
    assert not same(left, before)


def run_all(coding, rows, x, left, wire, out, total):
    quantizing.encoding(x, wire, coding, left)(KEY)
    quantizing.decoding(wire, out, coding)()
    quantizing.adding_codes(total, list(rows), coding)()


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
    assert {"encode_kernel", "decode_kernel", "add_codes_kernel"} <= set(launches.names)
    assert all(map(torch.equal, got, want))


def test_buffers_that_begin_elsewhere_are_coded_in_plain_torch():
    coding, x = Int8(64), values(513)[1:]
    wire = torch.zeros(coding.nbytes(512), dtype=torch.uint8)
    with interpreted_gpu() as launches:
        quantizing.encoding(x, wire, coding, None)(KEY)
        quantizing.decoding(wire, x, coding)()
        quantizing.adding_codes(x, [wire], coding)()
    assert launches.names == []


def test_rows_that_lie_unevenly_are_refused():
    coding, rows = Int8(64), torch.zeros(5, Int8(64).tile_nbytes, dtype=torch.uint8)
    with interpreted_gpu(), pytest.raises(ValueError, match="must lie evenly"):
        quantizing.adding_codes(torch.zeros(512), [rows[0], rows[1], rows[4]], coding)


CHECKS = [
    is_far_program_alike,
    lambda: encode_alike(Int8(64), 512),
    lambda: any_bytes_decode_alike(Float8()),
    is_every_random_bit_alike,
    lambda: add_alike(Quantizer(5, 64), 702, 3),
    lambda: encode_alike(Float8(64, feedback=True), 2503),
    is_largest_code_alike,
    lambda: encode_alike(Quantizer(3, 64, feedback=True), 1501),
    lambda: encode_alike(Quantizer(7, 64, feedback=True, rounding=STOCHASTIC), 2503),
]
"""The quick ones first."""
KERNELS = ("encode_kernel", "decode_kernel", "add_codes_kernel")


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


def coded_and_decoded(x, coding, key=KEY, residual=None):
    """Returns (what x became, its codes' scales [blocks], each block's largest distance from x)."""
    wire, out = torch.zeros(coding.nbytes(len(x)), dtype=torch.uint8), torch.zeros(len(x))
    codes.encode(x, wire, coding, residual, key)
    codes.decode(wire, out, coding)
    scales = wire.view(-1, coding.tile_nbytes)[:, : 2 * TILE_BLOCKS].contiguous().view(torch.bfloat16).flatten().float()
    return out, scales.repeat_interleave(coding.block)[: len(x)]


FINITE = st.floats(-(2.0**125), 2.0**125, width=32)
CODINGS = st.sampled_from([replace(coding, block=64) for coding in ENCODINGS])


@given(coding=CODINGS, x=st.lists(FINITE, min_size=1, max_size=130), key=st.integers(0, 2**64 - 1))
@settings(max_examples=200)
def test_a_code_is_at_most_half_a_step_away_and_the_residual_is_the_rest(coding, x, key):
    x = torch.tensor(x)
    left = torch.zeros_like(x)
    out, steps = coded_and_decoded(x, coding, key, left)
    lost = x.double() - out.double()
    assert torch.equal(left, x - out)
    if coding.rounding == NEAREST:
        assert torch.equal(left.double(), lost)  # nothing is lost from the loss
    most = 1.0 if coding.rounding == STOCHASTIC else 0.5
    allowed = steps * most if not coding.is_float else torch.maximum(x.abs() / 16, steps / 1024)
    assert torch.all((lost.abs() <= allowed * 1.0001) | (x.abs() < 2.0**-99))


def bias(coding):
    """The mean error of coding in units of its standard error, by estimate."""
    x = torch.full((65536,), 0.3)
    x[:: coding.block] = 1.0
    total = torch.zeros_like(x)
    for key in range(4):
        out, steps = coded_and_decoded(x, coding, key)
        total += out
    error = ((total / 4 - x) / steps)[x != 1.0]
    return abs(error.mean()) / (0.5 / (4 * len(error)) ** 0.5)


def test_stochastic_rounding_is_unbiased():
    assert max(bias(Quantizer(bits, rounding=STOCHASTIC)) for bits in BITS) < 5


def unpacked(bits):
    """Random codes of so many bits, and what they are after packing and unpacking."""
    coding = Quantizer(bits, 64)
    generator = torch.Generator().manual_seed(bits)
    q = torch.randint(-coding.most, coding.most + 1, (1024,), generator=generator).float()
    wire = torch.zeros(coding.nbytes(1024), dtype=torch.uint8)
    (piece,) = codes._pieces(q.clone(), wire, coding)
    piece.floats.copy_(q.view_as(piece.floats))
    codes._pack(piece, coding)
    codes._unpack(piece, coding)
    return q, piece.floats.flatten()


def test_what_is_packed_is_unpacked():
    assert [bits for bits in BITS if not torch.equal(*unpacked(bits))] == []


def spoils_its_block_only(coding, value):
    x, left = torch.ones(512), torch.zeros(512)
    x[100] = value
    out, _ = coded_and_decoded(x, coding, residual=left)
    spoilt = not out[64:128].isfinite().any() and bool(out[64:128].isnan().all()) == (value != value)  # noqa: PLR0124  # NaN
    return spoilt and bool(((out[:64] - 1).abs() <= 0.01).all()) and not left[64:128].any()


def test_a_block_that_is_not_finite_spoils_no_other_and_leaves_no_residual():
    rows = product((Int8(64), Int2(64), Float8(64, feedback=True)), (float("inf"), float("nan"), 3e38))
    require(spoils_its_block_only, rows)
