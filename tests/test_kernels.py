# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against their definitions, element by element and access by access, in Triton's interpreter."""

from __future__ import annotations

import importlib
from itertools import product
from pathlib import Path

import pytest
import torch
import triton.language as tl
from interpreter import BadAccess, watched
from planted import BUGS

from commrt.kernels import device
from commrt.kernels.device.mix import mix_kernel
from commrt.kernels.device.norm import norm_kernel
from commrt.kernels.device.pack import pack_kernel
from commrt.kernels.device.reduce import reduce_kernel
from commrt.kernels.device.unpack import unpack_kernel
from commrt.kernels.tables import build_tables, places_of

TILE, WARPS = 1024, 1
LENGTHS = (0, 1, 7, 8, 9, 127, TILE - 1, TILE, TILE + 1, 2 * TILE, 1009, 4099)
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
PAIRS = list(product(KINDS, KINDS))
CPU = torch.device("cpu")


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


class Case:
    """A wire buffer, tensors, and the tables of both."""

    def __init__(self, tensors, wire_dtype):
        self.tensors = tensors
        self.places = places_of([t.numel() if t is not None else 24 for t in tensors])
        self.counts = [t.numel() if t is not None else 24 for t in tensors]
        self.wire = poisoned(self.places[-1], wire_dtype)
        self.tables = build_tables(self.counts, TILE, CPU)
        self.align = self.tables.point_at(tensors)
        self.flag = torch.zeros(1, dtype=torch.int32)
        self.sums = torch.zeros(self.tables.tiles * WARPS)
        dtype = next(t.dtype for t in tensors if t is not None)
        self.kinds = {"DTYPE": KINDS[dtype], "VECTOR": vector(dtype, wire_dtype), "ALIGN": self.align, "TILE": TILE}

    @property
    def columns(self):
        t = self.tables
        return t.addresses, t.counts, t.places, t.tile_tensors, t.tile_numbers

    def everything(self, *more):
        there = [tensor for tensor in self.tensors if tensor is not None]
        return [*there, *self.columns, self.wire, self.flag, self.sums, *more]

    def on_wire(self, wire, i):
        return wire[self.places[i] : self.places[i] + self.counts[i]]

    def beside(self):
        """The elements of the wire that belong to no tensor."""
        free = torch.ones_like(self.wire, dtype=torch.bool)
        for i in range(len(self.counts)):
            self.on_wire(free, i)[:] = False
        return self.wire[free]

    def pack(self, scale, *, sums=False):
        factor = torch.tensor([scale])
        with watched(self.everything(factor), rewritable=self.flag) as memory:
            pack_kernel[(self.tables.tiles,)](
                *self.columns, self.wire, factor, self.flag, self.sums, **self.kinds, WARPS=WARPS, SUMS=sums
            )
        return memory

    def unpack(self, scale, *, accumulate=False, sums=False):
        factor = torch.tensor([scale])
        with watched(self.everything(factor)) as memory:
            unpack_kernel[(self.tables.tiles,)](
                *self.columns, self.wire, factor, self.sums, **self.kinds, WARPS=WARPS, ACCUMULATE=accumulate, SUMS=sums
            )
        return memory

    def mix(self, received, sent, weight):
        factor = torch.tensor([weight])
        with watched(self.everything(factor, received, sent)) as memory:
            mix_kernel[(self.tables.tiles,)](
                *self.columns, received, sent, factor, **self.kinds, SENT=sent is not received
            )
        return memory


def same(got, want):
    return torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)) and torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("skew", [0, 2, 1], ids=["16 bytes", "8 bytes", "4 bytes"])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS, ids=str)
