# SPDX-License-Identifier: Apache-2.0
"""What a model gives an exchange to do: its gradients, and when in a step they are ready.

Models ship as files, are made of a few sizes, or are read from a file of the user's; only `save`
writes one. Frozen, without torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

from commrt.errors import CommrtError, UsageError
from commrt.files import read_text
from commrt.quantizer import Quantizer
from commrt.tools.planning.wires import GRADIENT_NBYTES, Item, wire_nbytes

MODELS = ("resnet50", "vgg_a", "overfeat_fast", "cd_dnn")
"""Models that ship as files in `FOLDER`.

Of images of 224 x 224 pixels, and 231 x 231 for `overfeat_fast`. `cd_dnn` has seven hidden layers
for speech (Das et al., 2016).
"""
TRANSFORMERS = {
    "bert_large": (1024, 24, 512, 30_522),
    "gpt2": (768, 12, 1024, 50_257),
    "gpt2_xl": (1600, 48, 1024, 50_257),
    "llama2_7b": (4096, 32, 4096, 32_000),
}
"""Width, depth, tokens, vocabulary of known models as GPTs: within 4 % of their parameters."""
FOLDER = resources.files("commrt.tools.planning").joinpath("models")

FORWARD = 1 / 3
"""Part of a step's computing before the first gradient: backward multiplies twice as much."""
FIRST_NBYTES = 1 << 20
"""Size of the first bucket, which is small so that exchanging begins early."""
MOST_NUMEL = 10**15
MOST_WORK = 1e30
"""Limits of a layer: sums and products of a few of them are still finite."""


