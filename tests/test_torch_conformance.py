# SPDX-License-Identifier: Apache-2.0
"""torch's own tests of process groups pass with commrt as the backend, and the report about them is true."""

from __future__ import annotations

import pytest
from torch_conformance.client import Suite
from torch_conformance.outcome import FAILED, PASSED, SKIPPED, Outcome, first_line, rank_errors, table

pytestmark = pytest.mark.processes

TOGETHER = """
    get_backend get_rank_size_full_group barrier
    send_recv_any_source send_recv_with_tag batch_isend_irecv_gloo
    broadcast reduce_sum reduce_product
    all_reduce_sum all_reduce_sum_complex all_reduce_complex_unsupported_ops
    all_reduce_product sparse_all_reduce_sum all_reduce_coalesced_sum
    scatter_complex all_gather_complex all_gather_coalesced_simple
    all_to_all_single_unequal_split
    all_gather_object_default_pg gather_object scatter_object_list
    DistributedDataParallelCPU DistributedDataParallel_requires_grad
    ddp_create_graph grads_same_across_ranks_with_no_sync get_future
    monitored_barrier_gloo_rank_0_timeout
"""
"""Names of tests that leave their group as it was."""


@pytest.mark.slow
def test_commrt_passes_on_4_ranks(tmp_path):
    with Suite("commrt", 4, tmp_path, limit_s=60, rules=("gloo", "mpi")) as suite:
        outcomes = [
            suite.run(*(f"test_{name}" for name in TOGETHER.split())),
            suite.run("test_barrier_timeout_global"),
        ]
    assert [outcome.text for outcome in outcomes if outcome.state != PASSED] == []


@pytest.fixture(scope="module")
def gloo_copy(tmp_path_factory):
    with Suite("gloo_copy", 2, tmp_path_factory.mktemp("gloo_copy")) as suite:
        yield suite


@pytest.mark.slow
def test_a_backend_that_torch_does_not_know_runs_what_gloo_runs_and_what_fails_is_named(gloo_copy):
    chosen = ["test_scatter_object_list", "test_barrier_timeout_full_group", "test_accumulate_gradients_no_sync"]
    assert [gloo_copy.run(test).state for test in chosen] == [PASSED] * 3
    assert gloo_copy.run("test_all_to_all").state == SKIPPED
    refused = gloo_copy.run("test_monitored_barrier_gloo")
    assert refused.refused
    assert "only implemented for GLOO" in first_error(refused)
    several = gloo_copy.run("test_get_rank", "test_monitored_barrier_gloo", "test_barrier")
    assert several.state == FAILED
    error = "AssertionError: test_monitored_barrier_gloo: ValueError: monitored_barrier is"
    assert first_error(several).startswith(error)


def first_error(outcome: Outcome) -> str:
    """Return the error of a rank; torch ends the others once one has failed, perhaps before they report theirs."""
    return next(iter(outcome.errors.values()), "")


@pytest.mark.slow
def test_a_test_that_hangs_is_ended_and_the_next_one_runs(gloo_copy, monkeypatch):
    gloo_copy.run("test_get_rank")
    monkeypatch.setattr("torch_conformance.client.GRACE_S", 1 - gloo_copy.limit_s)
    hung = gloo_copy.run("test_barrier_timeout_global")
    monkeypatch.undo()
    assert (hung.state, hung.exit_codes) == (FAILED, ())
    assert gloo_copy.run("test_get_rank").state == PASSED


@pytest.mark.slow
def test_a_backend_that_moves_nothing_passes_no_test_of_a_collective(tmp_path):
    chosen = ["all_reduce_sum", "all_reduce_sum_async", "all_reduce_max", "broadcast", "all_gather", "send_recv"]
    with Suite("moves_nothing", 2, tmp_path) as suite:
        outcomes = [suite.run(f"test_{test}") for test in chosen]
    assert [outcome.state for outcome in outcomes] == [FAILED] * len(chosen)


def test_a_report_names_each_rank_that_failed():
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: no\nmore\n'
    message = "".join(f"Process {rank} exited with error code 10 and exception:\n{trace}\n" for rank in (1, 3))
    errors = rank_errors(f"RuntimeError: {message}")
    assert errors == {1: "ValueError: no", 3: "ValueError: no"}
    report = table([Outcome("test_a", FAILED, 1.0, first_line(message), errors), Outcome("test_b", PASSED, 1.0)])
    assert report.split("\n")[:3] == ["   2 run", "   1 passed", "   1 failed"]
    assert "  rank 3: ValueError: no" in report


def test_a_report_sets_apart_what_torch_refuses_to_others():
    test, reason = "test_monitored_barrier_gloo", "ValueError: monitored_barrier is only implemented for GLOO backend."
    outcome = Outcome(test, FAILED, 1.0, reason)
    assert outcome.refused
    assert "   0 failed\n   1 failed because" in table([outcome])
    assert not Outcome(test, FAILED, 1.0, "AssertionError: 3 != 4").refused
