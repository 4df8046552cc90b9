# SPDX-License-Identifier: Apache-2.0
"""What the runtime asks of a GPU in each step, counted by a driver that runs nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest
import triton

HERE = Path(__file__).parent / "support"
HEADERS = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
BUCKETS = 5
"""Of ResNet-50."""
pytestmark = pytest.mark.slow


def reported_by(program, **variables):
    """What a program says in a process in which Triton compiles instead of interpreting."""
    path = os.pathsep.join(map(str, (HERE, HERE.parent.parent)))
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path, **variables}
    done = subprocess.run([sys.executable, HERE / program], check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def report():
    return reported_by("launch_report.py")


@pytest.fixture(scope="module")
def steps(report):
    return report["steps"]


def column(step, number):
    """Of all launches of a step: kernel, programs, warps, wire or header."""
    return [launch[number] for launch in step["launches"]]


def test_a_bucket_is_packed_by_one_launch_and_unpacked_by_one_on_its_own_wire(report, steps):
    for step in steps.values():
        assert column(step, 0) == ["pack_kernel", "unpack_kernel"] * BUCKETS
    wires, headers = column(steps["third"], 3), column(steps["third"], 4)
    assert wires[::2] == wires[1::2] == report["wires"]
    assert headers[::2] == headers[1::2]
    assert len({*headers}) == BUCKETS


def test_a_steady_step_allocates_nothing_copies_nothing_and_waits_for_nothing(steps):
    assert steps["second"]["operations"] == steps["third"]["operations"] == []
    for operation in ("aten.copy_.default", "aten.fill_.Scalar"):  # tables of addresses, and scales
        assert steps["first"]["operations"].count(operation) == BUCKETS
    assert steps["moved"]["operations"].count("aten.copy_.default") == 1


def test_a_gradient_that_is_not_aligned_makes_its_bucket_take_another_kernel(report, steps):
    assert column(steps["third"], 2) == [4] * 10
    assert column(steps["unaligned"], 2) == [4, 4, 4, 4, 8, 8, 4, 4, 4, 4]
    assert report["loads"] == 6  # three alignments, two ways


def test_a_program_is_launched_for_every_tile_of_the_bucket(steps):
    programs = column(steps["third"], 1)
    assert programs[::2] == programs[1::2]
    assert sum(programs[::2]) == 6334  # of 4096 elements, in 161 tensors


@pytest.mark.skipif(which("gcc") is None, reason="Triton's launcher needs a C compiler")
def test_what_is_launched_arrives_at_the_driver_through_tritons_own_launcher(tmp_path):
    library = ["-o", tmp_path / "libcuda.so.1", f"-I{HEADERS}", HERE / "stub_cuda.c"]
    subprocess.run(["gcc", "-shared", "-fPIC", *library], check=True)
    report = reported_by(
        "c_launch_report.py",
        LD_LIBRARY_PATH=str(tmp_path),
        TRITON_LIBCUDA_PATH=str(tmp_path),
        TRITON_CACHE_DIR=str(tmp_path / "cache"),  # launchers linked with this library must not be kept
    )
    assert report["arrived"] == report["expected"]
