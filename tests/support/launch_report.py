# SPDX-License-Identifier: Apache-2.0
"""What the runtime would launch on a GPU, as JSON; tests/test_launches.py says what must be in it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from fake_gpu import Driver, Operations, fake_gpu
from torch import nn

import commrt
from commrt.buckets.gradient_bucket import GradientBucket, Header, build_buckets
from commrt.buckets.layout import MIB
from commrt.kernels.device.variants import SIZES
from commrt.testing.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from kernel_variants import OURS, mix, pack
from model_gradients import resnet50
from tune_kernels import Workload, trials

CLAIM = Header(0, 1, 0, 0, 0, 0)


def parameters(shapes: list[tuple[int, ...]]) -> list[tuple[str, nn.Parameter]]:
    """Named parameters with gradients."""
    params = [(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
    for _, param in params:
        param.grad = torch.zeros_like(param)
    return params


def step(buckets: list[GradientBucket], fake: Driver) -> dict[str, Any]:
    """One step of all buckets: what was launched, and which operations of torch there were besides."""
    fake.calls.clear()
    with Operations() as operations:
        for bucket in buckets:
            bucket.take(CLAIM._replace(bucket=bucket.index), ())
            bucket.pack(0.25)
            bucket.unpack()
    for bucket in buckets:
        bucket.assign_missing()
    return {
        "kernels": Counter(call.kernel for call in fake.calls),
        "operations": operations.names,
        "uploads": [bucket._packing.tables.uploads for bucket in buckets],
    }


def steps_of_resnet50(fake: Driver) -> dict[str, Any]:
    """Steps in which nothing changes, then one in which a gradient has moved, and one in which it is not aligned."""
    params = parameters(list(resnet50().values()))
    buckets = build_buckets(params, torch.bfloat16, 25 * MIB)
    steady = [step(buckets, fake) for _ in range(3)]
    programs = [call.programs for call in fake.calls]
    arguments = [call.arguments for call in fake.calls]
    tiles = [bucket._packing.tables.tiles for bucket in buckets]
    aligned = {call.warps for call in fake.calls}
    param = buckets[2].params[0][1]
    param.grad = param.grad.clone()
    moved = step(buckets, fake)
    param.grad = torch.zeros(param.numel() + 1)[1:].view(param.shape)
    unaligned = step(buckets, fake)
    warps = [call.warps for call in fake.calls]
    return {
        "buckets": len(buckets),
        "steady": steady,
        "moved": moved,
        "unaligned": unaligned,
        "programs": programs,
        "tiles": tiles,
        "aligned_warps": list(aligned),
        "unaligned_warps": warps,
        "wires": [bucket.wire.data_ptr() for bucket in buckets],
        "wire_arguments": [call["wire"] for call in arguments],
        "headers": [call["header"] for call in arguments],
        "loads": fake.loads,
    }


def many_tensors(count: int) -> dict[str, Any]:
    """Making the buckets of `count` small tensors."""
    params = parameters([(7,)] * count)
    begin_s = perf_counter()
    build_buckets(params, None, 25 * MIB)
    return {"tensors": count, "seconds": perf_counter() - begin_s}


def contenders(fake: Driver) -> dict[str, list[str]]:
    """What each of our contenders in the benchmarks launches."""
    launched = {}
    packing = pack([(7,), (5000,)], torch.bfloat16)
    for name, task in (("pack", packing), ("mix", mix([(7,)], torch.bfloat16))):
        for who, run in task.contenders.items():
            if who.startswith(OURS):
                fake.calls.clear()
                run(0)
                launched[f"{name}: {who}"] = [call.kernel for call in fake.calls]
    return launched


def tuned(fake: Driver) -> list[str]:
    """What the tuner launches, for one size of tiles and all variants."""
    fake.calls.clear()
    for wire in (torch.float32, torch.bfloat16):
        for _, sizes, variant in trials(wire, more=True):
            if sizes == SIZES[90]:
                Workload([(7,), (5000,)], wire).launches(variant, sizes)(0)
    return [call.kernel for call in fake.calls]


def training(fake: Driver) -> dict[str, Any]:
    """Three whole steps of two ranks: kernels of the last one. Each bucket has two tiles, one for each rank's chunk."""

    def body(world: commrt.World) -> int:
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = commrt.attach(model, optimizer, commrt.Ring(), world=world, wire=torch.bfloat16, bucket_cap_mb=0.02)
        for number in range(3):
            world.agree(f"before step {number}")
            if world.rank == 0:
                fake.calls.clear()
            world.agree(f"step {number}")
            model(torch.randn(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return len(replica.buckets)

    buckets = run_ranks(2, body)[0]
    return {"buckets": buckets, "kernels": Counter(call.kernel for call in fake.calls)}


def main() -> None:
    """The report."""
    with fake_gpu() as fake:
        report = {
            "resnet50": steps_of_resnet50(fake),
            "many": many_tensors(100_000),
            "training": training(fake),
            "contenders": contenders(fake),
            "tuned": tuned(fake),
        }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
