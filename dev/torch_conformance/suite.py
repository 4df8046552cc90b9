# SPDX-License-Identifier: Apache-2.0
"""torch's `distributed_test` as one class of tests that runs on the backend under test.

torch's module reads BACKEND, WORLD_SIZE and INIT_METHOD while it is imported, so set them before
you import this one. CONFORMANCE_GROUP names the backend of the process group: another one than
BACKEND for the tests that are `NAMED`.

Each test runs that torch runs with Gloo or MPI, also where a decorator names these instead of a
feature. torch's decorators mark a test as skipped; they do not change it. To learn what torch would
run with another backend, this module loads torch's file once more under that backend's name and
reads the marks. A test that is marked for us only gets a wrapper without the mark. Tests that torch
skips for all backends, for an open issue or for lack of a GPU, stay skipped.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import unittest
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import DistTestCases

from torch_conformance.outcome import FAILED, PASSED, SKIPPED, Outcome

BACKEND = os.environ["BACKEND"]
GROUP = os.environ["CONFORMANCE_GROUP"]
# a line for each process
logging.getLogger("torch.testing._internal.common_distributed").setLevel(logging.WARNING)
START = os.environ.get("CONFORMANCE_START", "fork")
RULES = ("gloo", "mpi")
"""Backends whose tests run as well."""
NAMED = frozenset(
    f"test_accumulate_gradients_no_sync{suffix}"
    for suffix in ("", "_grad_is_view", "_allreduce_hook", "_allreduce_with_then_hook")
)
"""Tests whose body makes no model unless BACKEND is "gloo", "mpi" or "nccl". With another name they
fail in an UnboundLocalError, so they run with BACKEND=gloo on a group of the backend under test.
"""
_MARKS = ("__unittest_skip__", "__unittest_skip_why__")

if GROUP != "gloo":
    import_module(f"{GROUP}.c10d")
    # Gloo is in each of these tables. The tests that need a GPU find out by themselves that there
    # is none.
    for feature in ("plugin", "ddp", "subgroup", "gpu", "cuda"):
        DistTestCases.backend_feature[feature].add(GROUP)

distributed_test = import_module("torch.testing._internal.distributed.distributed_test")
TESTS = tuple(
    name for name in vars(distributed_test.DistributedTest._DistTestBase) if name.startswith("test")
)
"""All of torch's tests, in the order in which the file has them."""


class Conformance(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """One process per rank for each test, as in torch's own runner.

    torch starts each rank as a new Python, which takes seconds for the imports. Here the parent
    imports them once, then forks each rank. `CONFORMANCE_START=spawn` in the environment starts
    ranks as torch does.
    """

    test_together: Any = None
    log = ""
    exit_codes: tuple[int | None, ...] = ()
    _expected: complex | None = None

    def setUp(self) -> None:
        super().setUp()
        Path(distributed_test.INIT_METHOD.removeprefix("file://")).unlink(missing_ok=True)
        inherited = {name: os.environ[name] for name in ("TEMP_DIR", "MASTER_ADDR")}
        self._start_processes(partial(_process, {"environment": inherited, "log": self.log}))

    def tearDown(self) -> None:
        ranks = self.processes
        self.exit_codes = tuple(rank.exitcode for rank in ranks)
        super().tearDown()
        for rank in ranks:
            rank.join(5)
            rank.kill()
        Path(self.file_name).unlink(missing_ok=True)

    def _test_all_reduce_helper(self, *given: Any, **options: Any) -> None:
        """Run torch's helper, and check the result; torch's helper takes it as its seventh argument
        and ignores it.
        """
        self._expected = given[6]
        super()._test_all_reduce_helper(*given, **options)
        self._expected = None

    def call_dist_op(
        self, title: str, is_async: bool, op: Any, *arguments: Any, **options: Any
    ) -> None:
        super().call_dist_op(title, is_async, op, *arguments, **options)
        if self._expected is not None:
            torch.testing.assert_close(arguments[0], torch.full_like(arguments[0], self._expected))

    @classmethod
    def put_together(cls, tests: Sequence[str]) -> str:
        """Make a test that runs several, one after the other, in one group of the same ranks.

        Return its name.
        """

        def test_together(self: Conformance) -> None:
            for name in tests:
                try:
                    getattr(cls, name)(self)
                    self._barrier()
                except Exception as error:
                    raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error

        cls.test_together = test_together
        return test_together.__name__

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **options: Any) -> None:
        os.environ.update(options.pop("environment"))
        with Path(options.pop("log")).open("a") as file:  # also for what C++ prints
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        run = super()._run if GROUP == BACKEND else cls._run_on_other_group
        run(rank, test_name, file_name, pipe, **options)

    @classmethod
    def _run_on_other_group(
        cls, rank: int, test_name: str, file_name: str, pipe: Any, **_: Any
    ) -> None:
        """Do what torch's `_run` does, on a group of the backend CONFORMANCE_GROUP."""
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        seconds = distributed_test.CUSTOM_PG_TIMEOUT.get(
            test_name, distributed_test.default_pg_timeout
        )
        place = {"init_method": self.init_method, "world_size": int(self.world_size), "rank": rank}
        dist.init_process_group(GROUP, timeout=timedelta(seconds=seconds), **place)
        self._barrier()
        self.run_test(test_name, pipe)
        self._barrier()
        dist.destroy_process_group()
        sys.exit(0)


