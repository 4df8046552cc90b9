# SPDX-License-Identifier: Apache-2.0
"""What a model gives an exchange to do: how many gradients there are, and when in a step they are ready."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self

from commrt.errors import UsageError

__all__ = ["FORWARD", "GRADIENT_NBYTES", "Layer", "Ready", "Workload"]

FORWARD = 1 / 3
"""Of a step's computing, before the first gradient is ready: the backward pass multiplies twice as much."""
GRADIENT_NBYTES = 4
FIRST_NBYTES = 1 << 20
"""The first bucket is small, so that exchanging begins early."""


class Layer(NamedTuple):
    """As many parameters, of which the gradients are ready together."""

    numel: int
    work: float
    """What it multiplies, compared with the others."""


class Ready(NamedTuple):
    """One bucket."""

    nbytes: float
    at: float
    """Of a step's computing, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model's layers, in the order in which data go through them."""

    name: str
    layers: tuple[Layer, ...]

    @classmethod
    def even(cls, numel: int, parts: int = 1) -> Self:
        """A model of `numel` parameters in equal parts, of which each computes as long as the others."""
        if numel < 1 or parts < 1:
            raise UsageError(f"{numel} parameters in {parts} parts: give at least one of each")
        parts = min(parts, numel)
        bounds = [numel * part // parts for part in range(parts + 1)]
        return cls(f"{numel:,} parameters", tuple(Layer(hi - lo, 1.0) for lo, hi in pairwise(bounds)))

    @classmethod
    def resnet50(cls) -> Self:
        """ResNet-50 for images of 224 x 224 pixels, whose layers compute as long as they have to multiply.

        >>> model = Workload.resnet50()
        >>> model.numel, round(sum(layer.work for layer in model.layers) / 1e9, 2)
        (25557032, 4.09)
        """
        return cls("resnet50", tuple(_resnet50()))

    @property
    def numel(self) -> int:
        """Parameters."""
        return sum(layer.numel for layer in self.layers)

    def buckets(self, cap_nbytes: float, itemsize: int) -> list[Ready]:
        """Gradients from the last layer to the first, a bucket leaving when it is full or nothing more comes.

        As `commrt.attach` makes them: `cap_nbytes` of fp32 gradients fill one, and `FIRST_NBYTES` the first. What
        travels is `itemsize` bytes for each.

        >>> Workload.even(100, parts=4).buckets(cap_nbytes=200, itemsize=2)
        [Ready(nbytes=100.0, at=0.6666666666666667), Ready(nbytes=100.0, at=1.0)]
        """
        if cap_nbytes <= 0 or itemsize < 1:
            raise UsageError(f"buckets of {cap_nbytes:g} bytes, of numbers of {itemsize}: both must be above 0")
        whole, done, filled = sum(layer.work for layer in self.layers), 0.0, 0
        found, room_nbytes = list[Ready](), min(cap_nbytes, FIRST_NBYTES)
        for layer in reversed(self.layers):
            done += layer.work
            filled += layer.numel
            if filled * GRADIENT_NBYTES >= room_nbytes:
                found.append(Ready(float(filled * itemsize), FORWARD + (1 - FORWARD) * done / whole))
                filled, room_nbytes = 0, cap_nbytes
        return [*found, Ready(float(filled * itemsize), 1.0)] if filled else found


STAGES = ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7))
"""Width, blocks, and the side of what comes out; each block makes it 4 times as wide."""


def _resnet50() -> Iterator[Layer]:
    yield _convolution(3, 64, 7, 112)
    came = 64
    for width, blocks, side in STAGES:
        for block in range(blocks):
            into = side * 2 if block == 0 and width > 64 else side
            yield _convolution(came, width, 1, into)
            yield _convolution(width, width, 3, side)
            yield _convolution(width, 4 * width, 1, side)
            if block == 0:
                yield _convolution(came, 4 * width, 1, side)
            came = 4 * width
    yield Layer(came * 1000 + 1000, came * 1000)


def _convolution(came: int, goes: int, kernel: int, side: int) -> Layer:
    """With the two parameters of each channel of the normalisation that follows."""
    weights = came * goes * kernel * kernel
    return Layer(weights + 2 * goes, float(weights * side * side))
