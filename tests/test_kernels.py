# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against their definitions, element by element and access by access, in Triton's interpreter."""

from collections import Counter
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from cases import pairwise
from interpreter import complaint, interpret, interpreted_gpu, plant, require, watched
from kernel_bugs import BUGS
from quantizers import same

from commrt.kernels import dispatch
from commrt.kernels.device import variants
from commrt.kernels.device.variants import Sizes
from commrt.kernels.dispatch import GPU_DTYPES
from commrt.kernels.layout import HEADER_NUMEL, layout_of
from commrt.kernels.plain_torch import mix_into
from commrt.kernels.torch_packing import bits

TILE = 1024
LENGTHS = (0, 1, 7, 8, 9, 127, TILE - 1, TILE, TILE + 1, 2 * TILE + 9)
SKEWS = (0, 2, 1)
"""Elements between an aligned address and a tensor: aligned to 16 bytes, to 8 or 4, to 4 or 2."""
ABSENT = torch.empty(24)
"""An absent tensor has a place for so many elements."""
HEADER = 0xF000_0000_0000_0005
FAR = 2**31 // TILE + 3
"""The number of a tile whose first element no int32 can count."""
BACKENDS = (interpreted_gpu, nullcontext)
TALLY = Counter()


@pytest.fixture(scope="module", autouse=True)
def _tell():
    """With ``-s -n0``: how much was compared."""
    yield
    print(f"\ncompared bit by bit, all equal: {dict(TALLY)}")  # noqa: T201  # what -s is for


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setitem(variants.SIZES, 90, Sizes(TILE, 4))


def all_equal(what, got, want):
    """True if `got` and `want`, lists of tensors, are equal but for the bits of NaN; counts their elements."""
    TALLY[f"{what}: cases"] += 1
    TALLY[f"{what}: elements"] += sum(tensor.numel() for tensor in want)
    return all(map(same, got, want))


