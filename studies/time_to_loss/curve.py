# SPDX-License-Identifier: Apache-2.0
"""A recorded training run: the loss of each step, and how noisy the gradients were. README.md has the format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from commrt.errors import UsageError

__all__ = ["GOSSIP", "LOCAL", "SYNCHRONOUS", "Curve", "Losses"]

Losses = NDArray[np.float64]
"""[steps]"""

MOST = 1 << 32
"""Largest number of a curve."""
SYNCHRONOUS, GOSSIP, LOCAL = "synchronous", "gossip", "local"
"""How ranks train. All all-reduces train alike, so they share a name."""
VERSION = 1
"""Of the file's format."""
HEAD = ("training", "ranks", "batch", "settings", "seed")


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """What one run recorded; raises `UsageError` for a run without steps.

    >>> Curve("local", 4, 64, np.ones(10), settings={"period": 8}).method
    'local, period 8'
    """

    training: str
    """`SYNCHRONOUS`, `GOSSIP` or `LOCAL`."""
    ranks: int
    batch: int
    """Samples of all ranks in a step."""
    losses: Losses
    """[steps]: mean over ranks of the training loss of each step, before its update."""
    settings: Mapping[str, int | float | str] = field(default_factory=dict)
    """What else decides how training converges, such as the period of local SGD."""
    seed: int = 0
    signal: Losses | None = None
    """[steps]: estimates of the squared norm of the true gradient, G2; None if ranks do not average gradients."""
    noise: Losses | None = None
    """[steps]: estimates of the variance of a rank's gradient, V."""
    recipe: Mapping[str, int | float] = field(default_factory=dict)
    """The "lr" and "epochs" of the run, if they are known. Curves are compared only if they agree."""

    def __post_init__(self) -> None:
        for name, value in (("ranks", self.ranks), ("batch", self.batch), ("seed", self.seed)):
            if type(value) is not int or not 0 <= value <= MOST:
                raise UsageError(f"a curve with {name}={value!r:.80}: give a whole number up to {MOST:,}")
        is_flat = isinstance(self.settings, Mapping) and all(
            isinstance(value, int | float | str) for value in self.settings.values()
        )
        is_flat = is_flat and isinstance(self.recipe, Mapping)
        if not isinstance(self.training, str) or not is_flat:
            raise UsageError(
                "a curve's training must be a text, and its settings an object of numbers and texts, as its recipe"
            )
        if np.ndim(self.losses) != 1:
            raise UsageError(f"a curve's losses must be a row of numbers, not of {np.ndim(self.losses)} dimensions")
        if self.ranks < 1 or self.batch < self.ranks or not len(self.losses):
            raise UsageError(
                f"a curve of {self.ranks} ranks, {self.batch} samples and {len(self.losses)} steps: all must be at "
                "least 1, with a sample for each rank"
            )

    @property
    def method(self) -> str:
        """How the ranks train, in words; curves of one method are fitted together."""
        return ", ".join([self.training, *(f"{name} {value}" for name, value in self.settings.items())])

    @property
    def common_losses(self) -> Losses:
        """[steps]: losses of the steps in which ranks agree, each held until they agree again.

        In local SGD that is the step after each average. Within a period ranks drift apart, and the mean of their
        losses rises: it is the loss of no model. Where ranks average in each step, and in gossip, all losses count.
        """
        period, delay = (self.settings.get(name, default) for name, default in (("period", 1), ("delay", 0)))
        if not (isinstance(period, int) and isinstance(delay, int) and period > 1 and delay >= 0):
            return self.losses
        held = self.losses[delay::period].repeat(min(period, len(self.losses)))
        return np.concatenate([self.losses[:delay], held])[: len(self.losses)]

    @classmethod
    def read(cls, file: str | Path) -> Self:
        """Return the curve in `file`; raise `UsageError` that names the malformed line."""
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from error
        return cls.parsed(text, file)

    @classmethod
    def parsed(cls, text: str, file: str | Path = "a curve") -> Self:
        """Return the curve that `text` describes; `file` is where it comes from, for errors."""
        lines = [line for line in text.splitlines() if line.strip()]
        head, *steps = [_parsed(file, number, line) for number, line in enumerate(lines, 1)] or [{}]
        if head.get("commrt_curve") != VERSION:
            raise UsageError(
                f"{file} is no curve: its first line must say commrt_curve {VERSION}; record one with "
                "studies/time_to_loss/record_curves.py"
            )
        if (gap := next((i for i, step in enumerate(steps) if step.get("step", i) != i), None)) is not None:
            raise UsageError(f"{file}: step {gap} comes as {steps[gap]['step']!r:.20}: a curve has all steps in order")
        losses, signal, noise = (_column(file, steps, name) for name in ("loss", "signal", "noise"))
        given: dict[str, Any] = {"losses": np.empty(0) if losses is None else losses, "signal": signal, "noise": noise}
        try:
            return cls(**given, **{name: head[name] for name in HEAD}, recipe=head.get("recipe", {}))
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from None
        except (KeyError, TypeError) as error:
            raise UsageError(f"{file}: its first line lacks something: {error!r:.200}") from error


def _parsed(file: str | Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}, line {number} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file}, line {number}: give an object such as {{'step': 0, 'loss': 2.3}}")
    return found


def _column(file: str | Path, steps: Sequence[dict[str, Any]], name: str) -> Losses | None:
    """Return one number per step; None if the first step has none."""
    if not steps or name not in steps[0]:
        return None
    try:
        return np.array([float(step[name]) for step in steps], dtype=np.float64)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{file}: a step lacks a number for {name}: {error!r:.200}") from error
