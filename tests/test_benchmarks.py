# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of the kernels, and the checks made for a GPU, run everywhere: without a GPU on plain torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"


@pytest.mark.parametrize("name", ["test_on_gpu.py", "test_kernels.py"])
def test_a_benchmark_of_the_kernels_runs(name):
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(BENCH / name),
        "-q",
        "-p",
        "no:cacheprovider",
        "--benchmark-disable",
    ]
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, cwd=BENCH.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_ceiling_is_printed_as_json():
    env = {**os.environ, "PYTHONPATH": str(BENCH)}
    done = subprocess.run(
        [sys.executable, str(BENCH / "ceiling.py")], check=True, capture_output=True, text=True, env=env
    )
    assert max(json.loads(done.stdout)["copy_bytes_per_s"].values()) > 0


def test_the_tuner_says_that_it_measured_nothing_without_a_gpu():
    code = "import tune_kernels; tune_kernels.CANDIDATES = tune_kernels.CANDIDATES[:1]; tune_kernels.describe(90)"
    env = {**os.environ, "PYTHONPATH": str(BENCH), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    assert "from compiled code, not measured" in done.stdout


def test_the_check_of_a_gpu_writes_one_record(tmp_path):
    command = [sys.executable, str(BENCH / "gpu_check.py"), "--out", str(tmp_path), "--only", "can two"]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    (stage,) = record["stages"]
    assert (record["device"], stage["passed"], stage["failed"], stage["trouble"]) == ("CPU", 1, [], None)
    assert len(stage["figures"][0]["seconds per exchange of 1 MiB"][0]) == 10


def test_the_cost_of_a_step_on_the_store_is_printed_as_json():
    command = [sys.executable, str(BENCH / "announcing.py"), "--ranks", "4", "--steps", "2", "--json"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCH), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    rows = json.loads(done.stdout)
    assert [row["operations"] for row in rows] == [4, 4, 4]  # last and first, early, late
