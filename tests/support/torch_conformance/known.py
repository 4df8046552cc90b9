# SPDX-License-Identifier: Apache-2.0
"""Tests of torch that depend on the name of the backend, not on what it does."""

from __future__ import annotations

NAMED = frozenset(
    f"test_accumulate_gradients_no_sync{suffix}"
    for suffix in ("", "_grad_is_view", "_allreduce_hook", "_allreduce_with_then_hook")
)
"""Tests whose body makes no model unless BACKEND is "gloo", "mpi" or "nccl". With another name they fail in an
UnboundLocalError, so they run with BACKEND=gloo on a group of the backend under test."""

_BARRIER = "monitored_barrier is only implemented for GLOO backend"
REFUSED = {
    "test_monitored_barrier_gloo": _BARRIER,
    "test_monitored_barrier_gloo_subgroup": _BARRIER,
    "test_monitored_barrier_failure_order": _BARRIER,
    "test_monitored_barrier_wait_all_ranks": _BARRIER,
    "test_ddp_logging_data_cpu": "'custom' != ",
}
"""Tests that torch lets no backend pass but its own, and the error that shows it: `dist.monitored_barrier` compares the
backend's name, and DDP logs "custom" as the name of every backend that others register."""
