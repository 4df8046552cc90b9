# SPDX-License-Identifier: Apache-2.0
"""Both backends do the same to a wire and its tensors, bit by bit; and whole training steps with either."""

import importlib
import re
from contextlib import nullcontext
from copy import deepcopy
from itertools import product

import pytest
import torch
import triton
from cases import pairwise
from hypothesis import given
from hypothesis import strategies as st
from interpreter import interpreted_gpu
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transports import over_nccl

import commrt
from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.header import Header
from commrt.buckets.overlap_check import OverlapCheck
from commrt.buckets.step_graph import FIRST, NO_KERNEL
from commrt.errors import UsageError
from commrt.kernels import device, dispatch
from commrt.kernels.device.packing import TritonPacking
from commrt.kernels.dispatch import GPU_DTYPES
from commrt.kernels.layout import GRANULE, layout_of
from commrt.kernels.torch_packing import TorchPacking
from commrt.quantization import Int4
from commrt.testing.ranks import run_ranks

BACKENDS = {"torch": nullcontext, "triton": interpreted_gpu}


@pytest.fixture(params=BACKENDS)
def backend(request):
    with BACKENDS[request.param]():
        yield


def values(counts, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator).to(dtype) for count in counts]


def wired(tensors, dtype):
    """A wire of zeros and who packs it."""
    layout = layout_of([tensor.numel() for tensor in tensors])
    wire = torch.zeros(layout.numel, dtype=dtype)
    return layout, wire, dispatch.packing(wire, layout, tensors)


def test_a_wire_holds_what_was_packed_last_scaled_in_fp32_and_then_cast():
    for dtype, wire_dtype, is_there, scale in pairwise(GPU_DTYPES, GPU_DTYPES, (True, False), (1 / 3, 0.25, 1.0)):
        tensors = values([9, 0, 4097], dtype)
        layout, wire, packing = wired(tensors, wire_dtype)
        packing.pack(tensors, -1.0, 2**63)
        packing.pack([tensors[0] if is_there else None, *tensors[1:]], scale, 1)
        want = [(tensor.float() * scale).to(wire_dtype) for tensor in tensors]
        want[0] *= is_there
        assert all(torch.equal(layout.tensor(wire, i), each) for i, each in enumerate(want))
        assert packing.present() == [is_there, True, True]
        packing.compare(1)
        assert not packing.mismatched


def test_a_header_is_compared_without_a_tensor_being_touched_and_stays_disputed_once_it_was(backend):
    tensors = values([5, 0, 5000], torch.float32)
    before = [tensor.clone() for tensor in tensors]
    *_, packing = wired(tensors, torch.float32)
    packing.pack(tensors, 3.0, 0b1011)
    packing.compare(0b1011)
    assert not packing.mismatched
    for header in (0b1010, 0b1011):
        packing.compare(header)
        assert packing.mismatched
    assert all(map(torch.equal, tensors, before))


def test_any_other_number_of_tensors_than_the_wires_is_refused_before_anything_moves(backend):
    _, wire, packing = wired(values([5, 6, 7], torch.float32), torch.float32)
    for number in (2, 4):
        some = values([5, 6, 7, 8], torch.float32)[:number]
        for call, *arguments in ((packing.pack, 1.0, 1), (packing.unpack, 0), (packing.mix, wire, wire, 0.5)):
            with pytest.raises(ValueError, match=rf"{number} tensors for a wire of 3"):
                call(some, *arguments)
        assert not wire.any()
        assert all(map(torch.equal, some, values([5, 6, 7, 8], torch.float32)))


def test_many_small_tensors_are_packed_like_each_alone():
    tensors = values([1, 1000, 0, 30_000, 40_000, 100_000, 70_000, *range(60)], torch.float32)
    for wire_dtype, scale in product((torch.bfloat16, torch.float16), (1 / 3, 0.25, 1.0)):
        layout, wire, packing = wired(tensors, wire_dtype)
        packing.pack(tensors, scale, 1)
        for number, tensor in enumerate(tensors):
            assert torch.equal(layout.tensor(wire, number), (tensor * scale).to(wire_dtype))


def test_torch_writes_nothing_where_the_header_is_disputed():
    tensors = values([5], torch.float32)
    _, _, packing = wired(tensors, torch.float16)
    packing.pack(values([5], torch.float32, seed=1), 1.0, 1)
    packing.unpack(tensors, 2)
    assert torch.equal(tensors[0], values([5], torch.float32)[0])


