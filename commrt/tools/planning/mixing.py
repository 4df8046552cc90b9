# SPDX-License-Identifier: Apache-2.0
"""How well gossip mixes: what each rank holds after a period, and when all have met each other.

Replays schedules as `proof` does; nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commrt.algorithm import Algorithm
from commrt.errors import UsageError
from commrt.proof.symbols import Weights, select
from commrt.schedule import Schedule

Shares = NDArray[np.float64]
"""[ranks, chunks, origins]: how much of each origin's chunk a rank holds."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """How far a matrix of shares is from the mean; the worst over all chunks."""

    second_singular_value: float
    """Part of the differences between ranks that is left: 0 if all hold the mean."""
    smallest: float
    """Smallest share times ranks: 1 is the mean, 0: some rank has nothing from some other."""
    largest: float
    """Largest share times ranks."""


def mixing(schedules: Iterable[Schedule], total: int = 1) -> Mixing:
    """Return what `schedules`, one after the other, make of all values; each is divided by `total`.

    >>> from commrt.algorithms.gossip import dissemination
    >>> mixing([dissemination(4, 0), dissemination(4, 1)])
    Mixing(second_singular_value=0.0, smallest=1.0, largest=1.0)
    """
    matrix: Shares | None = None
    for schedule in schedules:
        shares = _shares(schedule) / total
        matrix = shares if matrix is None else np.einsum("rco,oci->rci", shares, matrix)
    if matrix is None:
        raise UsageError("mixing() of no schedules: give at least one")
    ranks = len(matrix)
    singular = np.linalg.svd(matrix.transpose(1, 0, 2), compute_uv=False)
    second = float(singular[:, 1].max()) if ranks > 1 else 0.0
    return Mixing(round(second, 12), float(matrix.min()) * ranks, float(matrix.max()) * ranks)


def steps_to_meet_all(algorithm: Algorithm, ranks: int, most: int) -> int | None:
    """Return the steps until all ranks have received from all directly; None if more than `most`.

    If chunks go to different ranks, receiving one of them counts.
    """
    met = np.eye(ranks, dtype=bool)
    for step in range(most + 1):
        if met.all():
            return step
        for hop in algorithm.schedule(step, ranks).checked_steps():
            met[hop.dst, hop.src] = True
    return None


def _shares(schedule: Schedule) -> Shares:
    chunks = schedule.chunks
    state = Weights(np.ones((schedule.ranks, chunks), dtype=bool))
    for step in schedule.checked_steps():
        state.apply(select(step, 0, chunks))
    return state.by_rank