def _process(more: dict[str, Any], **options: Any) -> Any:
    options["kwargs"] = {**options["kwargs"], **more}
    context: Any = get_context(START)
    return context.Process(**options)


def chosen(pattern: str) -> list[str]:
    """Let the tests of Gloo and MPI run too.

    Return those with a match for `pattern` that this BACKEND is for.
    """
    for backend in RULES:
        for test in not_skipped(tests_for(backend)):
            if is_skipped(Conformance, test):
                setattr(Conformance, test, without_mark(getattr(Conformance, test)))
    mine = NAMED if BACKEND != GROUP else set(TESTS) - (NAMED if GROUP != "gloo" else set())
    return [test for test in TESTS if test in mine and re.search(pattern, test)]


def needs_gloo(pattern: str) -> bool:
    """Return True if a test with a match for `pattern` runs only with BACKEND=gloo."""
    return any(re.search(pattern, test) for test in NAMED)


def is_skipped(tests: type, test: str) -> bool:
    """Return True if a decorator skips the test for good."""
    return getattr(getattr(tests, test), "__unittest_skip__", False)


def not_skipped(tests: type) -> list[str]:
    """Return the tests that no decorator skips for good."""
    return [test for test in TESTS if not is_skipped(tests, test)]


def tests_for(backend: str) -> type:
    """Return torch's tests as they are when BACKEND is `backend`."""
    spec: Any = spec_from_file_location(
        f"distributed_test_for_{backend}", distributed_test.__file__
    )
    module: Any = module_from_spec(spec)
    os.environ["BACKEND"] = backend
    try:
        spec.loader.exec_module(module)
    finally:
        os.environ["BACKEND"] = BACKEND
    return module.DistributedTest._DistTestBase


def without_mark(test: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the same test without the mark that skips it."""

    @wraps(test)
    def unmarked(self: Any) -> None:
        test(self)

    for mark in _MARKS:
        vars(unmarked).pop(mark, None)
    return unmarked


def run(name: str, log: Path) -> Outcome:
    """Run one test on its own ranks, of which torch looks at the exit code of rank 0,
    this at all.
    """
    case = Conformance(name)
    result = unittest.TestResult()
    start = time.monotonic()
    case.log = str(log)
    unittest.TestSuite([case]).run(result)
    state = PASSED
    reason = ""
    if result.skipped:
        state = SKIPPED
        reason = result.skipped[0][1]
    elif bad := [*result.errors, *result.failures]:
        state = FAILED
        reason = bad[0][1]
    elif len(set(case.exit_codes)) > 1 and name != "test_ddp_has_finalized":
        state = FAILED
        reason = f"The ranks' exit codes differ: {case.exit_codes}"
    return Outcome(name, state, round(time.monotonic() - start, 2), reason)
