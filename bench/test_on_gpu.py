# SPDX-License-Identifier: Apache-2.0
"""Check what needs a GPU: that the kernels give there what their definitions say.

Without a GPU the definitions are compared with themselves, which shows that this file runs.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from gpu_timer import HAS_GPU, allocations, waiting_is_an_error
from kernel_variants import DEVICE
from torch import Tensor
from torch.distributed import HashStore

from commrt.kernels import dispatch, quantize, quantize_dispatch
from commrt.kernels.dispatch import GPU_DTYPES
from commrt.kernels.layout import Layout, layout_of
from commrt.kernels.packing import Packing
from commrt.kernels.torch_packing import TorchPacking, views_of
from commrt.quantizer import NEAREST, STOCHASTIC, Float8, Quantizer
from commrt.threads.streams import streams_of
from commrt.transport.nccl import NcclTransport
from commrt.transport.nccl_binding import load
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag

LENGTHS = (0, 1, 7, 8, 9, 127, 1009, 4095, 4096, 4097, 8192, 50257, 1_000_003)
F64 = torch.float64
PAIRS = [*product(GPU_DTYPES, GPU_DTYPES), (F64, F64), (F64, torch.float32), (F64, torch.bfloat16)]
"""Plain torch packs those of fp64."""
HEADER = 0xF000_0000_0000_0005

CODED_NUMELS = (1, 255, 2048, 5000, 1_000_003)
KEY = 0x9E37_79B9_7F4A_7C15
KINDS = [*(Quantizer(bits) for bits in (2, 3, 4, 5, 6, 7, 8)), Float8(), Quantizer(8, 64), Quantizer(4, 1024)]
ENCODED = [
    *(Quantizer(bits, feedback=feedback) for bits, feedback in product((2, 4, 8), (False, True))),
    *(Quantizer(bits, rounding=STOCHASTIC) for bits in (2, 4, 8)),
    *(Float8(feedback=feedback) for feedback in (False, True)),
]

pytestmark = pytest.mark.usefixtures("one_thread")
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")


def random(count: int, dtype: torch.dtype, seed: int, skew: int = 0) -> Tensor:
    """Return values of many magnitudes on the CPU, `skew` elements off an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count + skew, generator=generator)
    return (values * 10 ** torch.empty(count + skew).uniform_(-4, 2, generator=generator)).to(dtype)[skew:]


def there(tensor: Tensor, skew: int = 0) -> Tensor:
    """Return a copy on the device, `skew` elements off an aligned address."""
    room = torch.empty(tensor.numel() + skew, dtype=tensor.dtype, device=DEVICE)[skew:]
    return room.copy_(tensor)


def wires(layout: Layout, dtype: torch.dtype, like: list[Tensor]) -> tuple[Tensor, Packing, Tensor, Packing]:
    """Return a wire full of NaN and its packing, on the device, then on the CPU."""
    here = torch.full((layout.numel,), float("nan"), dtype=dtype)
    away = there(here)
    return away, dispatch.packing(away, layout, like), here, TorchPacking(here, layout, like)


def same(got: Tensor, want: Tensor) -> bool:
    """Return True if the bits are equal, but for the bits of NaN."""
    got = got.cpu()
    return torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)) and torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("skew", [0, 2, 1])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS, ids=str)
def test_pack_and_unpack_are_their_definitions_bit_by_bit(dtype: torch.dtype, wire: torch.dtype, skew: int):
    sources: list[Tensor | None] = [random(count, dtype, seed, skew) for seed, count in enumerate(LENGTHS)]
    layout = layout_of(LENGTHS)
    away, packing, here, reference = wires(layout, wire, sources)
    sources[5] = None
    sent = [source if source is None else there(source, skew) for source in sources]
    packing.pack(sent, 1 / 6, HEADER)
    reference.pack(sources, 1 / 6, HEADER)
    assert same(away, here)
    assert packing.present() == reference.present()
    targets = [torch.zeros(count, dtype=dtype) for count in LENGTHS]
    back = [there(target, skew) for target in targets]
    packing.unpack(back, HEADER)
    reference.unpack(targets, HEADER)
    assert all(map(same, back, targets))


