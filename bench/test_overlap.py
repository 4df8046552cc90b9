# SPDX-License-Identifier: Apache-2.0
"""Measure how much a backward pass slows down while its gradients are packed on a stream beside it.

A stack of ResNet-50's bottlenecks runs with and without packing, interleaved. Nothing is sent: this is the kernels'
share of the cost. Without a GPU a small stack shows that this file runs.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import pytest
import torch
from conftest import Keep
from gpu_timer import HAS_GPU
from interleaved import Clock, Times, table
from kernel_variants import DEVICE
from records import made
from torch import Tensor, nn

from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.header import Header
from commrt.buckets.plan import MIB, build_buckets
from commrt.buckets.ready_order import ReadyOrder
from commrt.buckets.view_bucket import ViewBucket
from commrt.threads.comm_thread import CommThread
from commrt.threads.streams import streams_of
from commrt.training.backward_pass import at_end_of_backward

CLOCK = Clock()
ALONE, PACKED = "backward alone", "with packing beside it"
OWN, VIEWS, STAY = "packed and unpacked, fp32", "packed into views, fp32", "views that stay, scaled in place"
KINDS: dict[str, tuple[type[GradientBucket], torch.dtype | None, bool]] = {
    PACKED: (GradientBucket, torch.bfloat16, False),
    OWN: (GradientBucket, None, True),
    VIEWS: (ViewBucket, None, True),
    STAY: (ViewBucket, None, True),
}
"""Kind of bucket, dtype of the wire, whether gradients are unpacked too."""
PEERS = dict.fromkeys((ALONE, *KINDS), ALONE)
ROUNDS = 30 if HAS_GPU else 3
BATCH, SIDE, DEPTH, WIDTH = (64, 28, 16, 128) if HAS_GPU else (2, 7, 2, 8)


def clock() -> float:
    """Return the time for pytest-benchmark: the one that was measured in the interleaved rounds."""
    return CLOCK.now_s


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, each normalised, with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = ((4 * width, width, 1), (width, width, 3), (width, 4 * width, 1))
        layers = [
            layer
            for a, b, k in sizes
            for layer in (nn.Conv2d(a, b, k, padding=k // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU())
        ]
        self.inner = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, 4 * width, side, side] to the same shape."""
        return torch.relu(x + self.inner(x))


class Packer:
    """Packs each bucket once it is ready, on a communication thread's stream, and may unpack it: all but exchanges."""

    def __init__(self, model: nn.Module, kind: type[GradientBucket], wire: torch.dtype | None, unpacks: bool) -> None:
        self.active, self._unpacks = False, unpacks
        self._lane = CommThread(lambda *_: None)
        if HAS_GPU:
            self._lane.submit(self._enter).result()
        params = list(model.named_parameters())[::-1]
        self._buckets = build_buckets(params, wire, 25 * MIB, kind=kind)
        self._order = ReadyOrder([bucket.names for bucket in self._buckets])
        self._answers: list[object] = []
        for name, param in params:
            param.register_post_accumulate_grad_hook(lambda _, name=name: self._ready(name))

    def _enter(self) -> None:
        streams = streams_of(DEVICE)
        streams.enter()
        self._lane.streams = streams

    def _ready(self, name: str) -> None:
        if not self.active:
            return
        if not self._answers:
            at_end_of_backward(self._finish)
        self._answers.append(None)
        for index in self._order.mark(name):
            self._submit(self._buckets[index])

    def _submit(self, bucket: GradientBucket) -> None:
        bucket.take(Header(0, 1, 0, 0, bucket.index, 0), self._order.not_awaited)
        self._answers.append(self._lane.submit(lambda: self._carry(bucket)))

    def _carry(self, bucket: GradientBucket) -> None:
        bucket.pack(0.5)
        if self._unpacks:
            bucket.unpack()

    def _finish(self) -> None:
        for answer in filter(None, self._answers):
            answer.result()
        for bucket in self._buckets:
            bucket.assign_missing()
        self._answers.clear()
        self._order.arm()

    def close(self) -> None:
        """End the thread."""
        self._lane.close()


def seconds(work: Callable[[], None]) -> float:
    """Return the seconds of `work`, until the device has done it."""
    if HAS_GPU:
        torch.cuda.synchronize()
    begin_s = perf_counter()
    work()
    if HAS_GPU:
        torch.cuda.synchronize()
    return perf_counter() - begin_s


@pytest.fixture(scope="module")
def times(request: pytest.FixtureRequest) -> Times:
    """Return the seconds of backward passes, alone and with packing of each kind, interleaved."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Bottleneck(WIDTH) for _ in range(DEPTH))).to(DEVICE)
    packers = {name: Packer(model, *kind) for name, kind in KINDS.items()}
    found: Times = {name: [] for name in PEERS}
    x = torch.randn(BATCH, 4 * WIDTH, SIDE, SIDE, device=DEVICE)
    for turn in range(ROUNDS + 3):
        for variant in PEERS:
            for name, packer in packers.items():
                packer.active = name == variant
            model.zero_grad(set_to_none=variant != STAY)
            loss = model(x).square().mean()
            found[variant] += [seconds(loss.backward)] * (turn >= 3)
    for packer in packers.values():
        packer.close()
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\n{DEPTH} bottlenecks of width {WIDTH}, batch {BATCH}\n{table(found, PEERS)}")
    return found


@pytest.mark.benchmark(group="overlap", timer=clock)
@pytest.mark.parametrize("variant", PEERS)
def test_a_backward_pass_with_packing_beside_it(benchmark, times: Times, variant: str, keep: Keep):
    records = list(made("overlap", f"{DEPTH} bottlenecks of width {WIDTH}", times, {variant: PEERS[variant]}))
    benchmark.extra_info.update(records[0])
    keep(records)
    benchmark.pedantic(CLOCK.replay(times[variant]), rounds=ROUNDS)
