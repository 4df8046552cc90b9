# SPDX-License-Identifier: Apache-2.0
"""The format of wires of few bits: what codes a value becomes, and how they lie in memory.

Frozen data without torch or state, so any thread may use it. It stands below `kernels`, which turn
values into these codes, and `quantization`, which carries them. The names of all wires stand at the
end.

Values are quantized in *blocks*: a block has one code per value and one scale, a bfloat16 by which
its codes are multiplied. Eight blocks make a *tile*, the smallest part of a buffer that travels:
its scales come first, then its codes. Codes do not add, so they are summed as the values that they
stand for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
        for name, flag in {"feedback": self.feedback, "is_float": self.is_float}.items():
            if not isinstance(flag, bool):
                raise UsageError(f"{name}={flag!r:.40}: give True or False")
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


QUANTIZERS = {"int8": Int8(), "int4": Int4(), "int2": Int2(), "float8": Float8()}
"""By their names on the command line and in ``wire=``: those of functions, in small letters."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The other wires by name: dtypes of torch that may travel in place of wider ones."""
WIRE_NAMES = (*DTYPES, *QUANTIZERS)


def require_wire(wire: object) -> None:
    """Raise `UsageError` unless `wire` is quantized, a dtype that travels, a name, or None."""
    is_object = isinstance(getattr(wire, "carried_by", None), str) and not isinstance(wire, type)
    if wire is None or is_object:
        return
    if isinstance(wire, str):
        if wire.lower() not in {*WIRE_NAMES, *DTYPES.values()}:
            raise UsageError(
                f"no wire is called {wire!r:.80}: choose one of {', '.join(WIRE_NAMES)}"
            )
        return
    offered = [f"torch.{dtype}" for dtype in DTYPES.values()]
    if str(wire) not in offered:
        raise UsageError(
            f"wire={wire!s:.80} cannot travel: use {', '.join(offered)}, a quantizer such as"
            " commrt.Int8(), or None for each dtype as it is"
        )
