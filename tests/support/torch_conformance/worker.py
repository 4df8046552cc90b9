# SPDX-License-Identifier: Apache-2.0
"""The process that runs torch's tests for `client`: takes names of tests from a pipe and answers with an outcome."""

from __future__ import annotations

import sys
import time
import unittest
from multiprocessing.connection import Connection
from pathlib import Path

from torch_conformance.outcome import FAILED, PASSED, SKIPPED, Outcome, first_line, rank_errors
from torch_conformance.selection import allow
from torch_conformance.suite import TESTS, Conformance, write_to


def main(pipe: Connection, logs: Path, backends: list[str]) -> None:
    """Send the names of all tests, then run what is asked for until the pipe closes."""
    rules = allow(backends)
    pipe.send(TESTS)
    while tests := next_tests(pipe):
        name = tests[0] if len(tests) == 1 else Conformance.put_together(tests)
        pipe.send(run(name, logs / f"{name}.log", rules.get(name, "")))


def next_tests(pipe: Connection) -> tuple[str, ...] | None:
    """Return the names of the next tests, or None once the other end has closed."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def run(name: str, log: Path, rules: str) -> Outcome:
    """Run one test on its own ranks. What they print goes to the file `log`."""
    case = Conformance(name)
    case.log = str(log)
    write_to(case.log)
    result = unittest.TestResult()
    start = time.monotonic()
    unittest.TestSuite([case]).run(result)
    return outcome(case, result, time.monotonic() - start, rules)


def outcome(case: Conformance, result: unittest.TestResult, seconds: float, rules: str) -> Outcome:
    """Return what unittest found; torch looks at the exit code of rank 0 only, this at all."""
    state, message, name = PASSED, "", case._current_test_name()
    if result.skipped:
        state, message = SKIPPED, result.skipped[0][1]
    elif bad := [*result.errors, *result.failures]:
        state, message = FAILED, bad[0][1]
    elif len(set(case.exit_codes)) > 1 and name != "test_ddp_has_finalized":
        state, message = FAILED, f"The ranks' exit codes differ: {case.exit_codes}"
    reason = first_line(message) if state == FAILED else message
    return Outcome(name, state, round(seconds, 2), reason, rank_errors(message), case.exit_codes, rules)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), Path(sys.argv[2]), sys.argv[3:])
