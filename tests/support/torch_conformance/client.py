# SPDX-License-Identifier: Apache-2.0
"""Start the process that runs torch's tests, ask it for one test after the other, and end it if it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Never, Self

from torch_conformance.known import NAMED
from torch_conformance.outcome import FAILED, Outcome

START_S = 120.0
"""Seconds in which a worker must have imported torch and its tests."""
GRACE_S = 30.0
"""Seconds beyond a test's limit that its worker has to end the ranks and report."""


class Suite:
    """torch's tests on one backend and number of ranks. `tests` has their names, in torch's order.

    Args:
        backend: "gloo", or a package whose module `c10d` registers a backend of its name, such as "commrt".
        ranks: how many processes run each test.
        limit_s: seconds after which a test is ended and counts as failed.
        logs: folder for what the ranks of each test print.
        rules: backends whose tests run as well, beside those that torch runs with `backend`.
    """

    def __init__(
        self, backend: str, ranks: int, logs: Path, *, limit_s: float = 120.0, rules: tuple[str, ...] = ("gloo",)
    ) -> None:
        self.backend, self.ranks, self.logs, self.limit_s, self.rules = backend, ranks, logs, limit_s, rules
        self._workers: dict[str, Worker] = {}
        self.tests = self._worker(backend).tests

    def run(self, *tests: str) -> Outcome:
        """Run one test on fresh ranks, or several in one group of them, until the first that fails."""
        name = "gloo" if tests[0] in NAMED else self.backend
        done = self._worker(name).run(tests, self.limit_s)
        if done is None:
            self._workers.pop(name).close()
            done = Outcome(tests[0], FAILED, self.limit_s + GRACE_S, "The test's own parent process hung")
        return done

    def _worker(self, name: str) -> Worker:
        if name not in self._workers:
            self._workers[name] = Worker(self, name)
        return self._workers[name]

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers.values():
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Worker:
    """A process that has torch's tests imported under the name `name` of a backend."""

    def __init__(self, suite: Suite, name: str) -> None:
        self._folder = TemporaryDirectory()
        self._pipe, theirs = Pipe()
        suite.logs.mkdir(parents=True, exist_ok=True)
        arguments = [str(theirs.fileno()), str(suite.logs), *suite.rules]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch_conformance.worker", *arguments],
            env=os.environ | self._environment(suite, name),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.tests: tuple[str, ...] = self._answer(START_S) or self._give_up()

    def _environment(self, suite: Suite, name: str) -> dict[str, str]:
        return {
            "BACKEND": name,
            "CONFORMANCE_GROUP": suite.backend,
            "WORLD_SIZE": str(suite.ranks),
            "INIT_METHOD": f"file://{self._folder.name}/again",
            "TEMP_DIR": self._folder.name,
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(suite.limit_s)),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
        }

    def run(self, tests: tuple[str, ...], limit_s: float) -> Outcome | None:
        """Return the outcome, or None if the process does not answer."""
        self._pipe.send(tests)
        return self._answer(limit_s + GRACE_S)

    def _answer(self, seconds: float) -> Any:
        try:
            return self._pipe.recv() if self._pipe.poll(seconds) else None
        except EOFError:
            return None

    def _give_up(self) -> Never:
        self.close()
        raise RuntimeError("The process for torch's tests did not start. Its error is in the output above.")

    def close(self) -> None:
        """End the process and all that it started."""
        self._pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()
