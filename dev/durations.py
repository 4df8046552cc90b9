# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that writes how long each test took.

``TEST_DURATIONS=tests.json pytest -p durations`` loads it.
For each test: wall seconds, CPU seconds (with those of processes that ended within it), and its
outcome. The wall seconds of a test in a process of xdist are its own, but the other processes slow
it down.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

WORST = ("passed", "skipped", "failed")
found: dict[str, dict[str, Any]] = {}


def cpu_s() -> float:
    """Return the CPU seconds of this process, of children that it has waited for, and of forked
    ranks that ended.
    """
    return sum(os.times()[:4]) + forked_s()


def forked_s() -> float:
    """Return the CPU seconds of all ranks that ended: multiprocessing's server is their parent, and
    not yet over.
    """
    try:
        status = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/stat").read_text("utf-8")  # type: ignore[attr-defined]
    except OSError:  # there is no such server
        return 0.0
    user, system = status.rpartition(")")[2].split()[13:15]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note when the test begins."""
    item._began = perf_counter(), cpu_s()  # type: ignore[attr-defined]
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Send the test's seconds to the process that writes them."""
    report: Any = yield
    if report.when == "teardown":
        wall, cpu = item._began  # type: ignore[attr-defined]
        report.user_properties = [
            *report.user_properties,
            ("seconds", [perf_counter() - wall, cpu_s() - cpu]),
        ]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect what the processes send."""
    one = found.setdefault(report.nodeid, {"outcome": "passed", "wall_s": 0.0, "cpu_s": 0.0})
    one["outcome"] = max(one["outcome"], report.outcome, key=WORST.index)
    for name, value in report.user_properties:
        if name == "seconds":
            one["wall_s"], one["cpu_s"] = (round(float(each), 4) for each in value)  # type: ignore[attr-defined]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file."""
    if found and not hasattr(session.config, "workerinput"):
        Path(os.environ["TEST_DURATIONS"]).write_text(json.dumps(found, indent=0) + "\n", "utf-8")
