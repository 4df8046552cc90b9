# SPDX-License-Identifier: Apache-2.0
"""Run the checks that need a GPU, one part of four, and write its record: ``python bench/gpu_check.py correctness``.

The parts are correctness, deaths, kernels and link; ``make gpu`` runs them one after the other, each below eight
minutes. Needs torch, Triton, CuPy, pytest and pytest-benchmark, and torchvision for steps of ResNet-50, but no network
and no installed commrt. The most important checks run first. The record is written after each of them, and says what
did not fit in ``--limit`` seconds, and what the machine cannot do. The exit code is 1 if anything failed. Without a GPU
the same checks run on the CPU, and the record says so.

Ranks that share a GPU work at the same time under MPS only. Each stage that measures the link starts a daemon of its
own, if the machine has one, and ends it when the ranks have left. If you have set CUDA_MPS_PIPE_DIRECTORY, all stages
run under your daemon. No stage of the others kills a rank under MPS, which would leave the rest undefined.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import Any

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
LIMIT_S = 460.0
"""Seconds for a part: under eight minutes."""
INTERRUPTED = "ended by a signal"

NOTHING_SELECTED = 5
"""The exit code of pytest if no test is selected."""
MEMCHECK = ("compute-sanitizer", "--target-processes", "all", "--report-api-errors", "no", "--error-exitcode", "9")
"""API errors are not reported: NCCL asks CUDA for features that not every machine has."""


@dataclass(frozen=True)
class Stage:
    """One run of pytest, or of a program that prints JSON or a table, with its limit."""

    name: str
    arguments: Sequence[str]
    limit_s: float
    is_pytest: bool = True
    under: Sequence[str] = ()
    """The program that runs the stage, with its options."""
    mps: bool = False
    """True if its ranks must work on a GPU at the same time."""


SHARING = "can two ranks exchange here"
ALL_REDUCES = "all_reduces and ranks2"
FOUR, EIGHT = "ranks4 and not all_reduces", "ranks8 and not all_reduces"
TWO = "not mebibyte and not ranks4 and not ranks8 and not memory and not all_reduces"
PEERS, STEPS = "test_peers.py", "test_training_steps.py"
PARTS = {
    "correctness": (
        Stage(SHARING, ["test_ranks.py", "-k", "mebibyte"], 90),
        Stage("kernels against their definitions", ["test_on_gpu.py"], 120),
        Stage("two ranks", ["test_ranks.py", "-k", TWO], 180),
        Stage("ways of training on ranks, and the backend", ["test_systems.py", "-k", "not host"], 150),
        Stage("memory, one rank", ["test_on_gpu.py", "-k", "not two_to_the_31 and not codes"], 90, under=MEMCHECK),
        Stage("memory, codes", ["test_on_gpu.py", "-k", "codes"], 90, under=MEMCHECK),
        Stage("memory, two ranks", ["test_ranks.py", "-k", "memory"], 90, under=MEMCHECK),
    ),
    "deaths": (
        Stage("deaths among four ranks that read each other's memory", [PEERS, "-k", "gone"], 300),
        Stage("four ranks", ["test_ranks.py", "-k", FOUR], 140),
        Stage("eight ranks", ["test_ranks.py", "-k", EIGHT], 160),
    ),
    "kernels": (
        Stage("a backward pass and packing", ["test_overlap.py", "--benchmark-only"], 90),
        Stage("the host's time on two ranks", ["test_systems.py", "-k", "host"], 90),
        Stage("sizes of tiles", ["tune_kernels.py", "--variants"], 150, is_pytest=False),
        Stage("kernels against torch's", ["test_kernels.py", "--benchmark-only"], 400),
    ),
    "link": (
        Stage("sums in peers' memory on ranks", [PEERS, "-k", "round or graphs"], 150, mps=True),
        Stage("all-reduces of ranks, kernels on peers' memory", [PEERS, "-k", "race or kernels"], 150, mps=True),
        Stage("steps of ResNet-50 on two ranks", [STEPS, "-k", "two_ranks and resnet50"], 110, mps=True),
        Stage("steps of a GPT on two ranks", [STEPS, "-k", "two_ranks and gpt"], 110, mps=True),
        Stage("profile of a step on two ranks", [STEPS, "-k", "profile"], 80, mps=True),
        Stage("steps of ResNet-50 on four and eight ranks", [STEPS, "-k", "several"], 200, mps=True),
        Stage("every algorithm's all-reduces of two ranks", ["test_ranks.py", "-k", ALL_REDUCES], 90, mps=True),
    ),
}
MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
MPS_S = 30.0
"""Seconds until the daemon has begun or ended."""


class InterruptedStage(Exception):
    """A signal that asks this program to end."""


@dataclass
class Outcome:
    """The outcome of a stage."""

    stage: str
    seconds: float = 0.0
    passed: int = 0
    failed: list[dict[str, str]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    figures: list[Any] = field(default_factory=list)
    mps: str = "not used"
    """Whether the ranks worked on a GPU at the same time."""
    trouble: str | None = None
    """Why the outcome is missing or incomplete."""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, default=BENCH / "results", help="folder of the record")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all of it")
    parser.add_argument("--only", nargs="*", help="run only stages whose names contain one of these")
    parser.add_argument("--commit", help="commit of the checked code, if the copy has no git history")
    options = parser.parse_args()
    require_links()
    end_s = monotonic() + options.limit
    stages = [stage for stage in PARTS[options.part] if _is_wanted(stage, options.only)]
    about = {"part": options.part, **machine()}
    about["commit"] = about["commit"] or options.commit
    path = options.out / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{about['device'].replace(' ', '-')}-{options.part}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    outcomes: list[Outcome] = []
    write(path, about, outcomes)
    print(f"record: {path}", flush=True)
    with suppress(InterruptedStage):  # between two stages
        for stage in stages:
            alone = any(outcome.stage == SHARING and not outcome.passed for outcome in outcomes)
            outcomes.append(
                left_out(stage) if alone and "ranks" in stage.name else run(stage, end_s - monotonic(), path)
            )
            print(summary(outcomes[-1]), flush=True)
            write(path, about, outcomes)
            if outcomes[-1].trouble == INTERRUPTED:
                break
    return int(len(outcomes) < len(stages) or any(outcome.failed or outcome.trouble for outcome in outcomes))


def interrupt(*_: object) -> None:
    """Let the running stage end, and be recorded."""
    raise InterruptedStage


def write(path: Path, about: dict[str, Any], outcomes: list[Outcome]) -> None:
    """Write the record of what has run so far: a line for the machine, for each stage, and for each of its figures."""
    stages = ",\n".join(_lines_of_stage(asdict(outcome), about) for outcome in outcomes)
    path.write_text(f'{json.dumps(about)[:-1]}, "stages": [\n{stages}]}}\n')


def _lines_of_stage(stage: dict[str, Any], about: dict[str, Any]) -> str:
    """Return the stage as JSON. A record says of the machine only what is not said for all of them."""
    figures = [
        {key: value for key, value in one.items() if key not in about} if isinstance(one, dict) else one
        for one in stage.pop("figures")
    ]
    rows = ",".join(f"\n  {json.dumps(figure)}" for figure in figures)
    return f' {json.dumps(stage)[:-1]}, "figures": [{rows}]}}'


def _is_wanted(stage: Stage, only: Sequence[str] | None) -> bool:
    return not only or any(words in stage.name for words in only)


def require_links() -> None:
    """Exit if the links to kernels and algorithms are missing, which some ways to copy a source tree drop."""
    if not (ROOT / "commrt" / "kernels" / "layout.py").exists():
        sys.exit(f"{ROOT}/commrt/kernels must be a link to ../kernels, and algorithms one to ../algorithms: ln -sfn")


def machine() -> dict[str, Any]:
    """Return the machine and the versions, for the record."""
    import torch  # noqa: PLC0415  # after the arguments: it takes seconds

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    versions = {name: version(name) for name in ("torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "numpy")}
    return {
        "device": gpus[0] if gpus else "CPU",
        "gpus": len(gpus),
        "cores": os.cpu_count(),
        "driver": output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0],
        "python": sys.version.split()[0],
        **versions,
        "cuda": torch.version.cuda,
        "nccl": nccl_versions(),
        "commit": output(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
        "changed": bool(output(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])),
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def nccl_versions() -> dict[str, int] | str:
    """Return NCCL's versions at run time and at CuPy's build, or why they are unknown."""
    sys.path.insert(0, str(ROOT))
    try:
        from commrt.transport.nccl_binding import load  # noqa: PLC0415

        return {"runtime": load().get_version(), "build": load().get_build_version()}
    except Exception as error:  # the record says which error it was
        return f"{type(error).__name__}: {error}"


def output(command: Sequence[str]) -> str:
    """Return the output of a command, or an empty string if it fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def left_out(stage: Stage) -> Outcome:
    """Return the outcome of a stage that is skipped."""
    return Outcome(stage.name, skipped=[{"test": stage.name, "why": "ranks cannot exchange here, see the first stage"}])


