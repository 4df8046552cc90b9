# SPDX-License-Identifier: Apache-2.0
"""What the compiler makes of the kernels, for three architectures, without any of them at hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
GOLDEN = BENCH / "kernels.golden.json"
FINDINGS = json.loads(GOLDEN.read_text())["findings"]
PURE_COPIES = [
    f"{kernel} {dtype} {dtype} align 16" for kernel in ("pack", "unpack") for dtype in ("fp32", "bf16", "fp16")
]
INSTRUCTIONS_PER_ELEMENT = {
    "unpack fp32 fp32 align 16": 2.1,
    "pack fp32 bf16 align 16": 3.1,
    "pack fp32 fp32 align 16 sums": 5.3,
}
"""At most, on sm_90a: to copy; to scale and cast; to copy, scale and add up squares."""


@pytest.mark.timeout(600)
def test_the_kernels_compile_to_what_the_golden_file_says():
    """For one architecture; `bench/inspect_kernels.py --aligned --golden` takes three times as long for all."""
    command = [sys.executable, str(BENCH / "inspect_kernels.py"), "--aligned", "--arch", "90", "--golden", str(GOLDEN)]
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, f"{done.stderr}\nif this is meant: bench/inspect_kernels.py --aligned --write {GOLDEN}"


@pytest.mark.parametrize("row", FINDINGS, ids=lambda row: f"{row['kernel']} {row['arch']}")
def test_no_kernel_spills_or_waits_and_all_use_wide_accesses(row):
    assert row["spill_bytes"] == 0
    assert row["barriers"] == 0
    assert row["registers"] <= (48 if row["kernel"] in PURE_COPIES else 64)
    assert row["store_bits"] == 128
    widening = row["kernel"].startswith(("unpack fp32 bf16", "unpack fp32 fp16", "mix fp32 bf16", "mix fp32 fp16"))
    assert row["load_bits"] == 128 or (widening and row["load_bits"] == 64)


@pytest.mark.parametrize("kernel", INSTRUCTIONS_PER_ELEMENT)
def test_the_kernels_have_instructions_to_spare_beside_memory(kernel):
    (row,) = (row for row in FINDINGS if row["kernel"] == kernel and row["arch"] == "sm_90a")
    assert row["instructions_per_element"] <= INSTRUCTIONS_PER_ELEMENT[kernel]
