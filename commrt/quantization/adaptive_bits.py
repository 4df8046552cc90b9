# SPDX-License-Identifier: Apache-2.0
"""`Adaptive` wires, whose bits change from step to step, and the rules that choose them.

A rule sees the same numbers on all ranks, so all choose the same bits, and nothing is negotiated.
It runs once per step, on the thread that averages the first bucket: mostly the communication
thread. There it must not communicate: collective calls raise `UsageError`. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf, isfinite, log2, sqrt
from typing import ClassVar, NamedTuple

from commrt.errors import UsageError
from commrt.quantizer import BITS, NEAREST, Quantizer


class Progress(NamedTuple):
    """What a rule may look at; equal on all ranks."""

    step: int
    """The training step that needs bits."""
    norm: float
    """The norm of the averaged gradient of the step before."""


Rule = Callable[[Progress], float]
"""Returns how many steps of rounding there should be between 0 and the largest value, 1 or more.

It must not call collectives such as ``world.all_reduce``: see above for its thread.
"""


@dataclass(frozen=True, slots=True)
class Adaptive:
    """A wire of integers whose bits change from step to step.

    Write ``wire=Adaptive(dq(target=20, steps=1000))``. The first steps get `most` bits, until
    gradients leave in their final order; so does one after a step whose norm is not finite, and the
    first one after ``join()``. The other fields are those of `Quantizer`. Raises `UsageError`.
    """

    rule: Rule = field(repr=False)
    least: int = 2
    most: int = 8
    block: int = 256
    feedback: bool = False
    rounding: str = NEAREST
    seed: int = 0
    carried_by: ClassVar[str] = "commrt.quantization.carrier"
    rule_text: str = field(init=False)
    """The rule as text, which ranks compare."""

    def __post_init__(self) -> None:
        if not callable(self.rule):
            raise UsageError(
                f"rule={self.rule!r:.80} is no function: pass dq(...), adaquant(...) or your own"
            )
        if not BITS[0] <= self.least <= self.most <= BITS[-1]:
            raise UsageError(
                f"bits from least={self.least} to most={self.most}: use {BITS[0]} to {BITS[-1]}"
            )
        self._of(self.least)  # refuses the other fields
        text = re.sub(r" at 0x[0-9a-f]+", "", repr(self.rule))  # places differ between ranks
        object.__setattr__(self, "rule_text", text)

    @property
    def traits(self) -> tuple[str, ...]:
        """Return what `commrt.options` calls this wire."""
        return ("quantized wire", "adaptive wire", *(["error feedback"] if self.feedback else []))

    def _of(self, bits: int) -> Quantizer:
        return Quantizer(bits, self.block, self.feedback, self.rounding, self.seed)

    def quantizer(self, progress: Progress | None) -> Quantizer:
        """Return the quantizer of a step; None stands for no progress yet.

        >>> wire = Adaptive(lambda progress: 7 * progress.norm)
        >>> [wire.quantizer(Progress(1, norm)).bits for norm in (0.1, 1.0, 1.1, 1000.0)]
        [2, 4, 5, 8]
        >>> wire.quantizer(None).bits
        8
        """
        if progress is None or not isfinite(progress.norm):
            return self._of(self.most)
        levels = max(self.rule(progress), 1.0)
        bits = ceil(log2(levels + 1)) + 1 if isfinite(levels) else self.most
        return self._of(min(max(bits, self.least), self.most))

    def __str__(self) -> str:
        return f"int{self.least}..{self.most} adaptive"


@dataclass(frozen=True, slots=True)
class dq:  # noqa: N801  # users read it as a function
    """DQ-SGD's rule: more bits for large gradients, and more towards the end of `steps`.

    Levels are ``target * decay ** ((steps - k) / 2) * norm``: the bits that minimise the bytes of
    all steps, where the error of a step weighs less by `decay` for each step that follows. Derived
    from what the abstract of 2107.14575 names (the error allowed, the steps that remain, the norm),
    not copied from its text.
    """

    target: float
    steps: int
    decay: float = 0.99

    def __post_init__(self) -> None:
        _require_positive(target=self.target, steps=self.steps, decay=self.decay)

    def __call__(self, progress: Progress) -> float:
        """Return the levels; see `Rule`."""
        left = max(self.steps - progress.step, 0)
        return self.target * float(self.decay ** (left / 2)) * progress.norm


@dataclass(slots=True)
class adaquant:  # noqa: N801  # as above
    """AdaQuantFL's rule: ``levels * sqrt(F_0 / F_k)``, so more bits as the loss falls.

    `loss` returns the latest loss, and must return the same on all ranks: average it in the loop,
    with ``world.all_reduce``, as a rule cannot. `first` is F_0, by default the first loss that
    `loss` returns; the rule then keeps it here. A checkpoint does not hold it: save it yourself,
    and pass it when you resume.
    """

    levels: float
    loss: Callable[[], float] = field(repr=False)
    first: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _require_positive(levels=self.levels)

    def __call__(self, _: Progress) -> float:
        """Return the levels; see `Rule`."""
        now = self.loss()
        if not (isfinite(now) and now > 0):
            return inf
        if self.first is None:
            self.first = now
        return self.levels * sqrt(self.first / now)


def _require_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise UsageError(f"{name}={number!r}: give a number above 0")
