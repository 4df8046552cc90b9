# SPDX-License-Identifier: Apache-2.0
"""What the runtime asks of a GPU in each step, counted where launches are noted and not made."""

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from forked_commands import printed
from model_gradients import resnet50
from sources import ROOT
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from commrt.buckets.header import Header
from commrt.buckets.plan import MIB, build_buckets
from commrt.kernels import dispatch
from commrt.kernels.device import packing

SUPPORT = ROOT / "tests" / "support"
HEADERS = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
BUCKETS = 5
"""Of ResNet-50."""


class Launch(NamedTuple):
    kernel: str
    programs: int
    warps: int
    arguments: dict[str, int]


class Operations(TorchDispatchMode):
    """Notes every operation of torch: whatever allocates, copies or waits is one."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def step(buckets, launches):
    """One step of all buckets: what was launched, and torch's operations besides."""
    launches.clear()
    with Operations() as operations:
        for bucket in buckets:
            bucket.take(Header(0, 1, bucket.index, 0, 0, 0), ())
            bucket.pack(0.25)
            bucket.unpack()
    for bucket in buckets:
        bucket.assign_missing()
    return SimpleNamespace(launches=[*launches], operations=operations.names)


@pytest.fixture(scope="module")
def report():
    """Steady steps, one in which a gradient has moved, and one in which it is not aligned."""
    launches, variants = [], set()

    def launch_of(variant, device):
        variants.add(variant)

        def launch(programs, *arguments):
            for (_, kind), value in zip(variant.types, arguments, strict=True):
                assert type(value) is int
                assert 0 <= value < 1 << 64
                assert value % 16 == 0 or not kind.startswith("*"), "kernels rely on it"
            given = dict(zip((name for name, _ in variant.types), arguments, strict=True))
            launches.append(Launch(variant.kernel.fn.__name__, programs, variant.warps, given))

        return launch

    params = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in resnet50().items()]
    for _, param in params:
        param.grad = torch.zeros_like(param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "is_on_gpu", lambda tensor: True)
        patch.setattr(packing, "launch_of", launch_of)
        patch.setattr(packing, "arch_of", lambda device: 90)
        buckets = build_buckets(params, torch.bfloat16, 25 * MIB)
        steps = {name: step(buckets, launches) for name in ("first", "second", "third")}
        param = buckets[2].params[0][1]
        param.grad = param.grad.clone()
        steps["moved"] = step(buckets, launches)
        param.grad = torch.zeros(param.numel() + 1)[1:].view(param.shape)
        steps["unaligned"] = step(buckets, launches)
    wires = [bucket.wire.data_ptr() for bucket in buckets]
    return SimpleNamespace(steps=steps, wires=wires, variants=variants)


def test_a_bucket_is_packed_by_one_launch_and_unpacked_by_one_on_its_own_wire(report):
    for each in report.steps.values():
        kernels = [launch.kernel for launch in each.launches]
        assert kernels == ["pack_kernel", "unpack_kernel"] * BUCKETS
    wires = [launch.arguments["wire"] for launch in each.launches]
    headers = [launch.arguments["header"] for launch in each.launches]
    assert wires[::2] == wires[1::2] == report.wires
    assert headers[::2] == headers[1::2]
    assert len({*headers}) == BUCKETS


def test_a_steady_step_allocates_nothing_copies_nothing_and_waits_for_nothing(report):
    assert report.steps["second"].operations == report.steps["third"].operations == []
    for operation in ("aten.copy_.default", "aten.fill_.Scalar"):  # tables of addresses, and scales
        assert report.steps["first"].operations.count(operation) == BUCKETS
    assert report.steps["moved"].operations.count("aten.copy_.default") == 1


def test_a_gradient_that_is_not_aligned_makes_its_bucket_take_another_kernel(report):
    assert [launch.warps for launch in report.steps["third"].launches] == [4] * 10
    warps = [launch.warps for launch in report.steps["unaligned"].launches]
    assert warps == [4, 4, 4, 4, 8, 8, 4, 4, 4, 4]
    assert len(report.variants) == 6  # three alignments, two ways


@pytest.mark.slow
@pytest.mark.skipif(which("gcc") is None, reason="Triton's launcher needs a C compiler")
def test_what_is_launched_arrives_at_the_driver_from_code_that_was_loaded_once(tmp_path):
    library = ["-o", tmp_path / "libcuda.so.1", f"-I{HEADERS}", SUPPORT / "stub_cuda.c"]
    subprocess.run(["gcc", "-shared", "-fPIC", *library], check=True)
    env = {
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(map(str, (SUPPORT, ROOT))),
        "LD_LIBRARY_PATH": str(tmp_path),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),  # keep no launchers linked with this library
    }
    report = json.loads(printed(sys.executable, SUPPORT / "c_launch_report.py", **env))
    assert report["arrived"] == report["expected"]