def test_pack_scales_in_fp32_and_casts_once_and_touches_nothing_else(dtype, wire, skew):
    case = Case(tensors(dtype, skew), wire)
    case.pack(1 / 6)
    for i, tensor in enumerate(case.tensors):
        assert torch.equal(case.on_wire(case.wire, i), (tensor.float() * (1 / 6)).to(wire))
    assert case.beside().isnan().all()
    assert not case.flag


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwriting", "accumulating"])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS, ids=str)
def test_unpack_scales_in_fp32_and_casts_once_and_touches_nothing_else(dtype, wire, accumulate):
    case = Case(tensors(dtype), wire)
    before = [tensor.clone() for tensor in case.tensors]
    case.wire[:] = random(case.wire.numel(), wire, seed=99)
    case.unpack(0.3, accumulate=accumulate)
    for i, tensor in enumerate(case.tensors):
        want = case.on_wire(case.wire, i).float() * 0.3 + (before[i].float() if accumulate else 0.0)
        assert torch.equal(tensor, want.to(dtype))


@pytest.mark.parametrize("skew", [2, 1], ids=["8 bytes", "4 bytes"])
def test_unpack_reaches_tensors_at_any_element(skew):
    case = Case(tensors(torch.float32, skew), torch.bfloat16)
    case.wire[:] = random(case.wire.numel(), torch.bfloat16, seed=99)
    case.unpack(1.0)
    assert all(torch.equal(tensor, case.on_wire(case.wire, i).float()) for i, tensor in enumerate(case.tensors))


def test_an_absent_tensor_is_sent_as_zeros_and_receives_nothing():
    case = Case([random(9, torch.float32, 0), None, random(1030, torch.float32, 1)], torch.bfloat16)
    case.pack(0.5)
    assert case.on_wire(case.wire, 1).tolist() == [0.0] * 24
    case.unpack(1.0)
    assert torch.equal(case.tensors[2], case.on_wire(case.wire, 2).float())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 500, 1023, 1024, 1030])
def test_pack_notices_what_is_not_finite_wherever_it_is(value, place):
    case = Case([random(9, torch.float32, 0), random(1031, torch.float32, 1)], torch.float16)
    case.tensors[1][place] = value
    case.pack(1.0)
    assert case.flag.item() == 1


def test_pack_looks_for_what_is_not_finite_before_the_cast():
    large = torch.full((20,), 1e6)  # above the largest fp16
    case = Case([large], torch.float16)
    case.pack(1.0)
    assert case.wire[:20].isinf().all()
    assert case.flag.item() == 0
    case.pack(1 / 64)  # scaled before the cast: fits
    assert torch.equal(case.wire[:20], (large / 64).half())


def test_sixty_four_ranks_of_large_halves_do_not_overflow():
    largest = torch.full((40,), 65504.0, dtype=torch.float16)
    case = Case([largest], torch.float16)
    case.pack(1 / 64)
    own, received = case.wire[:40].contiguous(), case.wire[:40].repeat(2, 1)[:, :40]
    pieces = torch.zeros(63, 48, dtype=torch.float16)
    pieces[:, :40] = received[0]
    for begin in range(0, 63, 7):
        reduce(own, pieces[begin : begin + 7])
    torch.testing.assert_close(own, largest, rtol=1e-3, atol=0.0)


