# SPDX-License-Identifier: Apache-2.0
"""torch's `distributed_test` as one class of tests that runs on the backend under test.

torch's module reads BACKEND, WORLD_SIZE and INIT_METHOD while it is imported, so set them before you import this one.
Both the parent of the ranks and the ranks import this module.

CONFORMANCE_GROUP names another backend for the process group than BACKEND. Use it for tests whose body asks for
BACKEND == "gloo" before it does anything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import DistTestCases

BUILT_IN = ("gloo", "mpi", "nccl", "ucc")
BACKEND = os.environ["BACKEND"]
GROUP = os.environ.get("CONFORMANCE_GROUP", BACKEND)

START = os.environ.get("CONFORMANCE_START", "fork")


def add_to_tables(backend: str) -> None:
    """Add a backend to the tables of features that torch keeps for backends that are not its own.

    Gloo is in each of these tables. The tests that need a GPU find out by themselves that there is none.
    """
    for feature in ("plugin", "ddp", "subgroup", "gpu", "cuda"):
        DistTestCases.backend_feature[feature].add(backend)


if GROUP not in BUILT_IN:
    import_module(f"{GROUP}.c10d")
    add_to_tables(GROUP)

distributed_test = import_module("torch.testing._internal.distributed.distributed_test")
SOURCE = Path(distributed_test.__file__)
TESTS = tuple(name for name in vars(distributed_test.DistributedTest._DistTestBase) if name.startswith("test"))
"""All of torch's tests, in the order in which the file has them."""


class Conformance(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """One process per rank for each test, as in torch's own runner.

    torch starts each rank as a new Python, which takes seconds for the imports. Here the parent imports them once, then
    forks each rank. `CONFORMANCE_START=spawn` in the environment starts ranks as torch does.
    """

    test_together: Any = None
    log: str | None = None
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
        """Run torch's helper, and check the result; torch's helper takes it as its seventh argument and ignores it."""
        self._expected = given[6]
        super()._test_all_reduce_helper(*given, **options)
        self._expected = None

    def call_dist_op(self, title: str, is_async: bool, op: Any, *arguments: Any, **options: Any) -> None:
        super().call_dist_op(title, is_async, op, *arguments, **options)
        if self._expected is not None:
            torch.testing.assert_close(arguments[0], torch.full_like(arguments[0], self._expected))

    @classmethod
    def put_together(cls, tests: Sequence[str]) -> str:
        """Make a test that runs several, one after the other, in one group of the same ranks. Return its name."""

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
        write_to(options.pop("log"))
        run = super()._run if GROUP == BACKEND else cls._run_on_other_group
        run(rank, test_name, file_name, pipe, **options)

    @classmethod
    def _run_on_other_group(cls, rank: int, test_name: str, file_name: str, pipe: Any, **_: Any) -> None:
        """Do what torch's `_run` does, on a group of the backend CONFORMANCE_GROUP."""
        self = cls(test_name)
        self.rank, self.file_name = rank, file_name
        seconds = distributed_test.CUSTOM_PG_TIMEOUT.get(test_name, distributed_test.default_pg_timeout)
        place = {"init_method": self.init_method, "world_size": int(self.world_size), "rank": rank}
        dist.init_process_group(GROUP, timeout=timedelta(seconds=seconds), **place)
        self._barrier()
        self.run_test(test_name, pipe)
        self._barrier()
        dist.destroy_process_group()
        sys.exit(0)


def write_to(log: str | None) -> None:
    """Append all that this process prints to the file `log`, also what C++ prints."""
    if log is None:
        return
    with Path(log).open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _process(more: dict[str, Any], **options: Any) -> Any:
    options["kwargs"] = {**options["kwargs"], **more}
    context: Any = get_context(START)
    return context.Process(**options)
