# SPDX-License-Identifier: Apache-2.0
"""Train LeNet with randomly slow workers and with backups: ``python studies/backup_workers/slow_workers.py``.

Each of 8 workers sleeps instead of computing: a base time, and 5 to 20 times as long in 3 % of its steps. A late worker
sleeps to the end. The first 8, 7 or 6 gradients make a step. Step times are compared with a prediction: the k-th of the
same times, where a late rank finishes its old gradient first. (`commrt.tools.planning.stragglers.step_time_s` has the
published law.) The time to an accuracy is that of the first snapshot of the weights that reaches it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import commrt
from commrt.testing.processes import run_processes
from commrt.tools.planning.computing_times import SlowSteps
from commrt.tools.planning.stragglers import step_time_s

sys.path.append(str(Path(__file__).parents[1] / "mnist"))  # as a program it finds only its own folder

from mnist_images import Images, lenet, load

__all__ = ["Run", "trained", "work"]

WORKERS, BATCH, LR, GOAL, EVERY = 8, 8, 0.05, 0.96, 10
PROB, LOW, HIGH = 0.03, 5.0, 20.0


@dataclass(frozen=True)
class Run:
    """One training run."""

    needed: int
    step_s: float
    """Mean seconds of a step."""
    predicted_s: float
    goal_s: float | None
    """Seconds until the goal was reached, or None."""
    goal_steps: int | None
    accuracy: float
    """Accuracy at the end, on 1,000 test images."""


def batches(images: Images, rank: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of all images, so that a late rank loses none."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        places = torch.randint(len(images.digits), (BATCH,), generator=generator)
        yield images.pixels[places], images.digits[places]


def factors(prob: float, rank: int, seed: int) -> Iterator[float]:
    """Return how much slower each step of a rank is, as factors."""
    rng = np.random.default_rng([seed, rank])
    for _ in count():
        yield float(rng.uniform(LOW, HIGH)) if rng.random() < prob else 1.0


def work(
    _: Callable[[Any], None], needed: int, seed: int, steps: int, base_s: float, prob: float
) -> tuple[list[tuple[int, float]], list[list[Tensor]]]:
    """Train on one worker; return the time and the weights by number of updates."""
    torch.set_num_threads(1)
    images, _test = load()
    with commrt.init(120.0, start_timeout_s=120.0) as world:
        model = lenet(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(WORKERS - needed), also=[decay])
        slower, data = factors(prob, world.rank, seed), batches(images, world.rank, seed)
        world.agree("all are ready")
        begun_s, seen, weights = perf_counter(), [(0, 0.0)], []
        while (step := replica.step) < steps:
            begin_s = perf_counter()
            x, y = next(data)
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            sleep(max(begin_s + base_s * next(slower) - perf_counter(), 0.0))
            loss.backward()
            optimizer.step()
            decay.step()
            if replica.last is not None and replica.last.counted:
                seen.append((step + 1, perf_counter() - begun_s))
                if (step + 1) % EVERY == 0:
                    weights.append([param.detach().numpy().copy() for param in model.parameters()])
        return seen, weights


def trained(needed: int, seed: int, steps: int, base_s: float, prob: float) -> dict[int, tuple[float, Any]]:
    """Train; return, by number of updates, the time a worker first had them, and the weights if kept."""
    ends = run_processes(WORKERS, work, needed, seed, steps, base_s, prob, limit_s=900.0, holds_store=True)
    if broken := [end.error for end in ends if end.value is None]:
        raise RuntimeError(str(broken[0]))
    found: dict[int, tuple[float, Any]] = {}
    for seen, weights in (end.value for end in ends):
        kept = iter(weights)
        for step, at_s in seen:
            these = next(kept) if step and step % EVERY == 0 else None
            if step not in found or at_s < found[step][0]:
                found[step] = at_s, these
    return found


def accuracy(weights: Sequence[Any], test: Images) -> float:
    """Return the accuracy of LeNet with `weights`."""
    model = lenet(0)
    with torch.no_grad():
        for param, value in zip(model.parameters(), weights, strict=True):
            param.copy_(torch.from_numpy(value))
        return (model(test.pixels).argmax(1) == test.digits).float().mean().item()


def predicted(needed: int, seed: int, steps: int, base_s: float) -> float:
    """Return the predicted seconds per step, from the workers' own times only."""
    slower = [factors(PROB, rank, seed) for rank in range(WORKERS)]
    events = [(base_s * next(slower[rank]), rank) for rank in range(WORKERS)]
    heapify(events)
    version, of, here = 0, [0] * WORKERS, list[int]()
    while True:
        at_s, rank = heappop(events)
        here.append(rank)
        if of[rank] == version and len(here) < needed:
            continue
        begins = here if of[rank] == version else [here.pop()]  # a late rank begins again, with the current weights
        version += of[rank] == version
        if version == steps:
            return at_s / steps
        for each in begins:
            of[each] = version
            heappush(events, (at_s + base_s * next(slower[each]), each))
        here = [] if begins is here else here


def run(needed: int, seed: int, steps: int, base_s: float, plain_s: float, test: Images) -> Run:
    """Train once; `plain_s` is the time of a step without slow workers."""
    found = trained(needed, seed, steps, base_s, PROB)
    predicted_s = predicted(needed, seed, steps, base_s) + plain_s - base_s
    reached = ((step, at_s) for step, (at_s, kept) in sorted(found.items()) if kept and accuracy(kept, test) >= GOAL)
    goal_steps, goal_s = next(reached, (None, None))
    last = found[max(step for step, (_, kept) in found.items() if kept)][1]
    return Run(needed, found[steps][0] / steps, predicted_s, goal_s, goal_steps, accuracy(last, test))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=500, help="training steps")
    parser.add_argument("--needed", type=int, nargs="+", default=[8, 7, 6], help="gradients per step")
    parser.add_argument("--base-s", type=float, default=0.08, help="seconds of a step that is not slow")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    _, test = load()
    plain_s = trained(WORKERS, 0, 60, options.base_s, 0.0)[60][0] / 60
    rows = []
    for needed in options.needed:
        rows.append([run(needed, seed, options.steps, options.base_s, plain_s, test) for seed in range(options.seeds)])
        if not options.json:
            _print(rows[-1], plain_s)
    if options.json:
        print(json.dumps({"plain_s": plain_s, "runs": [asdict(each) for row in rows for each in row]}))


def _print(runs: Sequence[Run], plain_s: float) -> None:
    def spread(values: Sequence[float | None], scale: float = 1.0) -> str:
        known = [scale * value for value in values if value is not None]
        return "never" if not known else f"{mean(known):.1f} +- {stdev(known) if len(known) > 1 else 0.0:.1f}"

    law = SlowSteps(plain_s, PROB, LOW, HIGH).sample(np.random.default_rng(0), 20_000, WORKERS)
    law_s = float(step_time_s(law, [runs[0].needed])[0])
    print(
        f"{runs[0].needed} of {WORKERS}: step {spread([each.step_s for each in runs], 1e3)} ms, predicted "
        f"{spread([each.predicted_s for each in runs], 1e3)} (by the law {1e3 * law_s:.1f}; "
        f"nobody slow {1e3 * plain_s:.1f}), {GOAL:.0%} after "
        f"{spread([each.goal_s for each in runs])} s and {spread([each.goal_steps for each in runs])} steps, "
        f"{spread([each.accuracy for each in runs], 100)} % at the end"
    )


if __name__ == "__main__":
    main()
