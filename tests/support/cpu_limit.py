# SPDX-License-Identifier: Apache-2.0
"""Plugins of pytest: a test that takes much CPU time fails unless it is marked slow. CI runs with them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib.machinery import SourceFileLoader
from multiprocessing import forkserver
from pathlib import Path
from time import thread_time

import pytest

IN_CI_S = 4.0
"""The limit in CI, whose processors may be slower. A test took 4.4 s beside others and 0.4 s alone: `AgainAlone`."""
LIMIT_S = 2.0
"""Seconds of CPU that a test may take unless it is marked slow, set-up and the processes that it waited for included.

The first import of a module does not count, as the first test of a worker of pytest would pay for all others. Ranks of
a pool (`rank_pool`) do not count either before they end.
`@pytest.mark.cpu_limit(seconds, reason=...)` sets another limit for one test.
"""

NOTE = ("takes much CPU time", True)


class CpuLimit:
    """Measures each test where it runs, so in a worker of xdist; fails it, or only notes it for `AgainAlone`."""

    def __init__(self, limit_s=LIMIT_S, fails=True):
        self._limit_s, self._fails, self._importing_s, self._begin_s = limit_s, fails, 0.0, 0.0
        self._thread = threading.local()

    def pytest_sessionstart(self):
        self._execute = SourceFileLoader.exec_module
        SourceFileLoader.exec_module = lambda loader, module: self._timed(loader, module)  # noqa: PLW0108  # bound

    def pytest_sessionfinish(self):
        SourceFileLoader.exec_module = self._execute

    def _timed(self, loader, module):
        if getattr(self._thread, "imports", False):  # a module that another one imports: that one is measured
            return self._execute(loader, module)
        self._thread.imports, begin = True, thread_time()
        try:
            return self._execute(loader, module)
        finally:
            self._importing_s += thread_time() - begin
            self._thread.imports = False

    def _spent_s(self):
        times = os.times()
        of_children = times.children_user + times.children_system + forked_s()
        return times.user + times.system + of_children - self._importing_s

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        self._begin_s = self._spent_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report, spent_s = (yield), self._spent_s() - self._begin_s
        own = item.get_closest_marker("cpu_limit")
        limit_s = own.args[0] if own else self._limit_s
        is_slow = item.get_closest_marker("slow") is not None
        if call.when == "call" and report.passed and spent_s > limit_s and not is_slow:
            report.user_properties.append(NOTE)
            if self._fails:
                report.outcome = "failed"
                report.longrepr = (
                    f"{item.nodeid} took {spent_s:.1f} s of CPU, and a test may take {limit_s:g} s: "
                    "mark it slow, or make it cheaper"
                )
        return report


class AgainAlone:
    """Runs what took too much once more, with nothing beside it, and fails where that takes too much as well."""

    def __init__(self, limit_s=LIMIT_S):
        self._limit_s, self._noted = limit_s, []

    def pytest_runtest_logreport(self, report):
        if NOTE in report.user_properties:
            self._noted.append(report.nodeid)

    @pytest.hookimpl(trylast=True)  # after xdist has ended its workers
    def pytest_sessionfinish(self, session):
        if self._noted:
            again = [sys.executable, "-m", "pytest", "-p", "no:xdist", f"--cpu-limit={self._limit_s}", *self._noted]
            status = subprocess.run(again, check=False).returncode
            session.exitstatus = session.exitstatus or status


def forked_s():
    """CPU seconds of all processes that ended and were forked from multiprocessing's server: they are its children."""
    try:
        status = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/stat").read_text()
    except OSError:  # there is no such server
        return 0.0
    user, system = status.rpartition(")")[2].split()[13:15]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
