# SPDX-License-Identifier: Apache-2.0
"""The price of a training step in which groups of ranks share fully connected layers. commrt runs no such step.

N ranks form G groups of N/G consecutive ranks. Each group holds a fully connected layer once: every rank has the part
for its share of the outputs. G = N is data parallelism, G = 1 model parallelism. All other layers are data parallel.

Before such a layer, a group gathers the inputs of all its samples. In the backward pass it sums and scatters their
gradients. Where the next layer has other groups, or none follows, each rank gets the outputs of its own samples back.
The gradients of a rank's part are then averaged with the same part of the other groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import sqrt
from typing import NamedTuple

import numpy as np

from commrt.algorithms.catalogue import candidates
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster, seconds
from commrt.pricing.price import Pricing
from commrt.tools.planning.wires import GRADIENT_NBYTES
from commrt.tools.planning.workload import FIRST_NBYTES, FORWARD, Layer, Workload

__all__ = ["BUCKET_NBYTES", "MOST_RANKS", "HybridPricing", "HybridStep", "RunCost", "closed_form_groups"]

BUCKET_NBYTES = 25 << 20
"""Size of a bucket of gradients: the default of `commrt.attach`."""
MOST_RANKS = 1024
"""More would take more than some seconds to price."""
FEW_RANKS = 256
"""Rings are priced up to so many ranks; others send as many bytes in fewer steps."""
SCHEDULES = {
    "all_gather": ("doubling", "ring", "bruck"),
    "reduce_scatter": ("halving", "ring", "bruck"),
    "all_to_all": ("pairwise",),
    "all_reduce": ("halving_doubling", "ring"),
}
"""Schedules that are tried; with powers of two, all send as few bytes as can be."""
ALIKE = 1000
"""Steps that differ by less than computing / ALIKE count as equal: the one with less to exchange is better."""


class RunCost(NamedTuple):
    """What equal layers in a row exchange in a step, all together."""

    layers: tuple[Layer, ...]
    first: int
    """Place of the first one in the model, from 0."""
    groups: int
    activations_nbytes: float
    """Bytes of fp32 that a rank sends in its group; `gradients_nbytes` are those to other groups."""
    gradients_nbytes: float
    activations_s: float
    """Time of exchanges, if nothing else uses the network."""
    gradients_s: float

    def kind(self, ranks: int) -> str:
        """Return data, model, or hybrid."""
        return "data" if self.groups == ranks else "model" if self.groups == 1 else "hybrid"


@dataclass(frozen=True, slots=True)
class HybridStep:
    """The times of one step, in seconds."""

    groups: tuple[int, ...]
    """[layers] number of groups; as many as ranks if a layer is data parallel."""
    compute_s: float
    computed_s: float
    """End of the backward pass, which waited for activations."""
    seconds: float
    exchange_s: float
    """All exchanges together, hidden or not."""

    @property
    def activations_s(self) -> float:
        """Time that computing waits for activations, and for gradients that are exchanged before them."""
        return self.computed_s - self.compute_s

    @property
    def gradients_s(self) -> float:
        """Time that gradients take after the backward pass."""
        return self.seconds - self.computed_s

    @property
    def sort_key(self) -> tuple[int, float]:
        """The better step has the smaller key; see `ALIKE`."""
        return round(ALIKE * self.seconds / self.compute_s), self.exchange_s


def closed_form_groups(ranks: int, batch: int, outputs: int, overlap: float = 0.0) -> float:
    """Return the number of groups for which a fully connected layer needs the fewest bytes, if all are exposed.

    `batch` is the samples per rank. With ``MB = ranks * batch`` a rank sends about ``8 inputs MB / G`` bytes of
    activations and ``4 inputs outputs (2 - overlap) G / ranks`` of gradients (Das et al., 2016, as recalled).
    `overlap` 0 counts what the schedules here send each way; 1 counts half of the gradients' bytes.

    >>> closed_form_groups(ranks=64, batch=4, outputs=4096)
    2.0
    """
    return sqrt(2 * ranks * ranks * batch / ((2 - overlap) * outputs))


class HybridPricing:
    """The prices of steps of `workload` on `ranks` ranks with `batch` samples each, computing for `compute_s` in all.

    Exchanges leave one after the other, in the order they become ready. Computing waits for activations, as the next
    layer needs them. Gradients of layers with the same groups share buckets, and overlap the backward pass. Parts of
    layers are taken as equal, and compute as fast as whole layers. Raises `UsageError` for a workload without fully
    connected layers of known shape, and for more than `MOST_RANKS` ranks.
    """

    def __init__(self, cluster: Cluster, ranks: int, workload: Workload, batch: int, compute_s: float) -> None:
        if not 1 <= ranks <= MOST_RANKS:
            raise UsageError(f"hybrid parallelism of {ranks:,} ranks: give a number from 1 to {MOST_RANKS:,}")
        if ranks > FEW_RANKS and ranks.bit_count() > 1:  # what is left without rings folds ranks, at twice the bytes
            raise UsageError(f"hybrid parallelism of {ranks:,} ranks: above {FEW_RANKS}, give a power of two")
        if batch < 1 or compute_s <= 0:
            raise UsageError(f"a step of {batch} samples that computes for {compute_s:g} s: both must be above 0")
        if not any(layer.inputs for layer in workload.layers):
            raise UsageError(
                f"no fully connected layer of {workload.name} has a known shape: take vgg_a, overfeat_fast, cd_dnn or "
                "resnet50, or a file whose layers have inputs and outputs, as commrt.tools.workload_of finds them"
            )
        self.ranks, self.workload, self.batch, self.compute_s = ranks, workload, batch, compute_s
        self._exchanges = _Exchanges(cluster, ranks)

    def uniform(self, groups: int) -> HybridStep:
        """Return the step in which all fully connected layers have so many groups, but layers of fewer outputs more."""
        return self.step([min(filter(groups.__le__, self.choices(layer))) for layer in self.workload.layers])

    def choices(self, layer: Layer) -> list[int]:
        """Return the numbers of groups that `layer` can have: divisors of the ranks that give each rank an output."""
        if not layer.outputs:
            return [self.ranks]
        sizes = [size for size in range(1, min(self.ranks, layer.outputs) + 1) if self.ranks % size == 0]
        return [self.ranks // size for size in reversed(sizes)]

    def best(self) -> HybridStep:
        """Return the step that takes the least time; see `HybridStep.sort_key`.

        One layer after the other gets its best number of groups, until none changes. The search begins once with each
        uniform choice.
        """
        most = max(self.workload.layers, key=lambda layer: layer.outputs or 0)
        found = (self._improved(self.uniform(groups)) for groups in self.choices(most))
        return min(found, key=lambda step: step.sort_key)

    def _improved(self, step: HybridStep) -> HybridStep:
        while True:
            before = step
            for at, layer in enumerate(self.workload.layers):
                others = [groups for groups in self.choices(layer) if groups != step.groups[at]]
                tried = [self.step([*step.groups[:at], groups, *step.groups[at + 1 :]]) for groups in others]
                step = min([step, *tried], key=lambda each: each.sort_key)
            if step is before:
                return step

    def step(self, groups: Sequence[int]) -> HybridStep:
        """Return the step with `groups` [layers] groups."""
        layers, exchange_s = self.workload.layers, 0.0
        waits_s = [self._activations_s(at, groups) for at in range(len(layers))]
        clock_s = FORWARD * self.compute_s + sum(forward_s for forward_s, _ in waits_s)
        free_s, filled, room = clock_s, 0.0, FIRST_NBYTES
        for at in reversed(range(len(layers))):
            clock_s += (1 - FORWARD) * self.compute_s * layers[at].work / self.workload.work
            if backward_s := waits_s[at][1]:
                clock_s = free_s = max(clock_s, free_s) + backward_s
            filled += self._part_nbytes(layers[at], groups[at])
            if filled >= room or at == 0 or groups[at - 1] != groups[at]:
                bucket_s = self._exchanges.gradients_s(groups[at], filled)
                free_s, filled, room = max(clock_s, free_s) + bucket_s, 0.0, BUCKET_NBYTES
                exchange_s += bucket_s
        exchange_s += sum(map(sum, waits_s))
        return HybridStep(tuple(groups), self.compute_s, clock_s, max(clock_s, free_s), exchange_s)

    def costs(self, step: HybridStep) -> Iterator[RunCost]:
        """Yield what the layers exchange: equal fully connected ones together, and all others between them."""

        def alike(at: int) -> tuple[int, int | None, int | None]:
            return step.groups[at], layers[at].inputs, layers[at].outputs

        layers = self.workload.layers
        for _, run in groupby(range(len(layers)), key=alike):
            places = list(run)
            groups, part = step.groups[places[0]], sum(self._part_nbytes(layers[at], step.groups[at]) for at in places)
            yield RunCost(
                layers=tuple(layers[at] for at in places),
                first=places[0],
                groups=groups,
                activations_nbytes=sum(self._activations_nbytes(at, step.groups) for at in places),
                gradients_nbytes=2 * part * (groups - 1) / groups,
                activations_s=sum(sum(self._activations_s(at, step.groups)) for at in places),
                gradients_s=self._exchanges.gradients_s(groups, part),
            )

    def _part_nbytes(self, layer: Layer, groups: int) -> float:
        """Return the size of the part of a layer that a rank has."""
        return GRADIENT_NBYTES * layer.numel * groups / self.ranks

    def _is_left(self, at: int, groups: Sequence[int]) -> bool:
        """Return True if outputs must return to the ranks whose samples they are of."""
        return at + 1 == len(groups) or groups[at + 1] != groups[at]

    def _activations_nbytes(self, at: int, groups: Sequence[int]) -> float:
        """Return what a rank sends in its group, forward and backward."""
        layer, size = self.workload.layers[at], self.ranks // groups[at]
        gathered = (layer.inputs or 0) * (size - 1)
        returned = (layer.outputs or 0) * (size - 1) / size * self._is_left(at, groups)
        return 2 * GRADIENT_NBYTES * self.batch * (gathered + returned)

    def _activations_s(self, at: int, groups: Sequence[int]) -> tuple[float, float]:
        """Return how long the activations of a layer take in the forward pass, and in the backward pass."""
        layer, number = self.workload.layers[at], groups[at]
        if number == self.ranks:
            return 0.0, 0.0
        sample_nbytes = GRADIENT_NBYTES * self.batch * self.ranks // number
        inputs_nbytes, outputs_nbytes = (sample_nbytes * (width or 0) for width in (layer.inputs, layer.outputs))
        returned_s = self._exchanges.inside_s("all_to_all", number, outputs_nbytes) * self._is_left(at, groups)
        forward_s = self._exchanges.inside_s("all_gather", number, inputs_nbytes)
        return forward_s + returned_s, self._exchanges.inside_s("reduce_scatter", number, inputs_nbytes) + returned_s


class _Exchanges:
    """The prices of exchanges within all groups at once, and between them; each is computed once."""

    def __init__(self, cluster: Cluster, ranks: int) -> None:
        cluster.require_capacity(ranks)
        self._cluster, self._ranks = cluster, ranks
        self._pricings: dict[tuple[str, int], list[Pricing]] = {}
        self._known: dict[tuple[str, int, float], float] = {}

    def inside_s(self, collective: str, groups: int, nbytes: float) -> float:
        """Return how long all groups need for `collective` of a buffer of `nbytes` each."""
        return self._seconds(collective, groups, nbytes)

    def gradients_s(self, groups: int, nbytes: float) -> float:
        """Return how long it takes to pack `nbytes` per rank, to average them between groups, and to unpack them."""
        pack_s = seconds(nbytes, self._cluster.pack_gbytes_per_s) if groups > 1 else 0.0
        return self._seconds("all_reduce", groups, nbytes) + 2 * pack_s

    def _seconds(self, collective: str, groups: int, nbytes: float) -> float:
        key = collective, groups, nbytes
        if key not in self._known:
            if key[:2] not in self._pricings:
                self._pricings[key[:2]] = list(self._candidates(collective, groups))
            prices_s = (pricing.price(nbytes).seconds for pricing in self._pricings[key[:2]])
            self._known[key] = min(prices_s, default=0.0)
        return self._known[key]

    def _candidates(self, collective: str, groups: int) -> Iterator[Pricing]:
        """Yield schedules on all rows of ranks at once: a row is a group, or has one rank of each group."""
        rows = np.arange(self._ranks).reshape(groups, -1)
        rows = rows.T if collective == "all_reduce" else rows
        size = rows.shape[1]
        for name, schedule in candidates(collective, size).items() if size > 1 else ():
            if name in SCHEDULES[collective] and (name != "ring" or size <= FEW_RANKS):
                yield Pricing(schedule.over(rows, self._ranks), self._cluster)
