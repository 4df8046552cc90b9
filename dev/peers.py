# SPDX-License-Identifier: Apache-2.0
"""Runs tests of another project over Gloo and then over commrt, and prints their row for
``docs/conformance.md``, what differs, and why tests were skipped.

    python dev/peers.py torchmetrics --checkout ../torchmetrics

Nothing of another project is in this repository: clone it, and say where it is. The command names
what else is missing. Each Python that the tests start gets `in_place_of_gloo`; a suite that needs
more gets it from your folder: --adapter DIR, with a module `adapter` that each Python imports.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree as ET

HERE = Path(__file__).resolve().parent
PYTEST = ("-q", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=", "--timeout", "120")


@dataclass(frozen=True)
class Suite:
    """Tests of a project, at the commit at which they were last run."""

    repository: str
    commit: str
    tests: str
    """What pytest gets."""
    folder: str = "tests"
    """Where pytest starts, below the checkout."""
    paths: Sequence[str] = ("src", "tests")
    packages: Sequence[str] = ()
    ranks: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)


SUITES = {
    "fabric": Suite(
        "Lightning-AI/pytorch-lightning",
        "7f0c3436",
        "tests_fabric/strategies/test_ddp_integration.py tests_fabric/plugins/collectives"
        " tests_fabric/utilities/test_distributed.py tests_fabric/utilities/test_spike.py"
        " tests_fabric/strategies/launchers/test_multiprocessing_integration.py",
        packages=("lightning-utilities",),
    ),
    "ignite": Suite(
        "pytorch/ignite",
        "de08e799",
        "tests/ignite/distributed tests/ignite/metrics -m distributed -k gloo"
        " --dist=each --tx 2*popen",
        folder=".",
        paths=(".",),
        packages=("pytest-xdist", "scikit-learn"),
        environment={"WORLD_SIZE": "2", "PEERS_SAY_GLOO": "1"},
    ),
    "lightning": Suite(
        "Lightning-AI/pytorch-lightning",
        "7f0c3436",
        "tests_pytorch/callbacks/test_weight_averaging.py",
        packages=("lightning-utilities",),
    ),
    "torchmetrics": Suite(
        "Lightning-AI/torchmetrics",
        "dab03339",
        "unittests/bases -m DDP",
        packages=("cachier", "lightning-utilities", "scipy"),
        environment={"USE_PYTEST_POOL": "1"},
    ),
}
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


def main() -> int:
    """Run the suite. Return 1 if something is missing or a test passed over Gloo alone."""
    options = arguments()
    suite = SUITES[options.suite]
    missing = lacks(suite, options)
    if missing:
        sys.stdout.write(f"{options.suite} needs:\n" + "".join(f"- {each}\n" for each in missing))
        return 1
    gloo, ours = (outcomes(suite, options, backend) for backend in ("gloo", "commrt"))
    sys.stdout.write(report(options.suite, suite, gloo, ours))
    return int(any(gloo[test][0] == PASSED != ours.get(test, "")[0] for test in gloo))


def arguments() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="suites: " + ", ".join(SUITES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", choices=SUITES, metavar="SUITE")
    parser.add_argument("--checkout", type=Path, required=True, help="where you cloned the project")
    parser.add_argument("--adapter", type=Path, help="a folder with your module adapter.py")
    parser.add_argument("--only", default="", help="what pytest gets, in place of the suite's own")
    parser.add_argument("--limit", type=float, default=1800, help="seconds per backend (1800)")
    options = parser.parse_args()
    options.checkout = options.checkout.resolve()
    return options


def lacks(suite: Suite, options: argparse.Namespace) -> list[str]:
    """Return what is missing and how to get it."""
    missing = []
    if not (options.checkout / suite.folder).is_dir():
        url = f"https://github.com/{suite.repository}"
        missing.append(
            f"a checkout with {suite.folder}/: git clone {url} {options.checkout}; "
            f"git -C {options.checkout} checkout {suite.commit}"
        )
    for package in ("pytest", "pytest-timeout", *suite.packages):
        try:
            metadata.distribution(package)
        except metadata.PackageNotFoundError:
            missing.append(f"a package: {sys.executable} -m pip install {package}")
    return missing


def outcomes(suite: Suite, options: argparse.Namespace, backend: str) -> dict[str, tuple[str, str]]:
    """Run the tests over a backend; return each test's worst outcome, and why."""
    with TemporaryDirectory() as folder:
        adapter = "import adapter\n" if options.adapter else ""
        Path(folder, "sitecustomize.py").write_text(f"import in_place_of_gloo\n{adapter}")
        own = [folder, str(HERE), *([str(options.adapter.resolve())] if options.adapter else [])]
        paths = [*own, *[str(options.checkout / path) for path in suite.paths]]
        results = Path(folder, "results.xml")
        variables = {
            **os.environ,
            **suite.environment,
            "OMP_NUM_THREADS": "1",
            "PEERS_BACKEND": backend,
            "PEERS_OPENED": f"{folder}/opened",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        tests = shlex.split(options.only or suite.tests)
        command = [sys.executable, "-m", "pytest", *PYTEST, f"--junitxml={results}", *tests]
        process = subprocess.Popen(
            command, cwd=options.checkout / suite.folder, env=variables, start_new_session=True
        )
        try:
            process.wait(options.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # ranks are of its group
            sys.exit(f"{options.suite} did not end over {backend} in {options.limit} s: see --only")
        if backend != "gloo" and not Path(folder, "opened").exists():
            sys.exit(f"no test opened a group over {backend}: the suite needs an adapter")
        return read(results)


def read(results: Path) -> dict[str, tuple[str, str]]:
    """Return each test's worst outcome in a file of JUnit, and why; ranks may report one each."""
    found: dict[str, tuple[str, str]] = {}
    for case in ET.parse(results).iter("testcase"):  # noqa: S314  # pytest wrote it
        test = f"{case.get('classname')}.{case.get('name')}"
        outcome = (PASSED, "")
        for kind, marks in ((SKIPPED, ("skipped",)), (FAILED, ("failure", "error"))):
            for mark in marks:
                element = case.find(mark)
                if element is not None:
                    outcome = (kind, element.get("message", "").strip().split("\n")[0][:160])
        if found.get(test, (PASSED,))[0] != FAILED:
            found[test] = outcome
    return found


def report(
    name: str,
    suite: Suite,
    gloo: Mapping[str, tuple[str, str]],
    ours: Mapping[str, tuple[str, str]],
) -> str:
    """Return the row, the tests that differ, and reasons for skips."""
    states = [[outcome[0] for outcome in each.values()] for each in (gloo, ours)]
    skipped = Counter(why for state, why in ours.values() if state == SKIPPED)
    passed = [each.count(PASSED) for each in states]
    run = len(ours) - skipped.total()
    title = f"{name} at {suite.commit}: {len(ours)} tests, {skipped.total()} skipped"
    lines = [f"| {title} | {suite.ranks} | {run} | {passed[1]} | {passed[0]} |"]
    for test in sorted({*gloo, *ours}):
        pair = [each.get(test, ("not run", "")) for each in (gloo, ours)]
        if pair[0][0] != pair[1][0]:
            lines.append(f"differs: {test}: Gloo {pair[0]}, commrt {pair[1]}")
        elif pair[0][0] == FAILED:
            lines.append(f"fails over both: {test}: {pair[1][1]}")
    lines += [f"skipped {count} times: {why}" for why, count in skipped.most_common()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
