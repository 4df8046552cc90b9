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
SCRIPT = HERE / "launch_report.py"
pytestmark = pytest.mark.slow
HEADERS = Path(triton.__file__).parent / "backends" / "nvidia" / "include"


@pytest.fixture(scope="module")
def report():
    """Made in a process in which Triton compiles instead of interpreting."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run([sys.executable, str(SCRIPT)], check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_bucket_is_packed_by_one_launch_and_unpacked_by_one(report):
    steps = report["resnet50"]
    for step in (*steps["steady"], steps["moved"], steps["unaligned"]):
        assert step["kernels"] == {"pack_kernel": steps["buckets"], "unpack_kernel": steps["buckets"]}


def test_a_steady_step_allocates_nothing_copies_nothing_and_waits_for_nothing(report):
    for step in report["resnet50"]["steady"][1:]:
        assert step["operations"] == []
        assert step["uploads"] == [1] * report["resnet50"]["buckets"]


def test_the_first_step_sends_each_table_of_addresses_and_sets_each_scale(report):
    operations = report["resnet50"]["steady"][0]["operations"]
    assert operations.count("aten.copy_.default") == operations.count("aten.fill_.Scalar") == 5


def test_a_gradient_that_moves_costs_one_copy_for_its_bucket(report):
    assert report["resnet50"]["moved"]["operations"].count("aten.copy_.default") == 1
    assert report["resnet50"]["moved"]["uploads"] == [1, 1, 2, 1, 1]


def test_a_gradient_that_is_not_aligned_makes_its_bucket_take_another_kernel(report):
    assert report["resnet50"]["aligned_warps"] == [4]
    assert report["resnet50"]["unaligned_warps"] == [4, 4, 4, 4, 8, 8, 4, 4, 4, 4]


def test_a_program_is_launched_for_every_tile_of_the_bucket(report):
    steps = report["resnet50"]
    assert steps["programs"] == [tiles for tiles in steps["tiles"] for _ in ("pack", "unpack")]
    assert sum(steps["tiles"]) == 6334  # of 4096 elements, in 161 tensors


def test_launches_carry_the_address_of_the_wire_and_the_header_of_the_bucket(report):
    steps = report["resnet50"]
    assert steps["wire_arguments"] == [wire for wire in steps["wires"] for _ in ("pack", "unpack")]
    assert steps["headers"][::2] == steps["headers"][1::2]
    assert len(set(steps["headers"])) == steps["buckets"]


def test_a_step_of_training_is_pack_reduce_and_unpack_of_each_bucket_on_each_rank(report):
    training = report["training"]
    assert training["buckets"] > 1
    assert training["kernels"] == dict.fromkeys(
        ("pack_kernel", "reduce_kernel", "unpack_kernel"), 2 * training["buckets"]
    )


def test_buckets_of_a_hundred_thousand_tensors_are_made_in_seconds(report):
    assert report["many"]["tensors"] == 100_000
    assert report["many"]["seconds"] < 20


def test_kernels_are_compiled_once_for_all_buckets_of_a_kind(report):
    assert report["resnet50"]["loads"] == 6  # three alignments, two ways


def test_the_benchmarks_launch_one_kernel_per_task(report):
    assert report["contenders"] == {
        "pack: commrt": ["pack_kernel"],
        "mix: commrt": ["mix_kernel"],
    }


def test_the_tuner_launches_every_variant_it_tries(report):
    tried = ["pack_kernel", "unpack_kernel", *["pack_kernel"] * 3, *["unpack_kernel"] * 3]
    assert report["tuned"] == tried * 2


@pytest.mark.skipif(which("gcc") is None, reason="Triton's launcher needs a C compiler")
def test_what_is_launched_arrives_at_the_driver_through_tritons_own_launcher(tmp_path):
    library = tmp_path / "libcuda.so.1"
    compiler = ["gcc", "-shared", "-fPIC", f"-I{HEADERS}", str(HERE / "stub_cuda.c"), "-o", str(library)]
    subprocess.run(compiler, check=True)
    env = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": str(HERE),
        "LD_LIBRARY_PATH": str(tmp_path),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),  # launchers linked with this library must not be kept
    }
    command = [sys.executable, str(HERE / "c_launch_report.py")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report) == ["pack", "unpack", "add"]
    assert [launch["arrived"] for launch in report.values()] == [launch["expected"] for launch in report.values()]