def test_tensors_that_are_dense_in_another_order_keep_it(backend):
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    layout, wire, packing = wired([image], torch.float32)
    packing.pack([image], 1.0, 1)
    assert torch.equal(layout.tensor(wire, 0), image.permute(0, 2, 3, 1).flatten())
    back = torch.zeros_like(image)
    packing.unpack([back], 1)
    assert torch.equal(back, image)


def test_a_buffer_that_begins_at_an_odd_place_is_refused_by_the_kernels():
    row = torch.zeros(200)[1:]
    tensors = values([5], torch.float32)
    layout = layout_of([5])
    out = torch.zeros(16)
    with interpreted_gpu():
        packing = dispatch.packing(torch.zeros(layout.numel), layout, tensors)
        for call in (
            lambda: dispatch.packing(row[: layout.numel], layout, tensors),
            lambda: dispatch.adding(out, [out, row[:16]]),
            lambda: dispatch.mixing(torch.zeros(16), row[:16], 0.5),
            lambda: packing.mix(tensors, row, row, 0.5),
        ):
            with pytest.raises(ValueError, match=r"begins at 0x[0-9a-f]+, which is no multiple of 16 bytes"):
                call()


def test_what_arrives_is_mixed_in_fp32(backend):
    for dtype in GPU_DTYPES:
        own, received = values([9000, 9000], dtype)
        want = (own.float() + 0.25 * (received.float() - own.float())).to(dtype)
        dispatch.mixing(own, received, 0.25)()
        assert torch.equal(own, want), dtype


def test_integers_are_added_by_torch_wherever_they_are_and_keep_all_bits(backend):
    for dtype, received in product((torch.int32, torch.int64), (1, 2)):
        own = torch.arange(5, dtype=dtype) + 2**24
        dispatch.adding(own, [*(own.clone() for _ in range(received)), own])()
        assert own.tolist() == [(number + 2**24) * (1 + received) for number in range(5)], (dtype, received)


def test_a_gradient_on_another_device_than_its_bucket_is_refused():
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.zeros(3)
    layout = layout_of([3])
    bucket = GradientBucket(0, [("w", param)], layout, torch.zeros(layout.numel, device="meta"), model=1)
    with pytest.raises(UsageError, match=r"the gradient of w is on cpu, and its bucket on meta"):
        bucket.take(Header(0, 1, 0, 0, 0, 0), bucket.names)


class OnGpu(torch.Tensor):
    """As if on one; says on which streams it is used."""

    is_cuda = property(lambda self: True)
    used_on = ()

    def record_stream(self, stream):
        self.used_on = (*self.used_on, stream)


def test_a_gradient_that_was_made_on_the_lane_s_stream_is_not_freed_under_the_reader_s(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the reader's on {device}")
    param = nn.Parameter(torch.zeros(3))
    layout = layout_of([3])
    bucket = GradientBucket(0, [("w", param)], layout, torch.zeros(layout.numel), model=1)
    bucket.take(Header(0, 1, 0, 0, 0, 0), ())
    bucket.pack(1.0)
    layout.flags(bucket.wire).fill_(1)  # another rank had it
    bucket.unpack()
    bucket._made = {0: bucket._made[0].as_subclass(OnGpu)}
    bucket.assign_missing()
    assert param.grad.used_on == ("the reader's on cpu",)


MOVE = {"pack_kernel", "unpack_kernel", "reduce_kernel"}
CODE = {"quantize_kernel", "dequantize_kernel", "add_quantized_kernel"}
KERNELS = {None: MOVE, torch.bfloat16: MOVE, Int4(64, rounding="stochastic"): CODE}
"""What carries which wire."""


@pytest.mark.parametrize("wire", KERNELS, ids=str)
def test_training_with_the_kernels_is_training_with_their_definitions_bit_by_bit(wire):
    def body(world):
        return trained(world, UNTRAINED, {"algorithm": commrt.Direct(), "wire": wire})

    on_cpu = run_ranks(3, body)
    with interpreted_gpu() as launches:
        assert run_ranks(3, body) == on_cpu
    assert {*launches.names} >= KERNELS[wire]


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=9))
def test_a_layout_leaves_no_two_things_in_one_place(counts):
    layout = layout_of(counts)
    taken = torch.zeros(layout.numel, dtype=torch.int32)
    for piece in (layout.header(taken), layout.flags(taken), *(layout.tensor(taken, i) for i in range(len(counts)))):
        piece.add_(1)
    assert taken.max() == 1
    assert all(offset % GRANULE == 0 for offset in layout.offsets)
    assert layout.numel < 64 + 16 + 16 * len(counts) + len(counts) + sum(counts) + 1


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=8))
def test_overlap_finds_what_a_look_at_all_pairs_finds(pieces):
    def share(one, other):
        return max(one[0], other[0]) < min(sum(one), sum(other))

    pairs = {frozenset((str(i), str(j))) for i in range(len(pieces)) for j in range(i) if share(pieces[i], pieces[j])}
    overlaps, found = OverlapCheck(), None
    overlaps.expect_bucket(), overlaps.expect_bucket()
    blocks = [(address, nbytes, str(i)) for i, (address, nbytes) in enumerate(pieces) if nbytes]
    overlaps.check(0, blocks[::2])
    try:
        overlaps.check(1, blocks[1::2])
    except UsageError as error:
        found = frozenset(re.findall(r"\d+", str(error)))
    assert (found is None) == (not pairs)
    assert found is None or found in pairs