class Layer(NamedTuple):
    """Parameters whose gradients are ready together."""

    numel: int
    work: float
    """Multiplications, in any unit that all layers share."""
    inputs: int | None = None
    """Of a fully connected layer: activations that go in, per sample. None for other layers."""
    outputs: int | None = None
    """Likewise, activations that come out."""

    def is_possible(self) -> bool:
        """Return whether all numbers are of their kind and in range."""
        shape = [each for each in (self.inputs, self.outputs) if each is not None]
        counts = all(type(each) is int and 0 <= each <= MOST_NUMEL for each in (self.numel, *shape))
        counts &= len(shape) != 1 and 0 not in shape
        return counts and type(self.work) in {int, float} and 0 <= self.work <= MOST_WORK

    def facts(self) -> dict[str, float]:
        """Return what is known, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class ReadyBucket(NamedTuple):
    """One bucket, and when it is ready."""

    nbytes: float
    at: float
    """Part of the step's computing that is done by then, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model's layers, in order of the forward pass. Raises `UsageError` for impossible ones.

    `commrt.tools.workload_of` reads it from a model of yours.
    """

    name: str
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(NAME, self.name):
            raise UsageError(
                f"a workload cannot be called {self.name!r:.120}: give up to 100 letters, digits"
                " and spaces"
            )
        for number, layer in enumerate(self.layers):
            if not layer.is_possible():
                raise UsageError(
                    f"{self.name}: layer {number} is {layer.facts()!s:.200}: give whole numbers up"
                    f" to {MOST_NUMEL:g}, and a work from 0 to {MOST_WORK:g}"
                )
        if self.numel < 1 or self.work <= 0:
            raise UsageError(
                f"{self.name} has {self.numel} parameters to exchange and work {self.work:g}: a"
                " workload needs a layer with parameters and one that multiplies; give both, in"
                " the order of the forward pass"
            )

    @classmethod
    def even(cls, numel: int, parts: int = 1) -> Self:
        """Return `numel` parameters in layers of equal size and work; raises `UsageError`."""
        if numel < 1 or parts < 1:
            raise UsageError(f"{numel} parameters in {parts} parts: give at least one of each")
        parts = min(parts, numel)
        bounds = [numel * part // parts for part in range(parts + 1)]
        return cls(
            f"{numel:,} parameters", tuple(Layer(hi - lo, 1.0) for lo, hi in pairwise(bounds))
        )

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the workload of one of `MODELS` or `TRANSFORMERS`; time goes as multiplications.

        >>> model = Workload.named("resnet50")
        >>> model.numel, round(model.work / 1e9, 2)
        (25557032, 4.09)
        """
        if name in TRANSFORMERS:
            return replace(cls.transformer(*TRANSFORMERS[name]), name=name)
        return cls.parsed(FOLDER.joinpath(f"{name}.json").read_text(encoding="utf-8"), name)

    @classmethod
    def transformer(cls, width: int, depth: int, tokens: int, vocabulary: int = 50_257) -> Self:
        """Return a GPT of `depth` blocks for `tokens`; its embedding is its last layer as well.

        Its work is that of a sequence. Raises `UsageError` for numbers below 1.

        >>> model = Workload.transformer(width=768, depth=12, tokens=1024)
        >>> model.numel
        124439808
        """
        if min(width, depth, tokens, vocabulary) < 1:
            raise UsageError(
                f"a transformer of {width} x {depth} for {tokens} tokens: give numbers from 1 on"
            )
        embedding = Layer((vocabulary + tokens) * width, 0.0)
        attention = Layer(
            4 * width * (width + 1) + 2 * width,
            float(tokens * (4 * width * width + 2 * tokens * width)),
        )
        dense = Layer(8 * width * width + 7 * width, float(tokens * 8 * width * width))
        last = Layer(2 * width, float(tokens * vocabulary * width))
        name = f"transformer:{width}x{depth}x{tokens}"
        return cls(name, (embedding, *(attention, dense) * depth, last))

    @classmethod
    def read(cls, file: str | Path) -> Self:
        """Return the workload in `file`, which `save` wrote; raises `UsageError`."""
        return cls.parsed(read_text(file), str(file))

    @classmethod
    def parsed(cls, text: str, source: str) -> Self:
        """Return the workload in a JSON document `text`; `UsageError` names its `source`."""
        try:
            given = json.loads(text)
            name = given["name"]
            layers = tuple(Layer(**layer) for layer in given["layers"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(
                f"{source:.200} describes no workload ({error!r:.200}): write it with"
                f" Workload.save, or as {FORMAT}"
            ) from error
        return cls(name, layers)

    def text(self) -> str:
        """Return the workload as a JSON document, which `parsed` reads.

        >>> small = Workload("small", (Layer(10, 100.0), Layer(5, 50.0)))
        >>> print(small.text())
        {"name": "small", "layers": [
          {"numel": 10, "work": 100.0},
          {"numel": 5, "work": 50.0}
        ]}
        >>> Workload.parsed(small.text(), "small.json") == small
        True
        """
        layers = ",\n".join(f"  {json.dumps(layer.facts())}" for layer in self.layers)
        return f'{{"name": {json.dumps(self.name)}, "layers": [\n{layers}\n]}}'

    def save(self, file: str | Path) -> None:
        """Write to `file`, for ``commrt plan step --model file.json``; raises `CommrtError`."""
        try:
            Path(file).write_text(self.text() + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CommrtError(
                f"{str(file)!r:.200} could not be written: {error}; give another file"
            ) from error

    @property
    def work(self) -> float:
        """Multiplications of a forward pass, in the unit of the layers."""
        return sum(layer.work for layer in self.layers)

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(layer.numel for layer in self.layers)

    def buckets(self, cap_nbytes: float, itemsize: Item) -> list[ReadyBucket]:
        """Return the buckets of gradients, last layer first, as `commrt.attach` makes them.

        `cap_nbytes` of fp32 gradients fill a bucket, `FIRST_NBYTES` the first one. On the wire each
        gradient takes `itemsize` bytes, or is one of these codes.

        >>> Workload.even(100, parts=4).buckets(cap_nbytes=200, itemsize=2)
        [ReadyBucket(nbytes=100.0, at=0.6666666666666667), ReadyBucket(nbytes=100.0, at=1.0)]
        """
        if cap_nbytes <= 0 or not (isinstance(itemsize, Quantizer) or itemsize >= 1):
            raise UsageError(
                f"buckets of {cap_nbytes:g} bytes, {itemsize} per gradient: both must be above 0"
            )
        total = self.work
        done = 0.0
        filled = 0
        found = list[ReadyBucket]()
        room_nbytes = min(cap_nbytes, FIRST_NBYTES)
        for layer in reversed(self.layers):
            done += layer.work
            filled += layer.numel
            if filled * GRADIENT_NBYTES >= room_nbytes:
                found.append(
                    ReadyBucket(
                        wire_nbytes(filled, itemsize), FORWARD + (1 - FORWARD) * done / total
                    )
                )
                filled = 0
                room_nbytes = cap_nbytes
        return [*found, ReadyBucket(wire_nbytes(filled, itemsize), 1.0)] if filled else found


NAME = r"[\w .,:+/()-]{1,100}"
"""What tables, pictures and messages can show as it is."""
FORMAT = '{"name": "mine", "layers": [{"numel": 1000, "work": 1000.0}]}'
