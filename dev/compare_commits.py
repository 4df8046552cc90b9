# SPDX-License-Identifier: Apache-2.0
"""Compare two commits in one run: ``python dev/compare_commits.py BEFORE [AFTER]``. Without AFTER:
the working tree.

Each commit is checked out beside this one, and both run interleaved. The table shows the ratio of
times that follow each other, so a slow phase of the machine slows both. Above 1, AFTER is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "bench"))
from interleaved import Times, table

ROOT = Path(__file__).parent.parent
BEFORE = "before"
AFTER = "after"
STEPS = 20
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
"""glibc returns freed gradients to the system in some runs and not in others: 2,000 to 9,000 page
faults per step.
"""


@contextmanager
def checkout(commit: str | None) -> Iterator[Path]:
    """Check out `commit` into a temporary folder; None is the working tree."""
    if commit is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "tree")
        git("worktree", "add", "--detach", str(folder), commit)
        try:
            yield folder
        finally:
            git("worktree", "remove", "--force", str(folder))


def git(*words: str) -> None:
    """Run git, and exit with its message if it fails."""
    command = ["git", "-C", str(ROOT), *words]  # git of the user's PATH
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip())


def measured(folder: Path) -> dict[str, float]:
    """Return the seconds of all tasks with the package in `folder`."""
    environment = (
        os.environ
        | KEEPS_MEMORY
        | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "bench")])}
    )
    command = [sys.executable, __file__, "--work"]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def work() -> None:
    """Measure all tasks with the package on the path, and print them as JSON."""
    from commrt.algorithms.ring import Ring  # noqa: PLC0415  # of the commit that is measured
    from commrt.algorithms.torus import Torus2D  # noqa: PLC0415
    from commrt.pricing.cluster import Cluster  # noqa: PLC0415
    from commrt.pricing.price import Pricing  # noqa: PLC0415
    from commrt.program import program  # noqa: PLC0415
    from commrt.proof.replay import verify  # noqa: PLC0415
    from commrt.proof.spec import all_reduce  # noqa: PLC0415
    from commrt.testing.processes import run_processes  # noqa: PLC0415

    torus = Torus2D().schedule(0, 256)
    ring = Ring().schedule(0, 1024)
    found = {
        "verify a torus of 256": best_s(lambda: verify(torus, all_reduce(256, torus.chunks))),
        "program of a ring of 1,024": best_s(lambda: program(ring, 0)),
        "simulate a ring of 1,024": best_s(lambda: Pricing(ring, Cluster.named("abci")).price(1e8)),
    }
    outcomes = run_processes(2, of_two, limit_s=120)
    if broken := [str(outcome.error) for outcome in outcomes if outcome.value is None]:
        raise RuntimeError(broken[0])
    print(
        json.dumps(
            found | {key: max(one.value[key] for one in outcomes) for key in outcomes[0].value}
        )
    )


def best_s(call: Callable[[], object]) -> float:
    """Return the least seconds of three calls."""
    times_s = []
    for _ in range(3):
        begin_s = perf_counter()
        call()
        times_s.append(perf_counter() - begin_s)
    return min(times_s)


def of_two(_: Callable[[Any], None]) -> dict[str, float]:
    """Measure one of two ranks: gradients of ResNet-50, and many small ones."""
    import torch  # noqa: PLC0415  # in the rank's process
    from model_gradients import resnet50  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    import commrt  # noqa: PLC0415

    torch.set_num_threads(1)
    found = {}
    with commrt.init(60.0, start_timeout_s=60.0) as world:
        sets = {"ResNet-50": list(resnet50().values()), "5,000 tensors": [(64,)] * 5000}
        for name, shapes in sets.items():
            for wire in (None, torch.bfloat16):
                model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
                begin_s = perf_counter()
                replica = commrt.attach(model, algorithm=commrt.Ring(), wire=wire)
                kind = "fp32" if wire is None else "bf16"
                found[f"attach {name}, {kind}"] = perf_counter() - begin_s
                found[f"step of {name}, {kind}"] = median(step_s(model) for _ in range(STEPS))
                replica.detach()
        world.agree("measured")
    return found


def step_s(model: Any) -> float:
    """Return the seconds of a backward pass that averages."""
    for param in model:
        param.grad = None
    loss = sum(param.sum() for param in model)
    begin_s = perf_counter()
    loss.backward()
    return perf_counter() - begin_s


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", nargs="?")
    parser.add_argument("after", nargs="?")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to measure")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return
    if options.before is None:
        parser.error("say which commit to compare with")
    with checkout(options.before) as before, checkout(options.after) as after:
        rounds = [(measured(before), measured(after)) for _ in range(options.rounds)]
    for name in rounds[0][1]:
        times: Times = {
            BEFORE: [one[name] for one, _ in rounds],
            AFTER: [other[name] for _, other in rounds],
        }
        print(f"\n{name}\n{table(times, {BEFORE: BEFORE, AFTER: BEFORE}, 'ms')}")


if __name__ == "__main__":
    main()
