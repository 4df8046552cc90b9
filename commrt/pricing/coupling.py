# SPDX-License-Identifier: Apache-2.0
"""How ranks that do not take equally long hold each other up.

In an exchange of all, everybody waits for the slowest. In gossip a rank waits for one other, which waited for one other
the step before: delays spread slowly, and mostly pass before they meet.
"""

from __future__ import annotations

import numpy as np

from commrt.algorithms.gossip import Gossip
from commrt.errors import UsageError
from commrt.pricing.stragglers import Times
from commrt.schedule import IntArray

__all__ = ["barrier_efficiency", "gossip_efficiency"]


def barrier_efficiency(times_s: Times) -> float:
    """Mean time of computing over that of a step, if all wait for all, at no other cost; `times_s` [steps, ranks].

    >>> barrier_efficiency(np.array([[1.0, 3.0], [3.0, 1.0]]))
    0.6666666666666666
    """
    return float(times_s.mean() / times_s.max(axis=1).mean())


def gossip_efficiency(times_s: Times, algorithm: Gossip, message_s: float = 0.0) -> float:
    """Likewise, if each waits for the message of its partner: of this step, or of as many before as it is stale.

    A message leaves when a step is done, and takes `message_s`.
    """
    steps, ranks = times_s.shape
    if algorithm.within > 1:
        raise UsageError(f"{algorithm} exchanges in groups too: take one without `within`")
    late = algorithm.staleness
    clock_s = np.zeros(ranks)
    sent_s = [clock_s] * late  # when each had finished the steps whose messages are still under way
    for step in range(steps):
        done_s = clock_s + times_s[step]
        sent_s.append(done_s)
        sources = _sources(algorithm, max(step - late, 0), ranks)
        clock_s = np.maximum(done_s, sent_s.pop(0)[sources] + np.where(sources == np.arange(ranks), 0.0, message_s))
    return float(times_s.mean() * steps / clock_s.mean())


def _sources(algorithm: Gossip, step: int, ranks: int) -> IntArray:
    """[ranks]: whose message each one gets; its own if nobody's."""
    found = np.arange(ranks)
    for moved in algorithm.schedule(step, ranks).played():
        found[moved.dst] = moved.src
    return found
