# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against their definitions, element by element and access by access, in Triton's interpreter."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import triton.language as tl
from interpreter import complaint, interpret, watched
from kernel_bugs import BUGS
from pairwise import pairwise
from quantizers import same

from commrt.kernels import device
from commrt.kernels.device import variants
from commrt.kernels.device.mix import mix_kernel
from commrt.kernels.device.pack import pack_kernel
from commrt.kernels.device.reduce import reduce_kernel
from commrt.kernels.device.unpack import unpack_kernel
from commrt.kernels.device.variants import Sizes
from commrt.kernels.layout import layout_of
from commrt.kernels.plain_torch import bits, mix_into, pack, reduce_into
from commrt.kernels.tables import Tables

TILE = 1024
LENGTHS = (0, 1, 7, 8, 9, 127, TILE - 1, TILE, TILE + 1, 2 * TILE + 9)
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
SKEWS = (0, 2, 1)
"""Elements between an aligned address and a tensor: aligned to 16 bytes, to 8 or 4, to 4 or 2."""
CPU = torch.device("cpu")
HEADER = 0xF000_0000_0000_0005
HELD_HEADER = torch.tensor([HEADER], dtype=torch.uint64)


def vector(tensor, wire):
    """As many elements as a thread takes at once; fewer where narrow elements become wide ones."""
    return 4 if torch.float32 in (tensor, wire) and (wire == torch.float32) else 8


