# SPDX-License-Identifier: Apache-2.0
"""Shapes of the gradients of well-known models, computed from their architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
"""Parameter name to shape, in order of registration."""


def resnet50(classes: int = 1000) -> Shapes:
    """Return the parameters of torchvision's ResNet-50: 161 tensors, 25,557,032 elements."""
    shapes = {**_conv("conv1", 3, 64, 7), **_norm("bn1", 64)}
    inputs = 64
    for layer, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            shapes.update(_bottleneck(f"layer{layer}.{block}", inputs, width, shortcut=block == 0))
            inputs = 4 * width
    return {**shapes, "fc.weight": (classes, inputs), "fc.bias": (classes,)}


def _bottleneck(name: str, inputs: int, width: int, *, shortcut: bool) -> Iterator[tuple[str, Shape]]:
    """Return a block: 1 x 1 to `width` channels, 3 x 3, 1 x 1 to four times as many, perhaps a shortcut."""
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


def vgg(*convolutions: int, classes: int = 1000) -> Shapes:
    """Return the parameters of a VGG, given the convolutions of its five stages; 16 is `vgg(2, 2, 3, 3, 3)`."""
    shapes: Shapes = {}
    inputs = 3
    for stage, (count, width) in enumerate(zip(convolutions, (64, 128, 256, 512, 512), strict=True)):
        for number in range(count):
            shapes |= _linear(f"stage{stage}.conv{number}", inputs, width, 3, 3)
            inputs = width
    for number, (before, after) in enumerate(((512 * 7 * 7, 4096), (4096, 4096), (4096, classes))):
        shapes |= _linear(f"fc{number}", before, after)
    return shapes


INCEPTIONS = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}
"""Inputs; 1 x 1; 3 x 3 reduced and full; second 3 x 3 reduced and full; after the pool."""


def googlenet(classes: int = 1000) -> Shapes:
    """Return the parameters of torchvision's GoogLeNet."""
    shapes: Shapes = {}
    for name, inputs, outputs, kernel in (("conv1", 3, 64, 7), ("conv2", 64, 64, 1), ("conv3", 64, 192, 3)):
        shapes |= _conv(name, inputs, outputs, kernel) | _norm(f"{name}.bn", outputs)
    for name, widths in INCEPTIONS.items():
        shapes |= _inception(f"inception{name}", widths)
    return shapes | _linear("fc", 1024, classes)


def _inception(name: str, widths: tuple[int, ...]) -> Shapes:
    inputs, one, reduced, full, reduced2, full2, pooled = widths
    convs = (inputs, one, 1), (inputs, reduced, 1), (reduced, full, 3), (inputs, reduced2, 1), (reduced2, full2, 3)
    shapes: Shapes = {}
    for number, (before, after, kernel) in enumerate((*convs, (inputs, pooled, 1))):
        shapes |= _conv(f"{name}.{number}", before, after, kernel) | _norm(f"{name}.{number}.bn", after)
    return shapes


def bert_large() -> Shapes:
    """Return the parameters of BERT-large: encoder, pooler, and the heads of pre-training."""
    width, vocabulary = 1024, 30522
    shapes: Shapes = {"word": (vocabulary, width), "position": (512, width), "segment": (2, width)}
    shapes |= _norm("embedding.norm", width)
    for layer in (f"layer{number}" for number in range(24)):
        for name, before, after in (("q", 1, 1), ("k", 1, 1), ("v", 1, 1), ("out", 1, 1), ("up", 1, 4), ("down", 4, 1)):
            shapes |= _linear(f"{layer}.{name}", before * width, after * width)
        shapes |= _norm(f"{layer}.norm1", width) | _norm(f"{layer}.norm2", width)
    shapes |= _linear("pooler", width, width)
    shapes |= {"words.bias": (vocabulary,)} | _linear("transform", width, width) | _norm("transform.norm", width)
    return shapes | _linear("next", width, 2)


def gpt2(layers: int, width: int) -> Shapes:
    """Return the parameters of GPT-2: 12 layers of 768 are 124M, 48 of 1600 are 1.5B."""
    shapes: Shapes = {"wte": (50257, width), "wpe": (1024, width)}
    for layer in (f"layer{number}" for number in range(layers)):
        for name, before, after in (("attn", 1, 3), ("attn.out", 1, 1), ("up", 1, 4), ("down", 4, 1)):
            shapes |= _linear(f"{layer}.{name}", before * width, after * width)
        shapes |= _norm(f"{layer}.norm1", width) | _norm(f"{layer}.norm2", width)
    return shapes | _norm("norm", width)


def llama3_8b_layer() -> Shapes:
    """Return the parameters of a layer of Llama-3-8B."""
    width, keys, inner = 4096, 1024, 14336
    rows = {"q": width, "k": keys, "v": keys, "o": width, "gate": inner, "up": inner}
    shapes: Shapes = {name: (count, width) for name, count in rows.items()}
    return shapes | {"down": (width, inner), "norm1": (width,), "norm2": (width,)}


def _linear(name: str, inputs: int, outputs: int, *kernel: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs, *kernel), f"{name}.bias": (outputs,)}


SETS: dict[str, Callable[[], Shapes]] = {
    "ResNet-50": resnet50,
    "GoogLeNet": googlenet,
    "VGG-16": partial(vgg, 2, 2, 3, 3, 3),
    "VGG-19": partial(vgg, 2, 2, 4, 4, 4),
    "BERT-large": bert_large,
    "GPT-2 124M": partial(gpt2, 12, 768),
    "GPT-2 1.5B": partial(gpt2, 48, 1600),
    "Llama-3-8B layer": llama3_8b_layer,
    "10,000 tensors of 64": lambda: {str(number): (64,) for number in range(10_000)},
}
"""Functions that return the shapes, by name."""
