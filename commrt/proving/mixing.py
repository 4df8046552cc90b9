# SPDX-License-Identifier: Apache-2.0
"""How well gossip mixes: what a rank holds after a period, as shares of what all ranks held before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from commrt.algorithms.gossip import Gossip
from commrt.collective import Collective, doubly_stochastic
from commrt.schedule import ADD, COPY, MIX, Algorithm, Schedule, Step

__all__ = ["Mixing", "meetings", "mixing", "promise"]

Shares = NDArray[np.float64]
"""[ranks, chunks, origins]: how much of each origin's chunk a rank holds."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """Of the matrix of shares, the worst over all chunks."""

    second_singular_value: float
    """How much of the differences between ranks is left: 0 if all hold the mean."""
    smallest: float
    """Share times ranks: 1 is the mean, 0 that two ranks have not heard of each other."""
    largest: float
    """Likewise."""


def promise(algorithm: Gossip, schedule: Schedule) -> Collective:
    """What each step of gossip must keep: the mean over all ranks."""
    return doubly_stochastic(schedule.ranks, schedule.chunks, algorithm.within)


def mixing(schedules: Iterable[Schedule], total: int = 1) -> Mixing:
    """What `schedules`, one after the other, make of all ranks' values; each divided by `total`.

    >>> from commrt.algorithms.gossip import dissemination
    >>> mixing([dissemination(4, 0), dissemination(4, 1)])
    Mixing(second_singular_value=0.0, smallest=1.0, largest=1.0)
    """
    matrix: Shares | None = None
    for schedule in schedules:
        shares = _shares(schedule) / total
        matrix = shares if matrix is None else np.einsum("rco,oci->rci", shares, matrix)
    if matrix is None:
        raise ValueError("no schedule, no mixing")
    ranks = len(matrix)
    singular = np.linalg.svd(matrix.transpose(1, 0, 2), compute_uv=False)
    second = float(singular[:, 1].max()) if ranks > 1 else 0.0
    return Mixing(round(second, 12), float(matrix.min()) * ranks, float(matrix.max()) * ranks)


def meetings(algorithm: Algorithm, ranks: int, most: int) -> int | None:
    """Steps until every rank has received from every other directly; None if that takes more than `most`.

    Where chunks go separate ways, receiving one of them counts.
    """
    met = np.eye(ranks, dtype=bool)
    for step in count():
        if met.all():
            return step
        if step == most:
            return None
        for hop in algorithm.schedule(step, ranks).played():
            met[hop.dst, hop.src] = True
    raise AssertionError("counting ends")


def _shares(schedule: Schedule) -> Shares:
    ranks, chunks = schedule.ranks, schedule.chunks
    shares = np.repeat(np.eye(ranks)[:, None, :], chunks, axis=1)
    for step in schedule.played():
        _apply(step, shares)
    return shares


def _apply(step: Step, shares: Shares) -> None:
    before = shares.copy()
    for src, dst, lo, hi, combine, weight in zip(*(column.tolist() for column in step.columns), strict=True):
        received, own = before[src, lo:hi], shares[dst, lo:hi]
        if combine == COPY:
            own[:] = received
        elif combine == ADD:
            own += received
        elif combine == MIX:
            own += weight * (received - own)
