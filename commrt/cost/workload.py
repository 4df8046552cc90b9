# SPDX-License-Identifier: Apache-2.0
"""What a model gives an exchange to do: how many gradients there are, and when in a step they are ready."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self

from commrt.coding import Coding
from commrt.cost.wires import GRADIENT_NBYTES, Item, wire_nbytes
from commrt.errors import UsageError

__all__ = ["FORWARD", "Layer", "ReadyBucket", "Workload"]

FORWARD = 1 / 3
"""Part of a step's computing before the first gradient is ready: the backward pass multiplies twice as much."""
FIRST_NBYTES = 1 << 20
"""Size of the first bucket, which is small so that exchanging begins early."""


class Layer(NamedTuple):
    """Parameters whose gradients are ready together."""

    numel: int
    work: float
    """Multiplications, in any unit that all layers share."""


class ReadyBucket(NamedTuple):
    """One bucket, and when it is ready."""

    nbytes: float
    at: float
    """Part of the step's computing that is done by then, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model's layers, in the order of the forward pass."""

    name: str
    layers: tuple[Layer, ...]

    @classmethod
    def even(cls, numel: int, parts: int = 1) -> Self:
        """Return a model of `numel` parameters in equal layers that all compute equally long; raises `UsageError`."""
        if numel < 1 or parts < 1:
            raise UsageError(f"{numel} parameters in {parts} parts: give at least one of each")
        parts = min(parts, numel)
        bounds = [numel * part // parts for part in range(parts + 1)]
        return cls(f"{numel:,} parameters", tuple(Layer(hi - lo, 1.0) for lo, hi in pairwise(bounds)))

    @classmethod
    def resnet50(cls) -> Self:
        """Return ResNet-50 for images of 224 x 224 pixels; layers take time in proportion to their multiplications.

        >>> model = Workload.resnet50()
        >>> model.numel, round(sum(layer.work for layer in model.layers) / 1e9, 2)
        (25557032, 4.09)
        """
        return cls("resnet50", tuple(_resnet50()))

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(layer.numel for layer in self.layers)

    def buckets(self, cap_nbytes: float, itemsize: Item) -> list[ReadyBucket]:
        """Return the buckets of the gradients, from the last layer to the first, as `commrt.attach` makes them.

        `cap_nbytes` of fp32 gradients fill a bucket, `FIRST_NBYTES` the first one. On the wire each gradient takes
        `itemsize` bytes, or is one of these codes.

        >>> Workload.even(100, parts=4).buckets(cap_nbytes=200, itemsize=2)
        [ReadyBucket(nbytes=100.0, at=0.6666666666666667), ReadyBucket(nbytes=100.0, at=1.0)]
        """
        if cap_nbytes <= 0 or not (isinstance(itemsize, Coding) or itemsize >= 1):
            raise UsageError(f"buckets of {cap_nbytes:g} bytes, {itemsize} per gradient: both must be above 0")
        total, done, filled = sum(layer.work for layer in self.layers), 0.0, 0
        found, room_nbytes = list[ReadyBucket](), min(cap_nbytes, FIRST_NBYTES)
        for layer in reversed(self.layers):
            done += layer.work
            filled += layer.numel
            if filled * GRADIENT_NBYTES >= room_nbytes:
                found.append(ReadyBucket(wire_nbytes(filled, itemsize), FORWARD + (1 - FORWARD) * done / total))
                filled, room_nbytes = 0, cap_nbytes
        return [*found, ReadyBucket(wire_nbytes(filled, itemsize), 1.0)] if filled else found


STAGES = ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7))
"""Width, blocks and output side of each stage; a block's output has 4 times as many channels."""


def _resnet50() -> Iterator[Layer]:
    yield _convolution(3, 64, 7, 112)
    channels = 64
    for width, blocks, side in STAGES:
        for block in range(blocks):
            yield _convolution(channels, width, 1, side * 2 if block == 0 and width > 64 else side)
            yield _convolution(width, width, 3, side)
            yield _convolution(width, 4 * width, 1, side)
            if block == 0:
                yield _convolution(channels, 4 * width, 1, side)
            channels = 4 * width
    yield Layer(channels * 1000 + 1000, channels * 1000)


def _convolution(inputs: int, outputs: int, kernel: int, side: int) -> Layer:
    """Return a convolution with the batch normalisation that follows, which has two parameters per channel."""
    weights = inputs * outputs * kernel * kernel
    return Layer(weights + 2 * outputs, float(weights * side * side))
