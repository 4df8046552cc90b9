# SPDX-License-Identifier: Apache-2.0
"""Settings of wires of few bits: how values become codes, and how many bits. Needs no torch.

It stands below `kernels`, which turn values into these codes, and `quantization`, which carries
them. Values are quantized in *blocks*: a block has one scale, a bfloat16, and one code per value.
Eight blocks make a *tile*, the smallest part of a buffer that travels: its scales come first, then
its codes. Codes do not add, so they are summed as the values that they stand for.

An `Adaptive` wire has a rule, which looks at how training goes and chooses the bits of a step. It
sees the same numbers on all ranks, so all choose the same bits, and nothing is negotiated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf, isfinite, log2, sqrt
from typing import ClassVar, NamedTuple

from commrt.errors import UsageError

NEAREST = "nearest"
STOCHASTIC = "stochastic"
BITS = range(2, 9)  # of an integer code
TILE_BLOCKS = 8  # their scales fill 16 bytes, so that codes are aligned
SCALE_NBYTES = 2
BLOCKS = (64, 128, 256, 512, 1024)
"""Sizes of a block, in values."""


@dataclass(frozen=True, slots=True)
class Quantizer:
    """What a value becomes on the wire: `Int8`, `Int4`, `Int2` or `Float8`. Raises `UsageError`."""

    bits: int
    block: int = 256
    """Values that share one scale."""
    feedback: bool = False
    """Keep what rounding lost, and add it in the next step."""
    rounding: str = NEAREST
    seed: int = 0
    """The seed of stochastic rounding."""
    is_float: bool = False
    """The codes are floats with 4 bits of exponent and 3 of mantissa (e4m3)."""
    carried_by: ClassVar[str] = "commrt.quantization.carrier"
    """The module that the runtime imports to send such a wire."""

    def __post_init__(self) -> None:
        whole = all(type(each) is int for each in (self.bits, self.block, self.seed))
        if not whole or self.bits not in BITS or self.block not in BLOCKS:
            offered = (
                f"bits from {BITS[0]} to {BITS[-1]} and blocks of {', '.join(map(str, BLOCKS))}"
                " values"
            )
            raise UsageError(
                f"codes of bits={self.bits!r:.40} in blocks of block={self.block!r:.40},"
                f" seed={self.seed!r:.40}: use {offered}, all whole numbers"
            )
        if not isinstance(self.feedback, bool):
            raise UsageError(f"feedback={self.feedback!r:.40}: give True or False")
        if self.rounding not in (NEAREST, STOCHASTIC):
            raise UsageError(f'rounding={self.rounding!r:.40}: use "{NEAREST}" or "{STOCHASTIC}"')
        if self.is_float and (self.bits != 8 or self.rounding != NEAREST):
            raise UsageError("floats on the wire have 8 bits, and are rounded to nearest")
        if self.feedback and self.rounding == STOCHASTIC and self.bits == 2:
            raise UsageError(
                "feedback with stochastic rounding to 2 bits diverges: rounding loses more than"
                " there is (its relative squared error is about 2), so residuals grow from step to"
                ' step; use rounding="nearest"'
            )

    @property
    def traits(self) -> tuple[str, ...]:
        """Return what `commrt.options` calls this wire."""
        return ("quantized wire", "error feedback") if self.feedback else ("quantized wire",)

    @property
    def most(self) -> int:
        """Return the largest code of an integer; codes are symmetric."""
        return (1 << (self.bits - 1)) - 1

    @property
    def largest(self) -> float:
        """Return what the largest value of a block is on the scale of its codes."""
        return 448.0 if self.is_float else float(self.most)

    @property
    def tile_numel(self) -> int:
        """Return the number of values of a tile."""
        return TILE_BLOCKS * self.block

    @property
    def tile_nbytes(self) -> int:
        """Return the bytes of a tile.

        >>> Int8().tile_nbytes, Int4().tile_nbytes
        (2064, 1040)
        """
        return TILE_BLOCKS * (SCALE_NBYTES + self.block * self.bits // 8)

    @property
    def planes(self) -> tuple[int, ...]:
        """Return the widths in bits that a code is cut into, lowest bits last; each divides 8.

        >>> [Quantizer(bits).planes for bits in (8, 4, 3, 7)]
        [(8,), (4,), (2, 1), (4, 2, 1)]
        """
        return tuple(width for width in (8, 4, 2, 1) if self.bits & width)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of `numel` values, in whole tiles.

        >>> Int8().nbytes(1), Int4().nbytes(1_000_000) / 4_000_000
        (2064, 0.12714)
        """
        return -(-numel // self.tile_numel) * self.tile_nbytes

    def __str__(self) -> str:
        """Name it as in reports.

        >>> str(Int4(feedback=True)), str(Int8(rounding="stochastic")), str(Float8())
        ('int4 + feedback', 'int8 stochastic', 'float8')
        """
        kind = f"{'float' if self.is_float else 'int'}{self.bits}"
        rounded = f" {STOCHASTIC}" if self.rounding == STOCHASTIC else ""
        return f"{kind}{rounded}{' + feedback' if self.feedback else ''}"


def Int8(  # noqa: N802
    block: int = 256, *, feedback: bool = False, rounding: str = NEAREST, seed: int = 0
) -> Quantizer:  # a kind of wire, written like a type
    """Return a wire of 8-bit integers: 3.97 times fewer bytes than fp32."""
    return Quantizer(8, block, feedback, rounding, seed)


def Int4(  # noqa: N802
    block: int = 256, *, feedback: bool = True, rounding: str = NEAREST, seed: int = 0
) -> Quantizer:
    """Return a wire of 4-bit integers: 7.88 times fewer bytes than fp32."""
    return Quantizer(4, block, feedback, rounding, seed)


def Int2(  # noqa: N802
    block: int = 256, *, feedback: bool = True, rounding: str = NEAREST, seed: int = 0
) -> Quantizer:
    """Return a wire of 2-bit integers, -1, 0 and 1: 15.5 times fewer bytes than fp32.

    Without feedback it costs accuracy.
    """
    return Quantizer(2, block, feedback, rounding, seed)


def Float8(block: int = 256, *, feedback: bool = False) -> Quantizer:  # noqa: N802
    """Return a wire of 8-bit floats (e4m3): small values keep more digits than in `Int8`."""
    return Quantizer(8, block, feedback, is_float=True)


class Progress(NamedTuple):
    """What a rule may look at; equal on all ranks."""

    step: int
    """The training step that needs bits."""
    norm: float
    """The norm of the averaged gradient of the step before."""


Rule = Callable[[Progress], float]
"""Returns how many steps of rounding there should be between 0 and the largest value, 1 or more."""


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

    `loss` returns the latest loss, and must return the same on all ranks: average it with
    ``world.all_reduce``. `first` is F_0, by default the first loss that `loss` returns. A
    checkpoint does not hold it: save it yourself, and pass it when you resume.
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
