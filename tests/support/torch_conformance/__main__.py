# SPDX-License-Identifier: Apache-2.0
"""Run torch's tests on a backend and print a table: `python -m torch_conformance --backend commrt --ranks 4`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, Queue

from torch_conformance.client import Suite
from torch_conformance.outcome import FAILED, Outcome, table


def main() -> int:
    """Run the chosen tests. Return 1 if one failed."""
    options = arguments()
    with suite(options) as first:
        chosen = [test for test in first.tests if re.search(options.only, test)]
        waiting: Queue[str] = Queue()
        for test in chosen:
            waiting.put(test)
        outcomes = run_all(options, first, waiting)
    outcomes.sort(key=lambda outcome: chosen.index(outcome.test))
    if options.out:
        save(options, outcomes)
    sys.stdout.write(table(outcomes) + "\n")
    return int(any(outcome.state == FAILED and not outcome.refused for outcome in outcomes))


def arguments() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(prog="python -m torch_conformance", description=__doc__)
    parser.add_argument("--backend", default="commrt", help="gloo, or a package with a module c10d (commrt)")
    parser.add_argument("--ranks", type=int, default=4, help="processes per test (4)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="run tests whose name has a match for this")
    parser.add_argument("--jobs", type=int, default=1, help="tests that run at a time (1)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a test is ended (120)")
    parser.add_argument("--rules", default="gloo,mpi", help="also run what torch runs with these (gloo,mpi)")
    parser.add_argument("--out", type=Path, help="file for all outcomes, as JSON")
    parser.add_argument("--logs", type=Path, default=Path("build/conformance"), help="folder for what ranks print")
    return parser.parse_args()


def suite(options: argparse.Namespace) -> Suite:
    """Start a process for torch's tests."""
    rules = tuple(filter(None, options.rules.split(",")))
    return Suite(options.backend, options.ranks, options.logs, limit_s=options.limit, rules=rules)


def run_all(options: argparse.Namespace, first: Suite, waiting: Queue[str]) -> list[Outcome]:
    """Run all waiting tests, `jobs` at a time."""
    with ThreadPoolExecutor(options.jobs) as threads:
        futures = [threads.submit(run_some, first, waiting)]
        futures += [threads.submit(run_more, options, waiting) for _ in range(1, options.jobs)]
        return [outcome for future in futures for outcome in future.result()]


def run_more(options: argparse.Namespace, waiting: Queue[str]) -> list[Outcome]:
    """Run waiting tests in one more process."""
    with suite(options) as more:
        return run_some(more, waiting)


def run_some(suite: Suite, waiting: Queue[str]) -> list[Outcome]:
    """Run waiting tests until none is left."""
    outcomes = []
    while True:
        try:
            outcome = suite.run(waiting.get_nowait())
        except Empty:
            return outcomes
        outcomes.append(outcome)
        sys.stderr.write(f"{outcome.state:8}{outcome.seconds:6.1f} s  {outcome.test}\n")


def save(options: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """Write all outcomes to the file that the user names."""
    record = {"backend": options.backend, "ranks": options.ranks, "rules": options.rules}
    record["outcomes"] = [outcome.as_json() for outcome in outcomes]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