def random(count, dtype, seed, skew=0):
    """Values over many magnitudes, `skew` elements off an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count + skew + 16, generator=generator) * 10 ** torch.empty(count + skew + 16).uniform_(
        -4, 2, generator=generator
    )
    return values.to(dtype)[skew : skew + count]


def tensors(dtype, skew=0):
    return [random(count, dtype, seed, skew) for seed, count in enumerate(LENGTHS)]


def poisoned(numel, dtype):
    return torch.full((numel,), float("nan"), dtype=dtype)


TALLY = Counter()


@pytest.fixture(scope="module", autouse=True)
def _tell():
    """With ``-s -n0``: how much was compared."""
    yield
    print(f"\ncompared bit by bit, all equal: {dict(TALLY)}")  # noqa: T201  # what -s is for


def all_equal(what, got, want):
    """True if `got` and `want`, lists of tensors, are equal but for the bits of NaN; counts their elements."""
    TALLY[f"{what}: cases"] += 1
    TALLY[f"{what}: elements"] += sum(tensor.numel() for tensor in want)
    return all(map(same, got, want))


class Case:
    """A wire buffer, tensors, and the tables of both; a tensor that is absent has 24 elements."""

    def __init__(self, tensors, wire_dtype):
        self.tensors = tensors
        self.layout = layout_of([24 if tensor is None else tensor.numel() for tensor in tensors])
        self.wire = poisoned(self.layout.numel, wire_dtype)
        self.tables = Tables(self.layout, TILE, CPU)
        self.tables.point_at(tensors)
        self.flag = torch.zeros(1, dtype=torch.int32)
        dtype = next(t.dtype for t in tensors if t is not None)
        self.kinds = {
            "DTYPE": KINDS[dtype],
            "VECTOR": vector(dtype, wire_dtype),
            "ALIGN": self.tables.align,
            "TILE": TILE,
        }

    def everything(self, *more):
        there = [tensor for tensor in self.tensors if tensor is not None]
        return [*there, *self.tables.columns, self.wire, self.flag, *more]

    def places(self, wire=None):
        wire = self.wire if wire is None else wire
        return [self.layout.tensor(wire, i) for i in range(len(self.tensors))]

    def packed(self, scale):
        """The wire as it must be: what the reference says, and NaN between."""
        wire = poisoned(self.layout.numel, self.wire.dtype)
        pack(self.tensors, self.places(wire), scale)
        self.layout.header(wire).copy_(bits(HEADER))
        self.layout.flags(wire).copy_(torch.tensor([tensor is not None for tensor in self.tensors]))
        return wire

    def pack(self, scale, *, held=False):
        factor = torch.tensor([scale])
        header = HELD_HEADER if held else HEADER
        with watched(self.everything(factor, HELD_HEADER)) as memory:
            pack_kernel[(self.tables.tiles,)](*self.tables.columns, self.wire, header, factor, **self.kinds, HELD=held)
        return memory

    def unpack(self, *, held=False):
        header = HELD_HEADER if held else HEADER
        with watched(self.everything(HELD_HEADER)) as memory:
            unpack_kernel[(self.tables.tiles,)](
                *self.tables.columns, self.wire, header, self.flag, **self.kinds, HELD=held
            )
        return memory

    def mix(self, received, sent, weight):
        factor = torch.tensor([weight])
        with watched(self.everything(factor, received, sent)) as memory:
            mix_kernel[(self.tables.tiles,)](*self.tables.columns, received, sent, factor, **self.kinds)
        return memory


def require(check, rows):
    """Require that no row is one for which `check` finds something wrong."""
    assert {row: said for row in rows if (said := complaint(check, *row))} == {}


def packed_alike(dtype, wire, skew):
    case = Case(tensors(dtype, skew), wire)
    case.pack(1 / 6)
    return all_equal("pack", [case.wire], [case.packed(1 / 6)])


def test_pack_is_its_definition_bit_by_bit_and_touches_nothing_else():
    require(packed_alike, pairwise(KINDS, KINDS, SKEWS))


def unpacked_alike(dtype, wire, skew):
    case = Case(tensors(dtype, skew), wire)
    want = [tensor.clone() for tensor in case.tensors]
    case.wire[:] = random(case.wire.numel(), wire, seed=99)
    torch._foreach_copy_(want, case.places())
    case.unpack()
    return all_equal("unpack", case.tensors, want)


def test_unpack_is_its_definition_bit_by_bit():
    require(unpacked_alike, pairwise(KINDS, KINDS, SKEWS))


def mixed_alike(dtype, wire, skew):
    case = Case(tensors(dtype, skew), wire)
    want = [tensor.clone() for tensor in case.tensors]
    received, sent = (random(case.wire.numel(), wire, seed) for seed in (50, 51))
    for own, came, went in zip(want, case.places(received), case.places(sent), strict=True):
        mix_into(own, came, 0.3, went)
    case.mix(received, sent, 0.3)
    return all_equal("mix", case.tensors, want)


def test_mix_is_its_definition_bit_by_bit():
    require(mixed_alike, pairwise(KINDS, KINDS, SKEWS))


def test_an_absent_tensor_is_sent_as_zeros_without_its_flag_and_receives_nothing():
    case = Case([random(9, torch.float32, 0), None, random(1030, torch.float32, 1)], torch.bfloat16)
    case.pack(0.5)
    assert same(case.wire, case.packed(0.5))
    assert case.places()[1].tolist() == [0.0] * 24
    assert case.layout.flags(case.wire).tolist() == [1, 0, 1]
    case.unpack()
    assert torch.equal(case.tensors[2], case.places()[2].float())


def test_a_header_in_memory_is_packed_as_one_that_is_passed():
    case = Case([random(1030, torch.float32, 0)], torch.bfloat16)
    case.pack(0.5, held=True)
    assert same(case.wire, case.packed(0.5))


def header_is_noticed(wire, spoil, held):
    case = Case([random(1030, torch.float32, 0)], wire)
    case.layout.header(case.wire).copy_(bits(HEADER).to(wire) * 64)  # of 64 ranks
    if spoil is not None:
        case.wire[spoil] = float(case.wire[spoil] == 0)
    case.unpack(held=held)
    return case.flag.item() == (spoil is not None)


def test_unpack_notices_another_header_wherever_it_differs():
    require(header_is_noticed, pairwise(KINDS, (None, 0, 31, 63), (False, True)))


def test_pack_scales_before_the_cast():
    large = torch.full((20,), 1e6)  # above the largest fp16
    case = Case([large], torch.float16)
    case.pack(1.0)
    assert case.places()[0].isinf().all()
    case.pack(1 / 64)  # scaled before the cast: fits
    assert torch.equal(case.places()[0], (large / 64).half())


def test_sixty_four_ranks_of_large_halves_do_not_overflow():
    largest = torch.full((40,), 65504.0, dtype=torch.float16)
    case = Case([largest], torch.float16)
    case.pack(1 / 64)
    own, pieces = case.places()[0].clone(), torch.zeros(63, 48, dtype=torch.float16)
    pieces[:, :40] = own
    for begin in range(0, 63, 7):
        reduce(own, pieces[begin : begin + 7])
    torch.testing.assert_close(own, largest, rtol=1e-3, atol=0.0)


def reduce(own, pieces):
    """Add the rows of `pieces`, each at a multiple of 16 bytes, to `own`."""
    count, addresses = own.numel(), torch.tensor([row.data_ptr() for row in pieces])
    grid, vector = (-(-count // TILE),), 8 if own.itemsize == 2 else 4
    sizes = {"COUNT": len(pieces), "DTYPE": variants.DTYPES[own.dtype], "VECTOR": vector, "TILE": TILE}
    with watched([own, pieces, addresses]):
        reduce_kernel[grid](own, addresses, own, count, **sizes)


def reduced_alike(dtype, ranks, counts):
    return all(summed_alike(dtype, ranks, seed, count) for seed, count in enumerate(counts))


def summed_alike(dtype, ranks, seed, count):
    own = random(count, dtype, seed)
    pieces = poisoned(ranks * (-(-count // 16) * 16 or 16), dtype).view(ranks, -1)
    for number in range(ranks):
        pieces[number, :count] = random(count, dtype, 100 + number)
    want, in_order = own.clone(), own.float()
    for number in range(ranks):
        in_order = in_order + pieces[number, :count].float()
    reduce_into(want, [want, *pieces[:, :count]])
    reduce(own, pieces)
    return all_equal("reduce", [own], [want]) and torch.equal(own, in_order.to(dtype))


def test_reduce_adds_in_fp32_from_left_to_right_and_rounds_once():
    require(reduced_alike, [*product(KINDS, (3,), (LENGTHS,)), *product(KINDS, (1, 2, 8), ((TILE + 9,),))])


def test_an_absent_tensor_is_not_mixed():
    case = Case([None, random(1030, torch.float32, 1)], torch.float32)
    want = case.tensors[1].clone()
    received, sent = (random(case.wire.numel(), torch.float32, seed) for seed in (50, 51))
    mix_into(want, case.places(received)[1], 0.3, case.places(sent)[1])
    case.mix(received, sent, 0.3)
    assert torch.equal(case.tensors[1], want)


FAR = 2**31 // TILE + 3
"""The number of a tile whose first element no int32 can count."""


def test_a_tile_and_its_place_are_found_beyond_what_an_int32_can_count():
    own, received, sent = (random(40, torch.float32, seed) for seed in range(3))
    want, place = own.clone(), 2**31 // 16 + 5
    mix_into(want, received, 0.3, sent)
    address = torch.tensor([own.data_ptr() - 4 * FAR * TILE])
    table = [torch.tensor([number], dtype=torch.int32) for number in (0, FAR, 40, place)]
    weight = torch.tensor([0.3])
    variant = replace(variants.mix(torch.float32, torch.float32, 4, Sizes(TILE, 1)), kernel=mix_kernel)
    wires = [(row.data_ptr() - 4 * 16 * place) % 2**64 for row in (received, sent)]
    with watched([own, received, sent, address, *table, weight]):
        interpret(variant, [0], *(t.data_ptr() for t in (address, *table)), *wires, weight.data_ptr())
    assert torch.equal(own, want)


def test_a_program_of_reduce_finds_what_no_int32_can_count():
    own, received = random(40, torch.float32, 0), random(40, torch.float32, 1)
    want = own + received
    variant = replace(variants.reduce(torch.float32, 1, Sizes(TILE, 1)), kernel=reduce_kernel)
    first = FAR * TILE
    base, there = ((buffer.data_ptr() - 4 * first) % 2**64 for buffer in (own, received))
    addresses = torch.tensor([there - 2**64 * (there >= 2**63)])
    with watched([own, received, addresses]):
        interpret(variant, [FAR], base, addresses.data_ptr(), base, first + 40)
    assert torch.equal(own, want)


F32, BF16, F16 = KINDS
CHECKS = {
    "pack": [
        test_an_absent_tensor_is_sent_as_zeros_without_its_flag_and_receives_nothing,
        lambda: packed_alike(F32, BF16, 0),
        lambda: packed_alike(F32, F32, 1),
    ],
    "unpack": [
        test_an_absent_tensor_is_sent_as_zeros_without_its_flag_and_receives_nothing,
        lambda: header_is_noticed(F32, 31, held=False),
        lambda: unpacked_alike(F32, BF16, skew=0),
    ],
    "mix": [test_an_absent_tensor_is_not_mixed, lambda: mixed_alike(F32, BF16, skew=0)],
    "reduce": [
        test_a_program_of_reduce_finds_what_no_int32_can_count,
        lambda: reduced_alike(BF16, 3, (TILE + 9,)),
    ],
}
CHECKS["tiles"] = [test_a_tile_and_its_place_are_found_beyond_what_an_int32_can_count, *CHECKS["pack"]]
"""Which of the tests above look at which module."""


def planted(bug, folder):
    """Import the kernels with `bug` in them; return them by name."""
    name, before, after = BUGS[bug]
    package = f"planted_{list(BUGS).index(bug)}"
    (folder / package).mkdir()
    for path in Path(device.__file__).parent.glob("*.py"):
        source = path.read_text().replace("commrt.kernels.device", package)
        if path.stem == name:
            assert source.count(before) == 1
            source = source.replace(before, after)
        (folder / package / path.name).write_text(source)
    kernels = [f"{kernel}_kernel" for kernel in ("pack", "unpack", "mix", "reduce")]
    return {kernel: getattr(importlib.import_module(f"{package}.{kernel[:-7]}"), kernel) for kernel in kernels}


@pytest.mark.parametrize("name", CHECKS)
def test_every_bug_that_is_planted_in_a_module_is_noticed(name, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "TALLY", Counter())
    monkeypatch.syspath_prepend(tmp_path)
    assert not any(map(complaint, CHECKS[name]))
    bugs, missed = [bug for bug in BUGS if BUGS[bug][0] == name], []
    for bug in bugs:
        with monkeypatch.context() as patch:
            for kernel, broken in planted(bug, tmp_path).items():
                patch.setitem(globals(), kernel, broken)
            missed += [] if any(map(complaint, CHECKS[name])) else [bug]
    assert bugs
    assert missed == []


def test_integers_are_mixed_towards_zero():
    own = torch.tensor([10, 20, 30])
    mix_into(own, torch.tensor([20, 20, 33]), 0.5)
    assert own.tolist() == [15, 20, 31]
