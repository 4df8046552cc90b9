# SPDX-License-Identifier: Apache-2.0
"""Which failures hit a run, and what all processes of a run know: parts of ``python bench/failures.py``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import sqrt
from random import Random
from typing import Any

__all__ = ["CONTENDERS", "KINDS", "Failure", "Job", "checkpoint_interval", "draw"]

KINDS = ("kill", "stop", "exception", "slow", "exit")
STOPPED_S = (0.5, 1.5)
"""How long a process is stopped; less than the timeout of all contenders."""
SLOW_S = 2.0
"""How long a process computes at a third of its speed."""
CONTENDERS = ("ddp", "ddp-commrt", "backup1", "backup2", "gossip", "local", "torchft")


@dataclass(frozen=True)
class Failure:
    """A failure of one rank, which happens when the run reaches a step for the first time."""

    step: int
    share: float
    """So much of a step's compute time later."""
    victim: int
    kind: str
    lasts_s: float
    """Of ``stop`` and ``slow``; otherwise 0."""


@dataclass(frozen=True)
class Job:
    """One run of one contender."""

    contender: str
    folder: str
    ranks: int
    steps: int
    compute_s: float
    """A rank sleeps so long in each step, on average: a GPU that is busy."""
    seed: int
    checkpoint_every: int
    timeout_s: float = 5.0
    transport: str = ""
    """Of commrt; by default the one that it chooses."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for a process that starts."""
        return asdict(self)


def draw(seed: int, every: int | None, steps: int, ranks: int) -> list[Failure]:
    """Return the failures of a run: one for each `every` steps, at random places, of all kinds in turn.

    Short runs at low rates would often have none if their number were random, too.

    >>> len(draw(0, 10, 100, 4)), draw(0, None, 100, 4)
    (10, [])
    """
    if every is None:
        return []
    rng = Random(f"{seed} {every}")
    places = sorted(rng.uniform(0, steps) for _ in range(max(1, round(steps / every))))
    kinds = [KINDS[(seed + number) % len(KINDS)] for number in range(len(places))]
    rng.shuffle(kinds)
    found = []
    for place, kind in zip(places, kinds, strict=True):
        lasts_s = {"stop": rng.uniform(*STOPPED_S), "slow": SLOW_S}.get(kind, 0.0)
        found.append(Failure(int(place), place % 1, rng.randrange(ranks), kind, lasts_s))
    return found


def checkpoint_interval(checkpoint_s: float, step_s: float, every: int | None) -> int:
    """Return after how many steps to write a checkpoint: sqrt(2 x its cost x the mean time between failures).

    >>> checkpoint_interval(0.01, 0.1, 80)
    4
    """
    if every is None:
        return 0
    return max(1, round(sqrt(2 * checkpoint_s * every * step_s) / step_s))
