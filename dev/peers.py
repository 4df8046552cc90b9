# SPDX-License-Identifier: Apache-2.0
"""Runs tests of another project over Gloo and then over commrt, and prints their row for
``docs/conformance.md``, what differs, and why tests were skipped.

    python dev/peers.py torchmetrics --checkout ../torchmetrics

Nothing of another project is in this repository: clone it, and say where it is. The command names
what else is missing. Each Python that the tests start gets `in_place_of_gloo`; what a suite needs
besides comes from your folder: --adapter DIR, on the path, with a module `adapter` that each Python
imports as it starts, and that is a plugin of pytest. The suite's row says what it must do.
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
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
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
    each_rank: bool = False
    """Whether each rank is a pytest of its own, started as torchrun starts ranks."""
    adapter: str = ""
    """What --adapter must do, where `in_place_of_gloo` is not enough."""
    get: str = ""  # how to get the tests, if not by a clone
    environment: Mapping[str, str] = field(default_factory=dict)


SUITES = {
    "accelerate": Suite(
        "huggingface/accelerate",
        "16cb6eb8",
        "test_cpu.py test_grad_sync.py test_scheduler.py --timeout 600",
        paths=("src",),
        packages=("huggingface-hub", "parameterized", "psutil", "safetensors"),
    ),
    "deepspeed": Suite(
        "deepspeedai/DeepSpeed",
        "edaa7221",
        "unit/comm unit/runtime/sparse_tensor unit/runtime/zero/test_zero_context.py",
        paths=(".", "tests"),
        packages=("einops", "hjson", "msgpack", "ninja", "py-cpuinfo", "tabulate"),
        ranks=4,
        environment={"DS_ACCELERATOR": "cpu", "DS_DISABLE_REUSE_DIST_ENV": "1"},
        adapter="forks ranks, compiles no C++, and fails a test that hangs, where pytest would end",
    ),
    "fabric": Suite(
        "Lightning-AI/pytorch-lightning",
        "7f0c3436",
        "tests_fabric/strategies/test_ddp_integration.py tests_fabric/plugins/collectives"
        " tests_fabric/utilities/test_distributed.py tests_fabric/utilities/test_spike.py"
        " tests_fabric/strategies/launchers/test_multiprocessing_integration.py",
        packages=("lightning-utilities",),
    ),
    "horovod": Suite(
        "horovod/horovod",
        "2626dc87",
        "test_torch.py -p no:warnings",
        folder="test/parallel",
        paths=(),
        each_rank=True,
        adapter="gives Horovod's Python, with torch.distributed in place of its C core, and runs"
        " each test in a forked process, with a group at a place of its own in the store",
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
    "mpi4py": Suite(
        "mpi4py/mpi4py",
        "7c8dac2c",
        "test_cco_obj.py test_cco_buf.py test_cco_vec.py test_cco_nb_buf.py test_cco_nb_vec.py"
        " test_p2p_obj.py test_p2p_buf.py",
        folder="test",
        paths=("test",),
        ranks=4,
        each_rank=True,
        adapter="gives mpi4py.MPI over torch.distributed, with numpy's arrays as tensors, skips"
        " dtypes and tests of what torch has not, and opens another group after a failure",
    ),
    "torch": Suite(
        "MetaX-MACA/mcPytorch",
        "b3db5eed",
        "test_c10d_common.py algorithms/test_join.py _composable/test_replicate.py"
        " --noconftest --assert=plain",
        folder="test/distributed",
        paths=(),
        environment={"PEERS_SAY_GLOO": "1"},
        adapter="reads the files with cpu for their devices and no checks for GPUs, puts commrt in"
        " place of ProcessGroupGloo, forks ranks, and takes only tests that have ranks",
    ),
    "torchft": Suite(
        "meta-pytorch/torchft",
        "2026.10.26",
        "torchft -k 'not Baby and not baby'",
        folder=".",
        paths=(".",),
        packages=("parameterized",),
        adapter="puts the class of docs/ddp.md in place of ProcessGroupGloo, and lets expressions"
        " that match Gloo's errors match commrt's",
        get="unpack the wheel torchft-nightly 2026.10.26, and test_fixtures/ of its repository",
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
    return int(any(gloo[test][0] == PASSED != ours.get(test, ("",))[0] for test in gloo))


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
        clone = f"git clone {url} {options.checkout}; git -C {options.checkout} checkout "
        missing.append(f"a checkout with {suite.folder}/: {suite.get or clone + suite.commit}")
    if suite.adapter and not options.adapter:
        missing.append(f"--adapter DIR, a folder of yours with adapter.py. It {suite.adapter}")
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
        variables = {
            **os.environ,
            **suite.environment,
            "OMP_NUM_THREADS": "1",
            "PEERS_BACKEND": backend,
            "PEERS_OPENED": f"{folder}/opened",
            "PYTHONHASHSEED": "0",  # some suites name tests by the order of a set
            "PYTHONPATH": os.pathsep.join(paths),
        }
        plugins = ("-p", "adapter") if options.adapter else ()
        tests = shlex.split(options.only or suite.tests)
        command = [sys.executable, "-m", "pytest", *PYTEST, *plugins, *tests]
        _store, places = meet(suite)  # a store serves while it lives
        started = [
            subprocess.Popen(
                [*command, f"--junitxml={folder}/{number}.xml"],
                cwd=options.checkout / suite.folder,
                env={**variables, **place},
                start_new_session=True,
            )
            for number, place in enumerate(places)
        ]
        try:
            for process in started:
                process.wait(options.limit)
        except subprocess.TimeoutExpired:
            sys.exit(f"{options.suite} did not end over {backend} in {options.limit} s: see --only")
        finally:
            for process in started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and what its tests left
        if any(process.returncode not in (0, 1) for process in started):
            sys.exit(f"{options.suite}: a pytest could not run its tests over {backend}")
        if backend != "gloo" and not Path(folder, "opened").exists():
            sys.exit(f"no test opened a group over {backend}: the suite needs an adapter")
        return read(sorted(Path(folder).glob("*.xml")))


def meet(suite: Suite) -> tuple[Any, list[dict[str, str]]]:
    """Return each pytest's variables, and first the store at which its rank meets the others."""
    if not suite.each_rank:
        return None, [{}]
    from torch.distributed import TCPStore  # noqa: PLC0415  # torch is slow to import

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(suite.ranks),
    }
    return store, [{**shared, "RANK": str(rank)} for rank in range(suite.ranks)]


def read(results: Sequence[Path]) -> dict[str, tuple[str, str]]:
    """Return each test's worst outcome in files of JUnit, and why; ranks may report one each."""
    found: dict[str, tuple[str, str]] = {}
    files = [ET.parse(path) for path in results]  # noqa: S314  # pytest wrote them
    for case in (each for file in files for each in file.iter("testcase")):
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