def reduce(own, pieces):
    """Add the rows of `pieces`, a multiple of 16 elements apart, to `own`."""
    count, stride = own.numel(), pieces.stride(0) // 16
    flat = pieces.flatten()
    grid = (-(-count // TILE),)
    with watched([own, flat]):
        reduce_kernel[grid](
            own, flat, own, stride, count, COUNT=len(pieces), VECTOR=8 if own.itemsize == 2 else 4, TILE=TILE
        )


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_reduce_adds_in_fp32_from_left_to_right_and_rounds_once(dtype, ranks):
    for seed, count in enumerate(LENGTHS):
        own = random(count, dtype, seed)
        pieces = poisoned(ranks * (-(-count // 16) * 16 or 16), dtype).view(ranks, -1)
        for number in range(ranks):
            pieces[number, :count] = random(count, dtype, 100 + number)
        want = own.float()
        for number in range(ranks):
            want = want + pieces[number, :count].float()
        reduce(own, pieces)
        assert torch.equal(own, want.to(dtype))


@pytest.mark.parametrize(("dtype", "wire"), [pair for pair in PAIRS if pair[1].itemsize <= pair[0].itemsize], ids=str)
def test_mix_moves_by_the_difference_of_what_travelled(dtype, wire):
    case = Case(tensors(dtype), wire)
    before = [tensor.clone() for tensor in case.tensors]
    received, sent = (random(case.wire.numel(), wire, seed) for seed in (50, 51))
    case.mix(received, sent, 0.5)
    for i, tensor in enumerate(case.tensors):
        went = case.on_wire(received, i).float() - case.on_wire(sent, i).float()
        assert torch.equal(tensor, (before[i].float() + 0.5 * went).to(dtype))


def test_mix_of_a_wire_that_loses_nothing_needs_only_what_was_received():
    case = Case(tensors(torch.float32), torch.float32)
    before = [tensor.clone() for tensor in case.tensors]
    received = random(case.wire.numel(), torch.float32, 50)
    case.mix(received, received, 0.5)
    for i, tensor in enumerate(case.tensors):
        assert torch.equal(tensor, before[i] + 0.5 * (case.on_wire(received, i) - before[i]))


@pytest.mark.parametrize("kernel", ["pack", "unpack"])
def test_the_norm_is_that_of_all_tensors_and_the_same_in_every_run(kernel):
    case = Case(tensors(torch.float32), torch.float32)
    case.pack(0.5, sums=True)
    want = torch.cat([tensor.double() * 0.5 for tensor in case.tensors]).norm().float()
    if kernel == "unpack":
        case.unpack(1.0, sums=True)
    first = case.sums.clone()
    norm = torch.zeros(1)
    with watched([case.sums, norm]):
        norm_kernel[(1,)](case.sums, case.sums.numel(), norm, TILE=16)
    torch.testing.assert_close(norm[0], want, rtol=1e-6, atol=0.0)
    case.unpack(1.0, sums=True) if kernel == "unpack" else case.pack(0.5, sums=True)
    assert torch.equal(case.sums, first)


def notices(case, scale=1 / 6):
    """True if packing `case` goes wrong in any way that the tests above look at."""
    try:
        case.pack(scale)
    except Exception as error:
        if isinstance(error.__cause__, BadAccess) or "BadAccess" in repr(error):
            return True
        raise
    zeros = [torch.zeros(24) if tensor is None else tensor for tensor in case.tensors]
    wrong = any(
        not same(case.on_wire(case.wire, i), (tensor.float() * scale).to(case.wire.dtype))
        for i, tensor in enumerate(zeros)
    )
    wrong |= not case.beside().isnan().all()
    return wrong or bool(case.flag) is not any(not tensor.isfinite().all() for tensor in zeros)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug, tmp_path, monkeypatch):
    name, before, after = BUGS[bug]
    package = f"planted_{list(BUGS).index(bug)}"
    (tmp_path / package).mkdir()
    for path in Path(device.__file__).parent.glob("*.py"):
        source = path.read_text().replace("commrt.kernels.device", package)
        if path.stem == name:
            assert source.count(before) == 1
            source = source.replace(before, after)
        (tmp_path / package / path.name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    planted = importlib.import_module(f"{package}.pack")
    monkeypatch.setitem(globals(), "pack_kernel", planted.pack_kernel)
    broken = random(13, torch.float32, 0)
    broken[12] = float("inf")
    cases = [
        Case(tensors(torch.float32), torch.bfloat16),
        Case(tensors(torch.float32, skew=1), torch.float32),
        Case([broken], torch.float32),
        Case([random(9, torch.float32, 0), None], torch.float32),
    ]
    assert any(notices(case) for case in cases)


def test_without_a_planted_bug_nothing_is_noticed():
    assert not notices(Case(tensors(torch.float32), torch.bfloat16))
    assert not notices(Case(tensors(torch.float32, skew=1), torch.float32))