def random(count, dtype, seed, skew=0):
    """Values over many magnitudes, `skew` elements off an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count + skew + 16, generator=generator)
    values *= 10 ** torch.empty(len(values)).uniform_(-4, 2, generator=generator)
    return values.to(dtype)[skew : skew + count]


def tensors(dtype, skew=0):
    """Tensors of all `LENGTHS`, and an absent one among them."""
    given = [random(count, dtype, seed, skew) for seed, count in enumerate(LENGTHS)]
    return [*given[:4], None, *given[4:]]


def wired(given, wire_dtype):
    """A wire of NaN, and who packs it."""
    like = [ABSENT.to(given[0].dtype) if tensor is None else tensor for tensor in given]
    layout = layout_of([tensor.numel() for tensor in like])
    wire = torch.full((layout.numel,), float("nan"), dtype=wire_dtype)
    return layout, wire, dispatch.packing(wire, layout, like)


def packed(backend, dtype, wire_dtype, skew, *, held=False):
    given = tensors(dtype, skew)
    with backend():
        layout, wire, packing = wired(given, wire_dtype)
        if held:
            packing.aim(given, 1 / 6, HEADER)
            packing.pack_aimed()
        else:
            packing.pack(given, 1 / 6, HEADER)
    if backend is interpreted_gpu:
        written = HEADER_NUMEL + len(given) + sum(layout.counts)
        assert len(wire) - wire.isnan().sum() == written, "something between was written"
    return [layout.header(wire), layout.flags(wire), *(layout.tensor(wire, i) for i in range(len(given)))]


def unpacked(backend, dtype, wire_dtype, skew):
    given = tensors(dtype, skew)
    with backend():
        layout, wire, packing = wired(given, wire_dtype)
        wire[:] = random(len(wire), wire_dtype, seed=99)
        layout.header(wire).copy_(bits(HEADER))
        packing.unpack(given, HEADER)
        assert not packing.mismatched
    return [tensor for tensor in given if tensor is not None]


def mixed(backend, dtype, wire_dtype, skew):
    given = tensors(dtype, skew)
    with backend():
        layout, _, packing = wired(given, wire_dtype)
        received, sent = (random(layout.numel, wire_dtype, seed) for seed in (50, 51))
        packing.mix(given, received, sent, 0.3)
    return [tensor for tensor in given if tensor is not None]


def is_alike(make, *row, **options):
    """True if `make` gives the same by the kernels and by their definition."""
    return all_equal(make.__name__, *(make(backend, *row, **options) for backend in BACKENDS))


@pytest.mark.parametrize("make", [packed, unpacked, mixed])
def test_a_kernel_is_its_definition_bit_by_bit_and_touches_nothing_else(make):
    require(is_alike, [(make, *row) for row in pairwise(GPU_DTYPES, GPU_DTYPES, SKEWS)])


def test_a_header_in_memory_is_packed_as_one_that_is_passed():
    row = interpreted_gpu, torch.float32, torch.bfloat16, 0
    assert all(map(same, packed(*row, held=True), packed(*row)))


def is_header_noticed(backend, wire_dtype, spoil, held=False):
    """True if the header of 64 ranks passes, and one that differs in an element is noticed."""
    given = [random(TILE + 6, torch.float32, 0)]
    with backend():
        layout, wire, packing = wired(given, wire_dtype)
        layout.header(wire).copy_(bits(HEADER).to(wire_dtype) * 64)
        if spoil is not None:
            wire[spoil] = float(wire[spoil] == 0)
        if held:
            packing.aim(given, 1.0, HEADER)
            packing.unpack_aimed()
        else:
            packing.unpack(given, HEADER)
        return packing.mismatched == (spoil is not None)


def test_another_header_is_noticed_wherever_it_differs():
    require(is_header_noticed, pairwise(BACKENDS, GPU_DTYPES, (None, 0, 31, 63)))
    require(is_header_noticed, pairwise(BACKENDS[:1], GPU_DTYPES, (None, 0, 31, 63), (True,)))


def is_summed_alike(backend, dtype, received, count, place):
    """True if a sum, of which the summand at `place` is the own one, is that of a loop in fp32, rounded once."""
    places = count + -count % 16 or 16
    summands = [row[:count] for row in random((received + 1) * places, dtype, count).view(-1, places)]
    own, others = summands[place], [row.clone() for row in summands]
    want = summands[0].float()
    for each in summands[1:]:
        want = want + each.float()
    with backend():
        dispatch.adding(own, summands)()
    others[place] = want.to(dtype)
    return all_equal("reduced", summands, others)


def test_summands_are_added_in_fp32_from_left_to_right_wherever_the_own_one_is_and_rounded_once():
    sums = product(BACKENDS, GPU_DTYPES, (1, 2, 8))
    require(is_summed_alike, [(*each, *row) for each, *row in pairwise(sums, (1, TILE + 9), (0, 1, -1))])
    require(is_summed_alike, pairwise(BACKENDS, GPU_DTYPES, (3,), LENGTHS, (0,)))


def is_far_tile_mixed():
    """True if a tile and its place are found beyond what an int32 can count."""
    own, received, sent = (random(40, torch.float32, seed) for seed in range(3))
    want, place = own.clone(), 2**31 // 16 + 5
    mix_into(want, received, 0.3, sent)
    address = torch.tensor([own.data_ptr() - 4 * FAR * TILE])
    table = [torch.tensor([number], dtype=torch.int32) for number in (0, FAR, 40, place)]
    weight = torch.tensor([0.3])
    variant = variants.mix(torch.float32, torch.float32, 4, Sizes(TILE, 1))
    wires = [(row.data_ptr() - 4 * 16 * place) % 2**64 for row in (received, sent)]
    with watched([own, received, sent, address, *table, weight]):
        interpret(variant, [0], *(t.data_ptr() for t in (address, *table)), *wires, weight.data_ptr())
    return torch.equal(own, want)


def is_far_program_summed():
    own, received = random(40, torch.float32, 0), random(40, torch.float32, 1)
    want = own + received
    first = FAR * TILE
    base, there = ((buffer.data_ptr() - 4 * first) % 2**64 for buffer in (own, received))
    addresses = torch.tensor([there - 2**64 * (there >= 2**63)])
    with watched([own, received, addresses]):
        variant = variants.reduce(torch.float32, 1, Sizes(TILE, 1))
        interpret(variant, [FAR], base, addresses.data_ptr(), base, first + 40)
    return torch.equal(own, want)


F32, BF16, F16 = GPU_DTYPES
CHECKS = {
    "pack": [lambda: is_alike(packed, F32, BF16, 0)],
    "unpack": [lambda: is_header_noticed(interpreted_gpu, F32, 31), lambda: is_alike(unpacked, F32, BF16, 0)],
    "mix": [lambda: is_alike(mixed, F32, BF16, 0)],
    "reduce": [is_far_program_summed, lambda: is_summed_alike(interpreted_gpu, BF16, 3, TILE + 9, 0)],
    "tiles": [is_far_tile_mixed, lambda: is_alike(packed, F32, F32, 1)],
    "header": [lambda: is_alike(packed, F32, F32, 1)],
}
"""What looks at which module."""


@pytest.mark.parametrize("name", CHECKS)
def test_every_bug_that_is_planted_in_a_module_is_noticed(name, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "TALLY", Counter())
    assert not any(map(complaint, CHECKS[name]))
    bugs, missed = [bug for bug in BUGS if BUGS[bug][0] == name], []
    for bug in bugs:
        with monkeypatch.context() as patch:
            plant(BUGS[bug], ("pack", "unpack", "mix", "reduce"), tmp_path, patch)
            missed += [] if any(map(complaint, CHECKS[name])) else [bug]
    assert bugs
    assert missed == []


def test_integers_are_mixed_towards_zero():
    own = torch.tensor([10, 20, 30])
    mix_into(own, torch.tensor([20, 20, 33]), 0.5)
    assert own.tolist() == [15, 20, 31]
