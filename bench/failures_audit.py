# SPDX-License-Identifier: Apache-2.0
"""What a run with failures cost, and whether its updates are right: parts of ``python bench/failures.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from failures_plan import Job
from failures_runs import Run
from failures_worker import BATCH, batch_of, fresh, images
from torch.nn.functional import cross_entropy

__all__ = ["Result", "lineage", "longest_gaps", "lost_updates", "result_of", "units"]

TOLERANCE = 1e-8
"""Between float64 weights of a run and of the same steps in one process."""
Event = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """The figures of one run."""

    contender: str
    every: int | None
    """Mean number of steps between failures; None without."""
    seed: int
    seconds: float
    """From the first step to the final model."""
    failures: int
    hit: int
    """Failures that found a process."""
    restarted: int
    """How often all processes were started again."""
    replaced: int
    """Single processes that were started in the place of others."""
    updates_lost: int
    """Updates that were made, and undone by a restart."""
    samples_twice: int
    """Samples whose gradient was applied more than once, counting updates that were undone."""
    samples_never: int
    """Samples of all ranks' steps whose gradient is in no update of the final model."""
    loss: float
    """Of the final model on the images to test with."""
    joins_s: tuple[float, ...]
    """For each process that was started in the place of another: from its start to its first step."""
    gaps_s: dict[str, list[float]]
    """By kind of failure: the longest time without an update after it."""
    errors: tuple[str, ...]
    """With which processes ended, apart from the failures made on purpose."""
    complaints: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for a file."""
        return asdict(self)


def result_of(found: Run, every: int | None) -> Result:
    """Return the figures of a run, and audit its updates."""
    job, events = found.job, found.events
    begin_s = min((event["at_s"] for event in events if event["kind"] == "first step"), default=0.0)
    done_s = min((event["at_s"] for event in events if event["kind"] == "done"), default=float("inf"))
    applied, repeated = units(events, job)
    restarted = max((event["attempt"] for event in events), default=0)
    return Result(
        contender=job.contender,
        every=every,
        seed=job.seed,
        seconds=done_s - begin_s,
        failures=len(found.struck),
        hit=sum(each["hit"] for each in found.struck),
        restarted=restarted,
        replaced=found.starts,
        updates_lost=lost_updates(events),
        samples_twice=BATCH * repeated,
        samples_never=BATCH * (job.steps * job.ranks - applied),
        loss=_test_loss(job),
        joins_s=tuple(_joins(events)),
        gaps_s=longest_gaps(events, found.struck, done_s),
        errors=tuple(dict.fromkeys(event["text"][:300] for event in events if _is_unplanned(event))),
        complaints=tuple(_wrong(found)),
    )


def lost_updates(events: Sequence[Event]) -> int:
    """Return how many updates restarts of all processes undid.

    >>> lost_updates([
    ...     {"kind": "update", "attempt": 0, "step": 6},
    ...     {"kind": "ready", "attempt": 1, "step": 4},
    ... ])
    3
    """
    lost = reached = 0
    for attempt in sorted({event["attempt"] for event in events}):
        mine = [event for event in events if event["attempt"] == attempt]
        bases = [event["step"] for event in mine if event["kind"] == "ready"]
        if bases:
            lost, reached = lost + max(0, reached - min(bases)), min(bases)
        reached = max([event["step"] + 1 for event in mine if event["kind"] == "update"], default=reached)
    return lost


def lineage(events: Sequence[Event]) -> dict[int, set[tuple[int, ...]]]:
    """Return by step the ranks whose gradients the final model has: those of the latest attempt that made it."""
    latest: dict[int, tuple[int, set[tuple[int, ...]]]] = {}
    for event in events:
        if event["kind"] == "update":
            attempt, members = event["attempt"], tuple(event["members"])
            before = latest.get(event["step"], (-1, set()))
            if attempt > before[0]:
                latest[event["step"]] = attempt, {members}
            elif attempt == before[0]:
                before[1].add(members)
    return {step: members for step, (_, members) in sorted(latest.items())}


def units(events: Sequence[Event], job: Job) -> tuple[int, int]:
    """Return how many of the steps' shares are in the final model, and how many were applied more than once.

    A share is the images of a rank in a step.
    """
    final = sum(len({rank for members in found for rank in members}) for found in lineage(events).values())
    seen = defaultdict[tuple[int, int], set[Any]](set)
    for event in events:
        if event["kind"] == "update":
            source = event["attempt"], (event["rank"], event["pid"]) if job.contender == "torchft" else 0
            for rank in event["members"]:
                seen[event["step"], rank].add(source)
    return final, sum(len(sources) - 1 for sources in seen.values())


def longest_gaps(events: Sequence[Event], struck: Sequence[Event], done_s: float) -> dict[str, list[float]]:
    """Return by kind of failure the longest time without an update, from each failure to the next."""
    times = sorted({event["at_s"] for event in events if event["kind"] in {"first step", "update"}})
    gaps: dict[str, list[float]] = {}
    ends = [*(each["at_s"] for each in struck[1:]), done_s][: len(struck)]
    for each, end_s in zip(struck, ends, strict=True):
        if each["hit"]:
            inside = [b - a for a, b in pairwise(times) if b > each["at_s"] and a < end_s]
            gaps.setdefault(each["kind"], []).append(max(inside, default=0.0))
    return gaps


def _is_unplanned(event: Event) -> bool:
    return event["kind"] == "error" and not event["text"].startswith("InjectedError")


def _is_promised(event: Event) -> bool:
    """Return True for the errors by which others go on without a rank, or start all again, or have finished."""
    return event["text"].startswith(("Evicted", "QuorumLost")) or "but all others have finished" in event["text"]


def _joins(events: Sequence[Event]) -> Iterator[float]:
    """Yield how long each process took from its start to its first step, of those that were started later."""
    begun = {(event["rank"], event["pid"]): event["at_s"] for event in events if event["kind"] == "first step"}
    seen = set[int]()
    for event in events:
        if event["kind"] == "start":
            key = event["rank"], event["pid"]
            if event["rank"] in seen and key in begun:
                yield begun[key] - event["at_s"]
            seen.add(event["rank"])


def _finals(job: Job) -> dict[str, dict[str, torch.Tensor]]:
    return {path.stem: torch.load(path) for path in sorted(Path(job.folder).glob("final-*.pt"))}


def _test_loss(job: Job) -> float:
    model, _ = fresh(job.seed)
    for weights in list(_finals(job).values())[:1]:
        model.load_state_dict(weights)
        pixels, digits = images(job.folder)[1]
        with torch.inference_mode():
            return float(cross_entropy(model.float()(pixels.float()), digits))
    return float("nan")


def _wrong(found: Run) -> Iterator[str]:
    """Yield what is wrong with a run, in words."""
    job, events = found.job, found.events
    yield from found.trouble
    yield from (f"rank {event['rank']}: {event['text']}" for event in events if event["kind"] == "wrong")
    finals = list(_finals(job).values())
    if not finals:
        yield "no process came to the end"
        return
    if any(not torch.equal(weights[name], finals[0][name]) for weights in finals for name in weights):
        yield "processes ended with different weights"
    if job.contender.startswith("backup"):
        unplanned = (event for event in events if _is_unplanned(event))
        yield from (f"rank {event['rank']}: {event['text']:.300}" for event in unplanned if not _is_promised(event))
        yield from _wrong_updates(job, lineage(events), finals[0])


def _wrong_updates(job: Job, used: dict[int, set[tuple[int, ...]]], weights: dict[str, torch.Tensor]) -> Iterator[str]:
    """Yield what is wrong with the updates of backup workers: none may be lost, or made twice."""
    needed = job.ranks - int(job.contender[-1])
    if list(used) != list(range(job.steps)):
        yield f"the updates are {list(used)}, and not one for each of {job.steps} steps"
    elif bad := {step: sets for step, sets in used.items() if len(sets) > 1 or any(len({*m}) != needed for m in sets)}:
        yield f"not one set of {needed} gradients for each step: {bad}"
    elif (away := _replay(job, used, weights)) > TOLERANCE:
        yield f"the final weights are off by {away:.1e} from those of the same steps in one process"


def _replay(job: Job, used: dict[int, set[tuple[int, ...]]], weights: dict[str, torch.Tensor]) -> float:
    """Return how far `weights` are from those of the same steps in this process."""
    model, optimizer = fresh(job.seed)
    data = images(job.folder)[0]
    for step, (members,) in used.items():
        optimizer.zero_grad()
        x, y = batch_of(data, job.seed, step, members, job.ranks)
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return max(float((value - weights[name]).abs().max()) for name, value in model.state_dict().items())
