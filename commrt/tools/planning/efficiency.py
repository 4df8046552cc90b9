# SPDX-License-Identifier: Apache-2.0
"""The share of its full speed at which a rank computes, by the samples that it has in a step.

A pure function of a described cluster.
"""

from __future__ import annotations

from math import log2

import numpy as np

from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster


def efficiency_at(cluster: Cluster, samples: int) -> float:
    """Return the share of full speed that kernels reach with so many samples per rank in a step.

    Between two entries of `kernel_efficiency` it is linear in log2 of the samples; beyond the ends,
    constant.

    >>> from commrt.pricing.cluster import Between, Link
    >>> efficiency = {4: 0.8, 64: 1.0}
    >>> cpus = Cluster("cpus", "", 1, Link(1, 1), Between(1, 1), kernel_efficiency=efficiency)
    >>> [round(efficiency_at(cpus, samples), 3) for samples in (1, 4, 8, 16, 32, 64, 10**9)]
    [0.8, 0.8, 0.85, 0.9, 0.95, 1.0, 1.0]
    """
    if samples < 1:
        raise UsageError(f"{samples} samples per rank: give at least 1")
    known = cluster.kernel_efficiency
    return (
        float(np.interp(log2(samples), [log2(each) for each in known], [*known.values()]))
        if known
        else 1.0
    )