def run(stage: Stage, left_s: float, record: Path) -> Outcome:
    """Run `stage` if there is time left. A profile goes beside the `record`."""
    outcome = Outcome(stage.name)
    if left_s < 5:
        outcome.trouble = "not run: no time was left"
        return outcome
    if stage.under and shutil.which(stage.under[0]) is None:
        outcome.skipped.append({"test": stage.name, "why": f"{stage.under[0]} is not installed"})
        return outcome
    begin_s, limit_s = monotonic(), min(stage.limit_s, left_s)
    with tempfile.TemporaryDirectory() as folder, served(stage, outcome) as variables:
        outcomes, records = Path(folder, "outcomes.jsonl"), Path(folder, "records.jsonl")
        command = command_of(stage, outcomes, records, record.with_name(f"{record.stem}-profile.json"))
        printed = output_of(outcome, command, limit_s, environment(checked=bool(stage.under)) | variables)
        for line in lines_of(outcomes):
            sort(outcome, line)
        outcome.figures += lines_of(records)
        if printed is not None and not stage.is_pytest:
            outcome.figures.append(json.loads(printed) if printed.startswith("{") else printed.splitlines())
    outcome.seconds = round(monotonic() - begin_s, 1)
    return outcome


@contextmanager
def served(stage: Stage, outcome: Outcome) -> Iterator[dict[str, str]]:
    """Run a daemon of MPS meanwhile, if `stage` wants one; yield the variables of its clients."""
    program = shutil.which(MPS_CONTROL) or shutil.which(MPS_CONTROL, path="/usr/local/nvidia/bin")
    if MPS_FOLDER in os.environ:
        outcome.mps = f"by {MPS_FOLDER}, which was set before"
    elif stage.mps and program is None:
        outcome.mps = f"{MPS_CONTROL} is not installed"
    if not stage.mps or program is None or MPS_FOLDER in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps", ignore_cleanup_errors=True) as folder:
        variables = {MPS_FOLDER: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        began = told([program, "-d"], "", variables)
        outcome.mps = "own daemon" if began else "the daemon did not begin"
        yield variables if began else {}
        if began and not told([program], "quit\n", variables):  # waits until all clients have left
            outcome.mps = "own daemon, which did not end when told to"


def told(command: Sequence[str], words: str, variables: dict[str, str]) -> bool:
    """Tell MPS's control program `words`; return True if it succeeded in time."""
    nothing, env = subprocess.DEVNULL, os.environ | variables
    try:
        subprocess.run(
            command, input=words, text=True, env=env, check=True, timeout=MPS_S, stdout=nothing, stderr=nothing
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def command_of(stage: Stage, outcomes: Path, records: Path, profile: Path) -> list[str]:
    """Return the command of `stage`."""
    files = [f"--outcomes={outcomes}", f"--records={records}", f"--step-profile={profile}"]
    options = [*files, "-q", "-p", "no:cacheprovider"]
    program = ["-m", "pytest", *options] if stage.is_pytest else []
    arguments = [str(BENCH / argument) if argument.endswith(".py") else argument for argument in stage.arguments]
    return [*stage.under, sys.executable, *program, *arguments]


def output_of(outcome: Outcome, command: list[str], limit_s: float, env: dict[str, str]) -> str | None:
    """Return the command's output if it succeeds; otherwise note the trouble in `outcome`."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=env, cwd=ROOT, start_new_session=True
    ) as process:
        try:
            printed, complaints = process.communicate(timeout=limit_s)
        except (subprocess.TimeoutExpired, InterruptedStage) as error:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            outcome.trouble = INTERRUPTED if isinstance(error, InterruptedStage) else f"ended after {limit_s:.0f} s"
            return None
    if process.returncode == NOTHING_SELECTED:
        outcome.skipped.append({"test": outcome.stage, "why": "nothing of it can run here"})
    elif process.returncode:
        outcome.trouble = f"ended with {process.returncode}: {(printed + complaints)[-3000:]}"
    return None if process.returncode else printed


def lines_of(path: Path) -> list[Any]:
    """Return the JSON lines of a file, which may be missing, or end within a line."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def environment(*, checked: bool) -> dict[str, str]:
    """Return the variables of a stage: this source tree, real kernels, one allocation per tensor if `checked`."""
    ours = {"PYTHONPATH": f"{ROOT}{os.pathsep}{BENCH}", "PYTHONSAFEPATH": "1", "TRITON_INTERPRET": "0"}
    return {**os.environ, **ours, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if checked else {**os.environ, **ours}


def sort(outcome: Outcome, line: dict[str, Any]) -> None:
    """Add one test to `outcome`."""
    if line["outcome"] == "passed":
        outcome.passed += 1
    else:
        kept = outcome.failed if line["outcome"] == "failed" else outcome.skipped
        kept.append({"test": line["test"], "why": line["why"][-3000:]})
    if line["figures"]:
        outcome.figures.append({"test": line["test"], **line["figures"]})


def summary(outcome: Outcome) -> str:
    """Return one line about a stage, and more if something failed."""
    counts = f"{outcome.passed} passed, {len(outcome.failed)} failed, {len(outcome.skipped)} skipped"
    lines = [f"{outcome.stage}: {counts}, {len(outcome.figures)} figures, {outcome.seconds:.0f} s"]
    lines += [f"  FAILED {bad['test']}: {bad['why'].strip().splitlines()[-1:]}" for bad in outcome.failed]
    lines += [f"  {outcome.trouble}"] if outcome.trouble else []
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
