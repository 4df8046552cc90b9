# SPDX-License-Identifier: Apache-2.0
"""``commrt train --inject FAULT``: slow, stopped and killed workers, to see what an algorithm makes of them.

What happens is a function of the seed, the rank and its step, so that each run meets the same.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from bisect import insort
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from random import Random
from time import sleep, thread_time
from typing import ClassVar

from commrt.errors import UsageError

__all__ = ["Fault", "Injection", "Kill", "Slow", "Slower", "Stop", "check", "extra_s", "parse"]

LONGEST_S = 2e6
MOST_TIMES = 1e6


@dataclass(frozen=True, slots=True)
class Slow:
    """Each step of the rank, or of every rank, takes `seconds` longer with probability `prob`."""

    kind: ClassVar[str] = "slow"
    prob: float
    seconds: float
    rank: int | None = None

    def extra_s(self, draw: Random, usual_s: float) -> float:
        """How much longer a step takes that usually computes for `usual_s`."""
        return self.seconds if draw.random() < self.prob else 0.0


@dataclass(frozen=True, slots=True)
class Slower:
    """Each step of the rank, or of every rank, computes `low` to `high` times as long with probability `prob`."""

    kind: ClassVar[str] = "slow"
    prob: float
    low: float
    high: float
    rank: int | None = None

    def extra_s(self, draw: Random, usual_s: float) -> float:
        """As `Slow.extra_s`."""
        return (draw.uniform(self.low, self.high) - 1) * usual_s if draw.random() < self.prob else 0.0


@dataclass(frozen=True, slots=True)
class Kill:
    """The rank gets SIGKILL at the beginning of a step; `back` seconds later another process takes its place."""

    kind: ClassVar[str] = "kill"
    rank: int
    step: int
    back: float | None = None

    def strike(self) -> None:
        """Does not return."""
        os.kill(os.getpid(), signal.SIGKILL)


PAUSE = """
import os, select, signal, sys
worker, seconds = int(sys.argv[1]), float(sys.argv[2])
os.kill(worker, signal.SIGSTOP)
if not select.select([0], [], [], seconds)[0]:
    os.kill(worker, signal.SIGCONT)
"""
"""For a process of its own, as who is stopped cannot go on by itself; it ends with the worker, whose pipe it holds."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The rank gets SIGSTOP at the beginning of a step, and goes on after `seconds`."""

    kind: ClassVar[str] = "stop"
    rank: int
    step: int
    seconds: float

    def strike(self) -> None:
        """Returns after that time."""
        command = [sys.executable, "-ISc", PAUSE, str(os.getpid()), str(self.seconds)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as pause:  # noqa: S603  # a constant
            pause.wait()


Fault = Slow | Slower | Kill | Stop
KINDS: dict[str, tuple[type[Fault], ...]] = {"slow": (Slow, Slower), "kill": (Kill,), "stop": (Stop,)}
FORMS = {
    "slow": "slow:prob=0.1,seconds=0.5 or slow:prob=0.03,low=5,high=20, with rank=2 for one rank alone",
    "kill": "kill:rank=3,step=20, with back=2 for a process that takes its place 2 s later",
    "stop": "stop:rank=1,step=30,seconds=5",
}
NUMBERS: dict[str, type[int | float]] = {
    "rank": int,
    "step": int,
    "prob": float,
    "seconds": float,
    "back": float,
    "low": float,
    "high": float,
}


def parse(text: str) -> Fault:
    """The fault that `text` describes; raises `UsageError` if it describes none.

    >>> parse("slow:rank=2,prob=0.1,seconds=0.5")
    Slow(prob=0.1, seconds=0.5, rank=2)
    >>> parse("kill:rank=3,step=20")
    Kill(rank=3, step=20, back=None)
    """
    kind, _, said = text.partition(":")
    if kind not in KINDS:
        raise UsageError(f"--inject {text}: no fault is called {kind!r}: choose one of {', '.join(sorted(KINDS))}")
    pairs = [_pair(text, part) for part in said.split(",")]
    given = dict(pairs)
    for shape in KINDS[kind]:
        if len(given) == len(pairs) and _required(shape) <= given.keys() <= _known(shape):
            return shape(**given)  # type: ignore[arg-type]  # of the types in NUMBERS
    raise UsageError(f"--inject {text}: some field is missing, unknown or there twice: write {FORMS[kind]}")


def _pair(text: str, part: str) -> tuple[str, float]:
    name, _, value = part.partition("=")
    number = NUMBERS.get(name, str)
    try:
        return name, number(value)  # type: ignore[return-value]  # what is no number has no place either
    except ValueError:
        what = "whole number" if number is int else "number"
        raise UsageError(f"--inject {text}: {part} is no {what}: write {FORMS[text.partition(':')[0]]}") from None


def _known(shape: type[Fault]) -> set[str]:
    return {field.name for field in fields(shape)}


def _required(shape: type[Fault]) -> set[str]:
    return {field.name for field in fields(shape) if field.default is MISSING}


def check(fault: Fault, workers: int, steps: int) -> None:
    """Raise `UsageError` if a run of so many workers and steps cannot meet `fault`."""
    given = {name: value for name, value in asdict(fault).items() if value is not None}
    text = f"--inject {fault.kind}:{','.join(f'{name}={value:g}' for name, value in given.items())}"
    limits = {"rank": workers - 1, "step": steps - 1, "prob": 1, "seconds": LONGEST_S, "back": LONGEST_S}
    times = {"low": (1, MOST_TIMES), "high": (given.get("low", 1), MOST_TIMES)}
    for name, (least, most) in ({name: (0, most) for name, most in limits.items()} | times).items():
        if name in given and not least <= given[name] <= most:
            raise UsageError(f"{text}: {name}={given[name]:g} must be in {least:g}..{most:g} in this run")


def extra_s(faults: Sequence[Fault], seed: int, rank: int, step: int, usual_s: float = 0.0) -> float:
    """How much longer `rank` computes in `step`, where it usually computes for `usual_s`; the same in each run."""
    return sum(
        fault.extra_s(Random(f"{seed} {number} {rank} {step}"), usual_s)
        for number, fault in enumerate(faults)
        if isinstance(fault, Slow | Slower) and fault.rank in (None, rank)
    )


class Injection:
    """Of one rank: its training loop says how far it is, and `faults` happen to it. Steps count from 0."""

    def __init__(self, faults: Sequence[Fault], seed: int, rank: int) -> None:
        self._faults, self._seed, self._rank = faults, seed, rank
        self._step = -1
        self._began_s = 0.0
        self._computed_s: list[float] = []  # in order of size

    def begin_step(self) -> None:
        """Here this process is stopped or killed."""
        now_s = thread_time()  # of this processor: what a step waits for others is not its own
        if self._step >= 0:
            insort(self._computed_s, now_s - self._began_s)
        self._began_s = now_s
        self._step += 1
        for fault in self._faults:
            if isinstance(fault, Kill | Stop) and (fault.rank, fault.step) == (self._rank, self._step):
                fault.strike()

    def compute(self) -> None:
        """Here, between forward and backward pass, computing takes longer."""
        computed = self._computed_s
        usual_s = computed[len(computed) // 2] if computed else 0.0
        if seconds := extra_s(self._faults, self._seed, self._rank, self._step, usual_s):
            sleep(seconds)
