# SPDX-License-Identifier: Apache-2.0
"""Run torch's tests on a backend and print a table: `python -m torch_conformance --backend commrt
--ranks 4`.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from torch_conformance.outcome import FAILED, Outcome, table

GRACE_S = 30.0
"""Seconds beyond a test's limit, at which torch ends its ranks, after which this process counts as
hung.
"""


def main() -> int:
    """Run the chosen tests. Return 1 if one failed."""
    options = arguments()
    with TemporaryDirectory() as folder:
        outcomes = run(options, folder)
        if options.under == options.backend != "gloo" and not options.together:
            outcomes += run_under_gloo(options, Path(folder, "named.json"))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "backend": options.backend,
            "ranks": options.ranks,
            "outcomes": [asdict(one) for one in outcomes],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(table(outcomes) + "\n")
    return int(any(outcome.state == FAILED and not outcome.refused for outcome in outcomes))


def arguments() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(prog="python -m torch_conformance", description=__doc__)
    parser.add_argument(
        "--backend", default="commrt", help="gloo, or a package with a module c10d (commrt)"
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes per test (4)")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="run tests whose name has a match for this"
    )
    parser.add_argument(
        "--together", action="store_true", help="run them one after the other in one group"
    )
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds after which a test is ended (120)"
    )
    parser.add_argument("--out", type=Path, help="file for all outcomes, as JSON")
    parser.add_argument(
        "--logs", type=Path, default=Path("build/conformance"), help="folder for what ranks print"
    )
    parser.add_argument("--under", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.under = options.under or options.backend
    return options


def run(options: argparse.Namespace, folder: str) -> list[Outcome]:
    """Run tests in this process, which forks the ranks; torch's file is imported under the name
    `options.under`.
    """
    os.environ |= {
        "BACKEND": options.under,
        "CONFORMANCE_GROUP": options.backend,
        "WORLD_SIZE": str(options.ranks),
        "INIT_METHOD": f"file://{folder}/again",
        "TEMP_DIR": folder,
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(options.limit)),
        "OMP_NUM_THREADS": "1",
    }
    from torch_conformance import suite  # noqa: PLC0415  # it reads the environment

    options.logs.mkdir(parents=True, exist_ok=True)
    chosen: Sequence[str] = suite.chosen(options.only)
    if options.together:
        chosen = [suite.Conformance.put_together(chosen)]
    outcomes = []
    for test in chosen:
        faulthandler.dump_traceback_later(options.limit + GRACE_S, exit=True)
        outcomes.append(suite.run(test, options.logs / f"{test}.log"))
        faulthandler.cancel_dump_traceback_later()
        sys.stderr.write(f"{outcomes[-1].state:8}{outcomes[-1].seconds:6.1f} s  {test}\n")
    return outcomes


def run_under_gloo(options: argparse.Namespace, out: Path) -> list[Outcome]:
    """Run tests that need BACKEND=gloo, in a process of its own."""
    from torch_conformance import suite  # noqa: PLC0415  # which `run` has imported

    if not suite.needs_gloo(options.only):
        return []
    values = {
        name: getattr(options, name) for name in ("backend", "ranks", "only", "limit", "logs")
    }
    given = [f"--{name}={value}" for name, value in values.items()]
    command = [sys.executable, "-m", "torch_conformance", *given, "--under=gloo", f"--out={out}"]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    return [Outcome(**outcome) for outcome in json.loads(out.read_text())["outcomes"]]


if __name__ == "__main__":
    sys.exit(main())
