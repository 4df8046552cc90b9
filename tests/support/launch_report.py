# SPDX-License-Identifier: Apache-2.0
"""What the runtime would launch on a GPU, as JSON; tests/test_launches.py says what must be in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from fake_gpu import Driver, Operations, fake_gpu
from torch import nn

from commrt.buckets.gradient_bucket import GradientBucket, Header, build_buckets
from commrt.buckets.layout import MIB

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


if __name__ == "__main__":
    with fake_gpu() as fake:
        sys.stdout.write(json.dumps(steps_of_resnet50(fake)))
