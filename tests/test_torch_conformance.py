# SPDX-License-Identifier: Apache-2.0
"""torch's own tests of process groups pass with commrt as the backend, and fail with one that moves no data."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch_conformance.outcome import FAILED

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.processes, pytest.mark.slow]

TOGETHER = """
    get_backend get_rank_size_full_group barrier barrier_full_group
    isend irecv send_recv send_recv_any_source send_recv_with_tag batch_isend_irecv_gloo batch_isend_irecv_gloo_tags
    broadcast broadcast_full_group reduce_(sum|product|min|max|sum_twice|full_group_sum)
    all_reduce_(sum|sum_async|sum_complex|complex_unsupported_ops|product|min|max|full_group_sum)
    sparse_all_reduce_sum all_reduce_coalesced_(sum|product|min|max|max_complex_unsupported)
    scatter scatter_checks scatter_complex gather gather_checks
    all_gather all_gather_complex all_gather_coalesced_(simple|complex|with_empty)
    all_to_all all_to_all_complex all_to_all_single_(un)?equal_split all_to_all_single_(un)?equal_split_complex
    all_gather_object_default_pg gather_object scatter_object_list static_graph_api_cpu ddp_logging_data_cpu
    DistributedDataParallelCPU DistributedDataParallelCPU_grad_is_view DistributedDataParallel_requires_grad
    ddp_create_graph grads_same_across_ranks_with_no_sync get_future
    monitored_barrier_gloo_rank_0_timeout
"""
"""Tests that leave their group as it was."""
OF_DATA = ["all_reduce_sum", "all_gather", "send_recv"]


def conformance(folder, backend, ranks, names, *more):
    """The outcomes of the tests `names`, and all that the command has printed."""
    out = folder / "outcomes.json"
    given = [f"--backend={backend}", f"--ranks={ranks}", f"--only=^test_({'|'.join(names)})$", "--limit=60"]
    command = [sys.executable, "-m", "torch_conformance", *given, f"--out={out}", f"--logs={folder}", *more]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "dev", ROOT / "tests" / "support")))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths})
    assert out.exists(), done.stderr
    return json.loads(out.read_text())["outcomes"], done.stdout


def test_commrt_passes_on_4_ranks(tmp_path):
    (outcome,), said = conformance(tmp_path, "commrt", 4, TOGETHER.split(), "--together")
    assert outcome["state"] == "passed", said


def test_a_backend_that_moves_nothing_passes_no_test_of_a_collective(tmp_path):
    outcomes, said = conformance(tmp_path, "moves_nothing", 2, OF_DATA)
    assert [outcome["state"] for outcome in outcomes] == [FAILED] * len(OF_DATA), said
