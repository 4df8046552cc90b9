# SPDX-License-Identifier: Apache-2.0
"""Prices beside figures that others published: optima, simulators and bounds of other projects, as docs/simulate.md."""

import numpy as np
import pytest

from commrt.algorithms.direct import Direct
from commrt.algorithms.ring import Ring, Rings
from commrt.pricing.cluster import Between, Cluster, Link
from commrt.pricing.price import Pricing
from commrt.tools.planning.bounds import all_reduce_bound_s

GB = 1e9
DGX_H100 = Cluster("dgx", "ForestColl's", 8, Link(0.001, 300.0), Between(0.001, 25.0, nics=8))


def price_s(algorithm, cluster, ranks, nbytes):
    return Pricing(algorithm.schedule(0, ranks), cluster).price(nbytes).seconds


@pytest.mark.parametrize(("ranks", "all_gather_gb_per_s"), [(8, 342.857), (16, 346.667), (32, 266.667)])
def test_the_lower_bound_equals_the_optimum_that_forestcoll_finds(ranks, all_gather_gb_per_s):
    """An optimal all-reduce takes twice the all-gather."""
    assert all_reduce_bound_s(DGX_H100, ranks, GB) == pytest.approx(2 / all_gather_gb_per_s, rel=1e-5)


@pytest.mark.parametrize(("ranks", "milliseconds"), [(16, 9.375), (32, 9.6875)])
def test_a_ring_per_card_takes_what_its_bytes_take(ranks, milliseconds):
    assert price_s(Rings(8, 8), DGX_H100, ranks, GB) == pytest.approx(milliseconds / 1e3, rel=1e-4)
    assert price_s(Ring(), DGX_H100, ranks, GB) == pytest.approx(8 * milliseconds / 1e3, rel=1e-4)


MIB = (16, 32, 64, 128, 256, 512)
SIMAI = {
    8: (141.84, 153.68, 160.60, 163.85, 165.72, 166.68),
    32: (33.0956, 38.5722, 42.0496, 44.0361, 45.1014, 45.6536),
}
"""Bus bandwidth in GB/s that SimAI's tutorial prints for a ring of so many ranks."""


@pytest.mark.parametrize("ranks", SIMAI)
def test_a_ring_takes_what_simai_prints_once_two_of_six_figures_are_fitted(ranks):
    nbytes, bus = 2.0**20 * np.array(MIB), 1e9 * np.array(SIMAI[ranks])
    seconds = 2 * (ranks - 1) / ranks * nbytes / bus
    s_per_byte = (seconds[-1] - seconds[0]) / (nbytes[-1] - nbytes[0])
    latency_us = 1e6 * (seconds[0] - s_per_byte * nbytes[0]) / (2 * (ranks - 1))
    link = Link(latency_us, 2 * (ranks - 1) / ranks / s_per_byte / 1e9)
    fitted = Cluster("simai", "", ranks, link, Between(0.0, 1.0))
    found = [price_s(Ring(), fitted, ranks, each) for each in nbytes[1:-1]]
    assert found == pytest.approx(seconds[1:-1].tolist(), rel=0.01)


def test_the_bound_is_not_above_what_te_ccl_reaches():
    """Its all-gather of 1 GB (of output) over two DGX-2 takes 7.75 ms; half of an all-reduce's bound must fit."""
    dgx2 = Cluster("dgx2", "", 16, Link(0.7, 125.0), Between(2.6, 12.5, nics=8, nics_per_rank=1))
    assert all_reduce_bound_s(dgx2, 32, GB) / 2 <= 7.75e-3


def test_on_one_switch_direct_is_not_cheaper_than_a_ring_but_for_latencies():
    """A simulator that lets receivers' ports take any load makes it twice as fast (astra-sim issue 296)."""
    switch = Cluster("switch", "", 8, Link(0.01, 50.0), Between(0.01, 50.0))
    ring_s, direct_s = (price_s(each, switch, 8, 1e8) for each in (Ring(), Direct()))
    assert ring_s - 12 * 0.01e-6 - 1e-12 <= direct_s <= ring_s