@pytest.mark.parametrize("dtype", GPU_DTYPES, ids=str)
def test_gradients_that_live_on_the_wire_are_scaled_in_place(dtype: torch.dtype):
    layout = layout_of(LENGTHS)
    like = [torch.empty(length, dtype=dtype) for length in LENGTHS]
    away, ours, here, theirs = wires(layout, dtype, like)
    homes, values = views_of(away, layout, like), [random(length, dtype, seed=i) for i, length in enumerate(LENGTHS)]
    for home, value in zip(homes, values, strict=True):
        home.copy_(value)
    ours.pack(homes, 1 / 3, HEADER)
    theirs.pack(values, 1 / 3, HEADER)
    assert same(away, here)
    ours.compare(HEADER)
    if HAS_GPU:
        torch.cuda.synchronize()
    assert not ours.mismatched
    ours.compare(HEADER + 1)
    if HAS_GPU:
        torch.cuda.synchronize()
    assert ours.mismatched


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("dtype", GPU_DTYPES, ids=str)
def test_what_arrives_is_added_from_left_to_right_and_rounded_once(dtype: torch.dtype, ranks: int):
    for seed, count in enumerate(LENGTHS[1:]):
        own, scratch = random(count, dtype, seed), random(ranks * (count + 16), dtype, seed + 50).view(ranks, -1)
        scratch = scratch[:, : count + -count % 16].contiguous()
        want = own.float()
        for part in scratch:
            want = want + part[:count].float()
        away = there(own)
        dispatch.adding(away, [away, *(part[:count] for part in scratch.to(DEVICE))])()
        assert same(away, want.to(dtype))


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [(torch.float32, torch.bfloat16), (torch.float32,) * 2, (torch.bfloat16,) * 2, (F64, F64), (F64, torch.bfloat16)],
)
def test_mix_is_its_definition_bit_by_bit(dtype: torch.dtype, wire: torch.dtype):
    tensors = [random(count, dtype, seed) for seed, count in enumerate(LENGTHS)]
    layout = layout_of(LENGTHS)
    _, packing, _, reference = wires(layout, wire, tensors)
    received, sent = random(layout.numel, wire, 50), random(layout.numel, wire, 51)
    moved = [there(tensor) for tensor in tensors]
    packing.mix(moved, there(received), there(sent), 0.3)
    reference.mix(tensors, received, sent, 0.3)
    assert all(map(same, moved, tensors))


def test_a_disputed_header_shows_when_the_kernel_has_run():
    tensors = [there(random(100, torch.float32, 0))]
    _, packing, _, _ = wires(layout_of([100]), torch.float16, tensors)
    packing.pack(tensors, 1.0, HEADER)
    packing.unpack(tensors, HEADER)
    finish()
    assert not packing.mismatched
    packing.unpack(tensors, HEADER ^ 2)
    finish()
    assert packing.mismatched


def test_a_steady_step_neither_allocates_nor_waits():
    tensors = [there(random(count, torch.float32, count)) for count in LENGTHS]
    _, packing, _, _ = wires(layout_of(LENGTHS), torch.bfloat16, tensors)
    for _ in range(2):
        packing.pack(tensors, 0.5, HEADER)
        packing.unpack(tensors, HEADER)
    before = allocations()
    with waiting_is_an_error():
        packing.pack(tensors, 0.5, HEADER)
        packing.unpack(tensors, HEADER)
    assert allocations() == before


@needs_gpu
def test_one_rank_exchanges_with_itself_and_a_communicator_that_was_given_up_is_followed_by_another():
    for attempt in range(2):
        transport = NcclTransport(HashStore(), 0, range(1), 60.0, DEVICE)
        source, target = torch.full((1000,), attempt + 1.0, device=DEVICE), torch.zeros(1000, device=DEVICE)
        transport.bind(P2PGroup([P2PMessage(0, source)], [P2PMessage(0, target)]))(Tag(0, 0))
        finish()
        assert torch.equal(source, target)
        (transport.close, transport.abort)[attempt]()


@needs_gpu
def test_two_streams_wait_for_each_other_where_they_are_told_to():
    streams, rounds = streams_of(DEVICE), 200
    with torch.cuda.stream(torch.cuda.current_stream(DEVICE)):
        streams.enter()
        value = torch.zeros(1 << 20, device=DEVICE)
        streams.wait_event(streams.record_event())
        for _ in range(rounds):
            value.add_(1)
            came = streams.record_event()
            with streams.side_stream():
                streams.wait_event(came)
                value.mul_(1)
                done = streams.record_event()
            streams.wait_event(done)
        finish()
    assert (value == rounds).all()


