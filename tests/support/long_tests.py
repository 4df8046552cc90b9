# SPDX-License-Identifier: Apache-2.0
"""The order in which workers of pytest run tests: what takes long begins first, so that none is left at the end."""

from __future__ import annotations

from itertools import islice

__all__ = ["LONG", "first"]

LONG = (
    "test_prove.py::test_all_sweeps",
    "by_inductor",
    "[inductor]",
    "test_surviving_jobs.py::",
    "[studies/",
    "test_under_failures_ends",
    "test_the_losses_of_50_steps",
    "test_equivalence.py::",
    "test_c10d_trainers.py::",
    "test_every_block_of_a_page",
    "test_launchers.py::",
    "test_benchmarks.py::test_a_benchmark",
    "test_compiled.py::",
    "test_torch_conformance.py::",
    "test_examples.py::",
)
"""Parts of the names of tests that take long, the longest first. Ranks compile for Numba, and one study does so in one
process, which keeps it for others: studies come before other pages."""


def first(items, workers):
    """Return `items` in another order. xdist gives each worker an equal share of it: each begins with long ones."""
    places = {item: next((at for at, part in enumerate(LONG) if part in item.nodeid), None) for item in items}
    long = sorted((item for item in items if places[item] is not None), key=places.get)
    short, found = iter([item for item in items if places[item] is None]), []
    for worker in range(workers):
        own, size = long[worker::workers], (len(items) - len(found)) // (workers - worker)
        found += [*own, *islice(short, max(0, size - len(own)))]
    return [*found, *short]
