# SPDX-License-Identifier: Apache-2.0
"""The phases of a priced schedule, to be drawn: steps in a row that move the same amounts.

Pure functions of a pricing; `pictures` draws them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commrt.tools.planning.wires import WirePricing


class Phase(NamedTuple):
    """Consecutive steps of a schedule in which the same ranks send each other the same amounts."""

    steps: int
    adds: bool
    """True if what is received is added or mixed, False if it is copied."""
    begin_s: float
    end_s: float
    """Time at which the last rank has finished."""


def phases(pricing: WirePricing, nbytes: float) -> list[Phase]:
    """Return the phases of the schedule, for ranks that begin together."""
    begin_s = pricing.code_s(nbytes)
    chunk_nbytes = pricing.moved_nbytes(nbytes) / pricing.schedule.chunks
    found = list[Phase]()
    clock_s = np.full(pricing.schedule.ranks, begin_s)
    for pattern, times in pricing.runs:
        clock_s = pattern.play(clock_s, chunk_nbytes, times)
        found.append(Phase(times, pattern.adds, begin_s, float(clock_s.max())))
        begin_s = found[-1].end_s
    return found