@needs_gpu
@pytest.mark.parametrize("skew", [0, 1])
def test_a_captured_step_follows_gradients_that_move_another_scale_and_another_header(skew):
    first = [there(random(count, torch.float32, count)) for count in LENGTHS]
    away, packing, _, _ = wires(layout_of(LENGTHS), torch.bfloat16, first)
    packing.load()

    def work() -> None:
        packing.pack_aimed()
        packing.unpack_aimed()

    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        graph = streams_of(DEVICE).capture(work)
        second = [there(random(count, torch.float32, count + 1), skew) for count in LENGTHS]
        originals = [tensor.clone() for tensor in second]
        torch.cuda.synchronize()
        packing.aim(second, 0.25, HEADER ^ 6)
        graph.replay()
        packing.repeated(second)
        torch.cuda.synchronize()
    replayed, quarters = away.cpu(), [tensor.cpu() for tensor in second]
    for tensor, original in zip(second, originals, strict=True):
        tensor.copy_(original)
    packing.pack(second, 0.25, HEADER ^ 6)
    packing.unpack(second, HEADER ^ 6)
    assert same(away, replayed)
    assert all(map(same, second, quarters))
    assert not packing.mismatched


@needs_gpu
@pytest.mark.parametrize("by_graph", [False, True], ids=["calls", "graph"])
def test_nccl_moves_bytes_from_a_rank_to_itself(by_graph):
    """Test the binding on one rank; the transport copies instead."""
    nccl = load()
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    source, target = there(random(1009, torch.float32, 0)), torch.zeros(1009, device=DEVICE)
    streams = streams_of(DEVICE)

    def swap() -> None:
        nccl.groupStart()
        communicator.send(source.data_ptr(), source.nbytes, nccl.NCCL_INT8, 0, streams.current())
        communicator.recv(target.data_ptr(), target.nbytes, nccl.NCCL_INT8, 0, streams.current())
        nccl.groupEnd()

    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        swap()
        if by_graph:
            torch.cuda.synchronize()
            graph = streams.capture(swap)
            source.mul_(2)
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(source, target)
    if by_graph:
        graph.reset()
    communicator.destroy()


@needs_gpu
def test_after_a_capture_that_was_refused_the_device_works_as_before():
    state, value = (torch.zeros(8, device=DEVICE) for _ in range(2))

    def forbidden() -> None:
        state.add_(1)
        torch.cuda.synchronize()

    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError):
            streams_of(DEVICE).capture(forbidden)
    assert torch.nn.functional.dropout(torch.ones(1000, device=DEVICE)).sum() > 0
    torch.cuda.empty_cache()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        streams_of(DEVICE).capture(lambda: torch.add(value, 1, out=value)).replay()
        torch.cuda.synchronize()
        assert (value == 1).all()


@needs_gpu
def test_a_tensor_of_more_than_two_to_the_31_elements_is_packed_to_its_end():
    count = (1 << 31) + 4099
    tensor = torch.zeros(count, dtype=torch.bfloat16, device=DEVICE)
    tensor[-5000:] = torch.arange(5000, device=DEVICE)
    layout = layout_of([count])
    wire = torch.full((layout.numel,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    packing = dispatch.packing(wire, layout, [tensor])
    packing.pack([tensor], 0.5, HEADER)
    place = layout.tensor(wire, 0)
    assert torch.equal(place[-5000:], tensor[-5000:] * 0.5)
    assert not place.isnan().any()


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
    for numel in CODED_NUMELS:
        here, left = values(numel, 0), values(numel, 1) * 0.01
        want = torch.full((quantizer.nbytes(numel),), 0xEE, dtype=torch.uint8)
        away, away_left, got = there(here), there(left), there(want)
        quantize.quantize(here, want, quantizer, left if quantizer.feedback else None, KEY)
        quantize_dispatch.quantizing(away, got, quantizer, away_left if quantizer.feedback else None)(KEY)
        assert torch.equal(got.cpu(), want)
        assert same(away_left, left)


@pytest.mark.parametrize("quantizer", KINDS, ids=str)
def test_decoding_and_adding_codes_are_their_definitions(quantizer: Quantizer):
    for numel, count in zip(CODED_NUMELS, (1, 2, 7, 3, 2), strict=True):
        rows, total = quantized(quantizer, numel, count), values(numel, 9).nan_to_num(3.0, 3.0, 3.0)
        away, dequantized, away_total = rows.to(DEVICE), torch.empty(numel, device=DEVICE), there(total)
        want = torch.empty(numel)
        quantize.dequantize(rows[0], want, quantizer)
        quantize_dispatch.dequantizing(away[0], dequantized, quantizer)()
        quantize.add_quantized(total, list(rows), quantizer)
        quantize_dispatch.adding_quantized(away_total, list(away), quantizer)()
        assert same(dequantized, want)
        assert same(away_total, total)


def finish() -> None:
    """Wait for the device."""
    if HAS_GPU:
        torch.cuda.synchronize()
