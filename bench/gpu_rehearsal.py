# SPDX-License-Identifier: Apache-2.0
"""Rehearse a GPU session where there is none, with the versions of a machine that has one: ``make gpu-rehearsal``.

Each part runs, whatever became of the others. At the end stands what was rehearsed and what cannot be.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib import import_module, metadata
from pathlib import Path
from pkgutil import walk_packages
from time import monotonic
from typing import NamedTuple

BENCH = Path(__file__).resolve().parent
TESTS, DEV = BENCH.parent / "tests", BENCH.parent / "dev"
CHECK = BENCH / "gpu_check.py"
RECORD = "--out", str(BENCH.parent / "build" / "rehearsal")
LIMIT_S = 590.0
"""Seconds for everything: under ten minutes."""
PINS = BENCH / "gpu_requirements.txt"
EXTRAS = {"typer", "rich", "matplotlib", "numba", "mkdocs", "pytorch_optimizer", "datasets"}
"""Packages of commrt's extras, which a GPU session does without."""
NOT_REHEARSED = (
    "NCCL between ranks: a communicator needs a GPU; the stand-in keeps the rules that docs/architecture.md lists",
    "memory that processes map: the stand-in's ranks are threads, which reach all memory",
    "CUDA's streams, events and graphs: the CPU does its work at once",
    "compiled kernels: some are compiled and inspected (all by `make inspect`), and only an interpreter runs them",
    "compute-sanitizer, more than 2^31 elements, four and eight ranks, the tuner, and all that is timed",
)


class Part(NamedTuple):
    """One part of the rehearsal: a command of this Python."""

    what: str
    arguments: Sequence[str]
    interprets: bool = False


def pytest_of(*arguments: str, slow: bool = False) -> tuple[str, ...]:
    """Return the arguments that run these tests; of slow ones only if `slow`."""
    marks = () if slow else ("-m", "not slow")
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", *marks, *arguments)


def tests(*names: str) -> list[str]:
    """Return the paths of test files."""
    return [str(TESTS / f"test_{name}.py") for name in names]


TRAINING = "gradient_averaging", "gradient_views"
PARTS_HERE = (
    Part("the versions of a machine with a GPU", [str(Path(__file__)), "versions"]),
    Part("each module can be imported", [str(Path(__file__)), "imports"]),
    Part("each call of cupy.cuda.nccl fits the real module", pytest_of(*tests("nccl_binding"))),
    Part("kernels in Triton's interpreter", pytest_of(*tests("kernels", "packing", "media")), interprets=True),
    Part("kernels of codes in the interpreter", pytest_of(*tests("quantize_kernels")), interprets=True),
    Part(
        "every 28th kernel compiled",
        [str(DEV / "inspect_kernels.py"), "--every", "28", "--golden", str(DEV / "golden")],
    ),
    Part(
        "every 19th kernel of codes compiled",
        [str(DEV / "inspect_quantize.py"), "--every", "19", "--golden", str(DEV / "golden_quantize")],
    ),
    Part("signals and waits, interpreted and compiled", pytest_of(*tests("signal_wait_kernel"), slow=True)),
    Part("what a step launches", pytest_of(*tests("launches"), slow=True)),
    Part("the NCCL transport on a stand-in", pytest_of(*tests("nccl", "nccl_groups"))),
    Part("peers' memory on a stand-in", pytest_of(*tests("signal_waits", "reading", "peers", "ipc"))),
    Part("training on a stand-in for NCCL", pytest_of("--over", "nccl", *tests(*TRAINING, "step_graph"))),
    Part("training on a stand-in for peers' memory", pytest_of("--over", "peers", *tests(*TRAINING))),
    Part("make gpu-correctness, dry", [str(CHECK), "correctness", *RECORD]),
    Part(
        "make gpu-kernels, dry: a backward pass, the host",
        [str(CHECK), "kernels", *RECORD, "--only", "backward", "host"],
    ),
    Part(
        "make gpu-kernels, dry: two of its tasks",
        pytest_of(str(BENCH / "test_kernels.py"), "--benchmark-disable", "-k", "GoogLeNet and mix"),
    ),
    Part("make gpu-link, dry: steps and a profile", [str(CHECK), "link", *RECORD, "--only", "on two ranks", "every"]),
)


def main() -> int:
    """Run the command."""
    if sys.argv[1:] == ["imports"]:
        return import_all()
    if sys.argv[1:] == ["versions"]:
        return compare_versions()
    begin_s = monotonic()
    failed = [part.what for part in PARTS_HERE if not rehearse(part, begin_s + LIMIT_S)]
    print(f"\n{len(PARTS_HERE) - len(failed)} of {len(PARTS_HERE)} parts rehearsed in {monotonic() - begin_s:.0f} s")
    print("Not rehearsed:", *failed, *NOT_REHEARSED, sep="\n  ")
    return int(bool(failed))


def rehearse(part: Part, end_s: float) -> bool:
    """Run `part` until `end_s` at most, print how it ended, and return True if it succeeded."""
    begin_s = monotonic()
    env = {**os.environ, "TRITON_INTERPRET": "1" if part.interprets else "0", "OMP_NUM_THREADS": "1"}
    command, both = [sys.executable, *part.arguments], subprocess.STDOUT
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(
            command, stdout=output, stderr=both, env=env, cwd=BENCH.parent, start_new_session=True
        ) as process:
            try:
                succeeded = process.wait(max(0.0, end_s - begin_s)) == 0
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # what it started too
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                succeeded = False
        output.seek(0)
        said = output.read()
    print(f"{'ok    ' if succeeded else 'FAILED'} {monotonic() - begin_s:4.0f} s  {part.what}", flush=True)
    if not succeeded:
        print(said[-3000:], flush=True)
    return succeeded


def compare_versions() -> int:
    """Print the versions here, and return how many differ from those of `PINS`."""
    pinned = [line.partition("==") for line in PINS.read_text().split()]
    found = {name: (metadata.version(name), wanted) for name, _, wanted in pinned if wanted}
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{name} {version}' for name, (version, _) in found.items())}")
    return sum(not fnmatch(version, wanted) for version, wanted in found.values()) + (sys.version_info[:2] != (3, 12))


def import_all() -> int:
    """Import every module of commrt but those whose extras are missing; return how many failed."""
    import commrt  # noqa: PLC0415  # in this part only

    failed = 0
    for module in walk_packages(commrt.__path__, "commrt."):
        if module.name.endswith("__main__"):
            continue
        try:
            import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in EXTRAS:
                failed += 1
                print(f"{module.name}: {error}")
        except Exception as error:  # each is to be reported
            failed += 1
            print(f"{module.name}: {type(error).__name__}: {error}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