def test_a_triton_that_is_too_old_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    with pytest.raises(ImportError, match=r"need Triton 3\.5 or newer, and this is 3\.2\.0: upgrade torch"):
        importlib.reload(device)


# On a GPU, what no kernel offers goes through its definition in plain torch: fp64, alone and beside fp32.

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
UNTRAINED = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = deepcopy(UNTRAINED).double()
        self.layers[2].float()

    def forward(self, x):
        return self.layers[2](self.layers[:2](x).float()).double()


MIXED = Mixed()
WAYS = {
    "all-reduce": {"algorithm": commrt.Ring()},
    "bf16 wire": {"algorithm": commrt.Ring(), "wire": BF16},
    "fp32 wire": {"algorithm": commrt.Torus2D(), "wire": FP32},
    "codes": {"algorithm": commrt.Direct(), "wire": commrt.Int8()},
    "views": {"algorithm": commrt.Ring(), "gradients": "views"},
    "gossip": {"algorithm": commrt.Gossip()},
    "gossip of gradients": {"algorithm": commrt.Gossip(payload="gradients")},
    "local SGD": {"algorithm": commrt.LocalSGD(period=2)},
    "DiLoCo": {"algorithm": commrt.local_sgd.diloco(period=2)},
    "backup workers": {"algorithm": commrt.BackupWorkers(backups=0, inner=commrt.Ring())},
}


def trained(world, model, options, steps=2):
    model = deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = commrt.attach(model, optimizer, world=world, bucket_cap_mb=1e-4, **options)
    reasons = set()
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        x = torch.randn(4, 5, dtype=next(model.parameters()).dtype, generator=generator)
        model(x).square().sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        reasons |= set(replica.why_not_graphs().values())
    replica.consolidate()
    assert replica.replicas_equal()
    replica.detach()
    return [param.tolist() for param in model.parameters()], reasons


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow) if way == "codes" else way for way in WAYS])
def test_every_way_to_train_takes_fp64_on_a_gpu_and_gives_the_bits_of_a_cpu(way):
    def body(world):
        return trained(world, MIXED, WAYS[way])

    on_cpu = run_ranks(2, body)
    with interpreted_gpu():
        assert run_ranks(2, body) == on_cpu


def test_graphs_say_why_they_do_not_carry_fp64_and_the_step_goes_on():
    options = {"algorithm": commrt.Ring(), "graphs": True}

    def body(world):
        return trained(world, MIXED, options, steps=4)

    with interpreted_gpu():
        (_, reasons), _ = run_ranks(2, body, connect=over_nccl)
    assert reasons == {NO_KERNEL} != {FIRST}


def test_triton_packs_where_it_offers_both_dtypes_and_plain_torch_packs_the_rest():
    layout, found = layout_of([5]), {}
    rows = [*product((FP64, FP32, BF16, torch.float16, torch.int64, torch.complex64), (FP64, FP32, BF16))]
    with interpreted_gpu():
        for dtype, wire in rows:
            tensors = [torch.zeros(5, dtype=dtype)]
            found[dtype, wire] = type(dispatch.packing(torch.zeros(layout.numel, dtype=wire), layout, tensors))
    assert found == {row: TritonPacking if {*row} <= {*dispatch.GPU_DTYPES} else TorchPacking for row in rows}
