# SPDX-License-Identifier: Apache-2.0
"""Shapes of the gradients of well-known models, computed from their architecture."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Shapes", "resnet50"]

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
"""Parameter name to shape, in order of registration."""


def resnet50(classes: int = 1000) -> Shapes:
    """The parameters of torchvision's ResNet-50: 161 tensors, 25,557,032 elements."""
    shapes = {**_conv("conv1", 3, 64, 7), **_norm("bn1", 64)}
    inputs = 64
    for layer, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            shapes.update(_bottleneck(f"layer{layer}.{block}", inputs, width, shortcut=block == 0))
            inputs = 4 * width
    return {**shapes, "fc.weight": (classes, inputs), "fc.bias": (classes,)}


def _bottleneck(name: str, inputs: int, width: int, *, shortcut: bool) -> Iterator[tuple[str, Shape]]:
    """1 x 1 to `width` channels, 3 x 3, 1 x 1 to four times as many; the first of a layer has a shortcut."""
    convs = ((inputs, width, 1), (width, width, 3), (width, 4 * width, 1))
    for i, (before, after, kernel) in enumerate(convs, start=1):
        yield from _conv(f"{name}.conv{i}", before, after, kernel).items()
        yield from _norm(f"{name}.bn{i}", after).items()
    if shortcut:
        yield from _conv(f"{name}.downsample.0", inputs, 4 * width, 1).items()
        yield from _norm(f"{name}.downsample.1", 4 * width).items()


def _conv(name: str, inputs: int, outputs: int, kernel: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs, kernel, kernel)}


def _norm(name: str, channels: int) -> Shapes:
    return {f"{name}.weight": (channels,), f"{name}.bias": (channels,)}
