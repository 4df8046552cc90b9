# SPDX-License-Identifier: Apache-2.0
"""Tests of torch that depend on the name of the backend, not on what it does."""

from __future__ import annotations

NAMED = frozenset(
    f"test_accumulate_gradients_no_sync{suffix}"
    for suffix in ("", "_grad_is_view", "_allreduce_hook", "_allreduce_with_then_hook")
)
"""Tests whose body makes no model unless BACKEND is "gloo", "mpi" or "nccl". With another name they fail in an
UnboundLocalError, so they run with BACKEND=gloo on a group of the backend under test."""

REFUSED = {
    f"test_monitored_barrier_{what}": "monitored_barrier is only implemented for GLOO backend"
    for what in ("gloo", "gloo_subgroup", "failure_order", "wait_all_ranks")
}
"""Tests that only Gloo can pass, and a part of their error: `dist.monitored_barrier` compares the backend's name."""
