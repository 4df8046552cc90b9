# SPDX-License-Identifier: Apache-2.0
"""What the runtime would launch on a GPU, as JSON; tests/test_launches.py says what must be in it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from fake_gpu import Driver, Operations, fake_gpu
from torch import nn

import commrt
from commrt.buckets.gradient_bucket import GradientBucket, Header, build_buckets
from commrt.buckets.layout import MIB
from commrt.testing.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from model_gradients import resnet50


def step(buckets: list[GradientBucket], fake: Driver) -> dict[str, Any]:
    """One step of all buckets: what was launched, and which operations of torch there were besides."""
    fake.calls.clear()
    with Operations() as operations:
        for bucket in buckets:
            bucket.take(Header(0, 1, bucket.index, 0, 0, 0), ())
            bucket.pack(0.25)
            bucket.unpack()
    for bucket in buckets:
        bucket.assign_missing()
    launches = [
        (call.kernel, call.programs, call.warps, call.arguments["wire"], call.arguments["header"])
        for call in fake.calls
    ]
    return {"launches": launches, "operations": operations.names}


def steps_of_resnet50(fake: Driver) -> dict[str, Any]:
    """Steps in which nothing changes, then one in which a gradient has moved, and one in which it is not aligned."""
    params = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in resnet50().items()]
    for _, param in params:
        param.grad = torch.zeros_like(param)
    buckets = build_buckets(params, torch.bfloat16, 25 * MIB)
    steps = {name: step(buckets, fake) for name in ("first", "second", "third")}
    param = buckets[2].params[0][1]
    param.grad = param.grad.clone()
    steps["moved"] = step(buckets, fake)
    param.grad = torch.zeros(param.numel() + 1)[1:].view(param.shape)
    steps["unaligned"] = step(buckets, fake)
    return {"steps": steps, "wires": [bucket.wire.data_ptr() for bucket in buckets], "loads": fake.loads}


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


if __name__ == "__main__":
    with fake_gpu() as fake:
        sys.stdout.write(json.dumps({"resnet50": steps_of_resnet50(fake), "training": training(fake)}))
