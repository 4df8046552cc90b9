# SPDX-License-Identifier: Apache-2.0
"""What a run with failures cost, and whether its updates are right: parts of ``python bench/failures.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from failures_runs import Run
from failures_worker import BATCH, RECONFIGURED, TORCHFT, Job, batch_of, fresh, images
from torch.nn.functional import cross_entropy

TOLERANCE = 1e-8
"""Between float64 weights of a run and of the same steps in one process."""
CAME_LATE = "but all others have finished", "whose training has ended"
"""What a process that takes the place of another is told if the others are through."""
Event = dict[str, Any]
Row = dict[str, Any]
"""The figures of one run, by name.

`every` is the mean number of steps between failures, `seconds` are those from the first step to the final model, and
`hit` counts failures that found a process. Restarts of all processes undo `updates_lost`; `samples_twice` counts those
again. The gradients of `samples_never` are in no update of the final model. `join_s` is the median time from the start
of a process that takes another's place to its first step.
"""


def row_of(found: Run, every: int | None) -> Row:
    """Return the figures of a run, and what is wrong with its updates."""
    job, events = found.job, found.events
    begin_s = min((event["at_s"] for event in events if event["kind"] == "first step"), default=0.0)
    done_s = min((event["at_s"] for event in events if event["kind"] == "done"), default=float("inf"))
    applied, repeated = units(events, job)
    joins_s = list(_joins(events))
    return {
        "contender": job.contender,
        "every": every,
        "seed": job.seed,
        "seconds": done_s - begin_s,
        "failures": len(found.struck),
        "hit": sum(each["hit"] for each in found.struck),
        "restarted": max((event["attempt"] for event in events if event["kind"] == "start"), default=0),
        "replaced": found.starts,
        "updates_lost": lost_updates(events),
        "samples_twice": BATCH * repeated,
        "samples_never": BATCH * (job.steps * job.ranks - applied),
        "loss": _test_loss(job),
        "join_s": median(joins_s) if joins_s else None,
        "errors": list(dict.fromkeys(event["text"][:300] for event in events if _is_unplanned(event))),
        "complaints": list(wrong(found)),
    }


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
            lost += max(0, reached - min(bases))
            reached = min(bases)
        reached = max([event["step"] + 1 for event in mine if event["kind"] == "update"], default=reached)
    return lost


def lineage(events: Sequence[Event]) -> dict[int, set[tuple[int, ...]]]:
    """Return by step the ranks whose gradients the final model has: those of the latest attempt that made it."""
    latest: dict[int, int] = {}
    found: dict[int, set[tuple[int, ...]]] = {}
    for event in events:
        if event["kind"] == "update":
            step, attempt = event["step"], event["attempt"]
            if attempt > latest.get(step, -1):
                latest[step] = attempt
                found[step] = set()
            if attempt == latest[step]:
                found[step].add(tuple(event["members"]))
    return dict(sorted(found.items()))


def units(events: Sequence[Event], job: Job) -> tuple[int, int]:
    """Return how many of the steps' shares are in the final model, and how many were applied more than once.

    A share is the images of a rank in a step.
    """
    final = sum(len({rank for members in found for rank in members}) for found in lineage(events).values())
    seen = defaultdict[tuple[int, int], set[Any]](set)
    for event in events:
        if event["kind"] == "update":
            source = event["attempt"], (event["rank"], event["pid"]) if job.contender in TORCHFT else 0
            for rank in event["members"]:
                seen[event["step"], rank].add(source)
    return final, sum(len(sources) - 1 for sources in seen.values())


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


def _is_unplanned(event: Event) -> bool:
    return event["kind"] == "error" and not event["text"].startswith("InjectedError")


def _is_promised(event: Event) -> bool:
    """Return True for the errors by which others go on without a rank, or start all again, or have finished."""
    return event["text"].startswith(("Evicted", "QuorumLost")) or any(late in event["text"] for late in CAME_LATE)


def _finals(job: Job) -> list[dict[str, torch.Tensor]]:
    return [torch.load(path) for path in sorted(Path(job.folder).glob("final-*.pt"))]


def _test_loss(job: Job) -> float:
    """Return the loss of the final model on the images to test with; NaN without a model."""
    model, _ = fresh(job.seed)
    for weights in _finals(job)[:1]:
        model.load_state_dict(weights)
        pixels, digits = images(job.folder)[1]
        with torch.inference_mode():
            return float(cross_entropy(model.float()(pixels.float()), digits))
    return float("nan")


def wrong(found: Run) -> Iterator[str]:
    """Yield what is wrong with a run, in words."""
    job, events = found.job, found.events
    yield from found.trouble
    yield from (f"rank {event['rank']}: {event['text']}" for event in events if event["kind"] == "wrong")
    finals = _finals(job)
    if not finals:
        yield "no process came to the end"
        return
    if any(not torch.equal(weights[name], finals[0][name]) for weights in finals for name in weights):
        yield "processes ended with different weights"
    if job.contender.startswith("backup") or job.contender in RECONFIGURED:
        unplanned = (event for event in events if _is_unplanned(event))
        yield from (f"rank {event['rank']}: {event['text']:.300}" for event in unplanned if not _is_promised(event))
        yield from _wrong_updates(job, lineage(events), finals[0])


def _wrong_updates(job: Job, used: dict[int, set[tuple[int, ...]]], weights: dict[str, torch.Tensor]) -> Iterator[str]:
    """Yield what is wrong with the updates of a contender that must make each once, of gradients that it names.

    Backup workers take as many in each; a group that is reconfigured takes those of all its ranks.
    """
    needed = None if job.contender in RECONFIGURED else job.ranks - int(job.contender[-1])
    bad = {step: sets for step, sets in used.items() if not _are_right(sets, needed)}
    if list(used) != list(range(job.steps)):
        yield f"the updates are {list(used)}, and not one for each of {job.steps} steps"
    elif bad:
        yield f"not one set of {needed or 'all'} gradients for each step: {bad}"
    elif (away := _replay(job, used, weights)) > TOLERANCE:
        yield f"the final weights are off by {away:.1e} from those of the same steps in one process"


def _are_right(sets: set[tuple[int, ...]], needed: int | None) -> bool:
    """Return True for one set, of different ranks; `needed` of them if that is given."""
    (first, *others) = sets
    return not others and len({*first}) == (needed or len(first))


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
