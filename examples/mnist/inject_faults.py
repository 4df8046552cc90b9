# SPDX-License-Identifier: Apache-2.0
"""``--inject FAULT``: slow, stopped and killed workers, to see how an algorithm copes.

Faults depend only on the seed, the rank and its step, so each run meets the same ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from time import sleep, thread_time

from commrt.errors import UsageError

__all__ = ["Fault", "Injection", "check", "extra_s", "parse"]

LONGEST_S = 2e6
MOST_TIMES = 1e6
FIELDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "slow": (
        ("prob", "seconds"),
        ("rank", "prob", "seconds"),
        ("prob", "low", "high"),
        ("rank", "prob", "low", "high"),
    ),
    "kill": (("rank", "step"),),
    "stop": (("rank", "step", "seconds"),),
}
"""By kind of fault, the fields of each of its forms."""
EXAMPLES = {
    "slow": (
        "slow:prob=0.1,seconds=0.5 or slow:prob=0.03,low=5,high=20, with rank=2 for one rank alone"
    ),
    "kill": "kill:rank=3,step=20",
    "stop": "stop:rank=1,step=30,seconds=5",
}
WHOLE = {"rank", "step"}
RESUME = """
import os, select, signal, sys
worker, seconds = int(sys.argv[1]), float(sys.argv[2])
os.kill(worker, signal.SIGSTOP)
if not select.select([0], [], [], seconds)[0]:
    os.kill(worker, signal.SIGCONT)
"""
"""Run by another process, since a stopped one cannot resume itself.

It ends with the worker, whose pipe it reads.
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one kind; None for fields that it does not have."""

    kind: str
    """slow: a step of the rank (or of every rank) takes longer, with probability `prob`. kill,
    stop: the rank gets SIGKILL or SIGSTOP when `step` begins.
    """
    rank: int | None = None
    step: int | None = None
    prob: float | None = None
    seconds: float | None = None
    """How much longer a slow step takes, or how long a stopped process rests."""
    low: float | None = None
    high: float | None = None
    """A slow step computes `low` to `high` times as long."""

    def extra_s(self, draw: Random, usual_s: float) -> float:
        """Return by how much a step is longer that usually computes for `usual_s`."""
        if self.prob is None or draw.random() >= self.prob:
            return 0.0
        if self.low is None or self.high is None:
            return self.seconds or 0.0
        return (draw.uniform(self.low, self.high) - 1) * usual_s

    def strike(self) -> None:
        """Kill this process, or stop it for `seconds`."""
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        command = [sys.executable, "-ISc", RESUME, str(os.getpid()), str(self.seconds)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as resume:  # noqa: S603  # a constant
            resume.wait()


def parse(text: str) -> Fault:
    """Return the fault that `text` describes; raises `UsageError`.

    >>> parse("kill:rank=3,step=20")
    Fault(kind='kill', rank=3, step=20, prob=None, seconds=None, low=None, high=None)
    """
    kind, _, rest = text.partition(":")
    if kind not in FIELDS:
        raise UsageError(
            f"--inject {text}: no fault is called {kind!r}: choose one of"
            f" {', '.join(sorted(FIELDS))}"
        )
    parts = [part.partition("=") for part in rest.split(",")]
    fields = {name: value for name, _, value in parts}
    if len(fields) < len(parts) or {*fields} not in [{*form} for form in FIELDS[kind]]:
        raise UsageError(
            f"--inject {text}: a field is missing, unknown or given twice: write {EXAMPLES[kind]}"
        )
    try:
        numbers = {
            name: int(value) if name in WHOLE else float(value) for name, value in fields.items()
        }
    except ValueError as error:
        raise UsageError(f"--inject {text}: {error}: write {EXAMPLES[kind]}") from None
    return Fault(kind, **numbers)  # type: ignore[arg-type]  # see WHOLE


def check(fault: Fault, workers: int, steps: int) -> None:
    """Raise `UsageError` if `fault` cannot happen in a run of `workers`
    workers and `steps` steps.
    """
    limits: dict[str, tuple[float, float]] = {
        "rank": (0, workers - 1),
        "step": (0, steps - 1),
        "prob": (0, 1),
        "seconds": (0, LONGEST_S),
        "low": (1, MOST_TIMES),
        "high": (fault.low or 1, MOST_TIMES),
    }
    for name, (least, most) in limits.items():
        value = getattr(fault, name)
        if value is not None and not least <= value <= most:
            raise UsageError(
                f"--inject {fault.kind}: {name}={value:g} must be in {least:g}..{most:g} in"
                " this run"
            )


def extra_s(
    faults: Sequence[Fault], seed: int, rank: int, step: int, usual_s: float = 0.0
) -> float:
    """Return how much longer `rank` computes in `step`, which usually takes `usual_s`; the same in
    each run.
    """
    return sum(
        fault.extra_s(Random(f"{seed} {number} {rank} {step}"), usual_s)
        for number, fault in enumerate(faults)
        if fault.rank in (None, rank)
    )


class Injection:
    """Makes `faults` happen to one rank, whose training loop calls these methods.

    Steps count from 0.
    """

    def __init__(self, faults: Sequence[Fault], seed: int, rank: int) -> None:
        self._faults = faults
        self._seed = seed
        self._rank = rank
        self._step = -1
        self._began_s = 0.0
        self._computed_s: list[float] = []  # sorted

    def begin_step(self) -> None:
        """Begin the next step: stops or kills this process if a fault says so."""
        now_s = thread_time()  # of this thread's processor: waiting for other ranks does not count
        if self._step >= 0:
            insort(self._computed_s, now_s - self._began_s)
        self._began_s = now_s
        self._step += 1
        for fault in self._faults:
            if (fault.rank, fault.step) == (self._rank, self._step):
                fault.strike()

    def compute(self) -> None:
        """Sleep for as long as faults slow this step down; call it between forward and backward
        pass.
        """
        computed = self._computed_s
        usual_s = computed[len(computed) // 2] if computed else 0.0
        if seconds := extra_s(self._faults, self._seed, self._rank, self._step, usual_s):
            sleep(seconds)
