# SPDX-License-Identifier: Apache-2.0
"""Measure how far apart gossip leaves ranks under random noise: ``python studies/gossip/gossip_noise.py``.

Each step adds independent noise to every rank, then mixes messages, as late as they are. Partners are those of the real
schedules. Late messages with too large a weight oscillate, or grow without end.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from commrt import Gossip

__all__ = ["CASES", "RANKS", "distance"]

RANKS = (2, 8, 32, 64)
CASES = ((0, 0.5), (1, 0.5), (1, 0.375), (1, 0.25), (1, 0.125), (2, 0.375), (2, 0.25), (2, 0.125))
"""How many steps messages are late, and their weight."""
STEPS, MEASURED, NOISE = 600, 200, 0.01


@cache
def sources(step: int, ranks: int) -> NDArray[np.int64]:
    """Return, for each rank, the rank it receives from."""
    source = np.arange(ranks)
    for hop in Gossip().schedule(step, ranks).steps():
        source[hop.dst] = hop.src
    return source


def distance(ranks: int, late: int, weight: float, dimensions: int = 400, seed: int = 0) -> float:
    """Return the root mean square distance from the mean of all ranks, over the last steps."""
    rng, values = np.random.default_rng(seed), np.zeros((ranks, dimensions))
    in_flight: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
    found = []
    for step in range(STEPS):
        values += NOISE * rng.standard_normal(values.shape)
        in_flight.append((sources(step, ranks), values.copy()))
        if len(in_flight) > late:
            source, sent = in_flight.pop(0)
            values += weight * (sent[source] - sent)
        if step >= STEPS - MEASURED:
            found.append(float(np.sqrt(np.mean((values - values.mean(0)) ** 2))))
    return float(np.mean(found))


def main() -> None:
    """Run the command."""
    print("ranks", *(f"late {late}, {weight:g}" for late, weight in CASES), sep="\t")
    for ranks in RANKS:
        print(ranks, *(f"{distance(ranks, late, weight):.4f}" for late, weight in CASES), sep="\t")


if __name__ == "__main__":
    main()
