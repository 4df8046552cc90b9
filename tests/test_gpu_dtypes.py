# SPDX-License-Identifier: Apache-2.0
"""On a GPU, what no Triton kernel offers goes through its definition in plain torch: fp64, alone and beside fp32.

Kernels run in the interpreter here, on CPU tensors that count as a GPU's.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from itertools import product

import pytest
import torch
from interpreter import interpreted_gpu
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transports import over_nccl

import commrt
from commrt.buckets.step_graph import FIRST, NO_KERNEL
from commrt.kernels import dispatch
from commrt.kernels.device.packing import TritonPacking
from commrt.kernels.layout import layout_of
from commrt.kernels.plain_torch import TorchPacking
from commrt.testing.ranks import run_ranks

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
UNTRAINED = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
FP64_ONLY = deepcopy(UNTRAINED).double()


class Mixed(nn.Module):
    """The second layer is fp32, the rest fp64."""

    def __init__(self):
        super().__init__()
        self.layers = deepcopy(FP64_ONLY)
        self.layers[2].float()

    def forward(self, x):
        return self.layers[2](self.layers[:2](x).float()).double()


MIXED = Mixed()
WAYS = {
    "all-reduce": {"algorithm": commrt.Ring()},
    "bf16 wire": {"algorithm": commrt.Ring(), "wire": BF16},
    "fp32 wire": {"algorithm": commrt.Torus2D(), "wire": FP32},
    "codes": {"algorithm": commrt.Direct(), "wire": commrt.quantization.Int8()},
    "views": {"algorithm": commrt.Ring(), "gradients": "views"},
    "gossip": {"algorithm": commrt.Gossip()},
    "gossip of gradients": {"algorithm": commrt.Gossip(payload="gradients")},
    "local SGD": {"algorithm": commrt.local_sgd.LocalSGD(period=2)},
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
        model(torch.randn(4, 5, dtype=FP64, generator=generator)).square().sum().backward()
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


@pytest.mark.parametrize(
    ("model", "kernels"), [(MIXED, {"pack_kernel", "reduce_kernel", "unpack_kernel"}), (FP64_ONLY, set())]
)
def test_triton_packs_the_fp32_buckets_of_a_model_only(model, kernels):
    with interpreted_gpu() as launches:
        run_ranks(2, lambda world: trained(world, model, WAYS["all-reduce"], steps=1))
    assert Counter(launches.names) == dict.fromkeys(kernels, 2)  # one of each for the bucket of each rank


def test_graphs_say_why_they_do_not_carry_fp64_and_the_step_goes_on():
    options = {"algorithm": commrt.Ring(), "graphs": True}
    with interpreted_gpu():
        (_, reasons), _ = run_ranks(2, lambda world: trained(world, MIXED, options, steps=4), connect=over_nccl)
    assert reasons == {NO_KERNEL} != {FIRST}


SUMS = [
    (FP64, {}),
    (FP64, {"wire": BF16}),
    (FP64, {"wire": commrt.quantization.Int8(), "algorithm": commrt.Direct()}),
    (FP32, {}),
    (torch.int64, {"op": "sum"}),
    (torch.int32, {"op": "sum"}),
]


def test_all_reduce_takes_on_a_gpu_what_it_takes_on_a_cpu():
    def body(world):
        tensors = [(torch.arange(37) * (world.rank + 1)).to(dtype) for dtype, _ in SUMS]
        for tensor, (_, options) in zip(tensors, SUMS, strict=True):
            world.all_reduce(tensor, **options)
        return [tensor.tolist() for tensor in tensors]

    on_cpu = run_ranks(2, body)
    with interpreted_gpu():
        assert run_ranks(2, body) == on_cpu


def test_triton_packs_where_it_offers_both_dtypes_and_plain_torch_packs_the_rest():
    layout, found = layout_of([5]), {}
    rows = [*product((FP64, FP32, BF16, torch.float16, torch.int64, torch.complex64), (FP64, FP32, BF16))]
    with interpreted_gpu():
        for dtype, wire in rows:
            tensors = [torch.zeros(5, dtype=dtype)]
            found[dtype, wire] = type(dispatch.packing(torch.zeros(layout.numel, dtype=wire), layout, tensors))
    assert found == {row: TritonPacking if {*row} <= {*dispatch.GPU_DTYPES} else TorchPacking for row in rows}
