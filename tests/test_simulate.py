# SPDX-License-Identifier: Apache-2.0
"""The price of a schedule, against closed forms, published models, and itself."""

from itertools import pairwise
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commrt.algorithms.catalogue import ALGORITHMS, by_name
from commrt.algorithms.direct import Direct
from commrt.algorithms.gossip import Gossip
from commrt.algorithms.ring import Ring, Rings
from commrt.algorithms.torus import Torus2D
from commrt.errors import UsageError
from commrt.pricing.cluster import Between, Cluster, Link, Racks
from commrt.pricing.price import Pricing
from commrt.schedule import ADD, COPY, Schedule, Step
from commrt.tools.planning.bounds import all_reduce_bound_s, exchange_bound_s
from commrt.tools.planning.computing_times import Jitter
from commrt.tools.planning.timeline import blocking_step, gossip_efficiency, mean_efficiency, overlapped_step
from commrt.tools.planning.wires import WirePricing
from commrt.tools.planning.workload import FORWARD, GRADIENT_NBYTES, ReadyBucket, Workload

RESNET50_FP16 = 51.1e6
ABCI = Cluster.named("abci")


def one_each(latency_us, gbytes_per_s, **more):
    """Every rank is a host, and all have the same way to each other."""
    return Cluster("flat", "", 1, Link(latency_us, gbytes_per_s), Between(latency_us, gbytes_per_s), **more)


def seconds(algorithm, ranks, cluster, nbytes, **more):
    return Pricing(algorithm.schedule(0, ranks), cluster).price(nbytes, **more).seconds


def barrier_efficiency(times_s):
    """Of steps in which all wait for all, at no other cost."""
    return float(times_s.mean() / times_s.max(axis=1).mean())


def ring_s(ranks, nbytes, latency_s, bytes_per_s):
    return 2 * (ranks - 1) * (latency_s + nbytes / ranks / bytes_per_s)


STARTS = st.floats(0, 0.01).map(lambda s: [s] * 12) | st.lists(st.floats(0, 0.01), min_size=12, max_size=12)


@given(name=st.sampled_from([*ALGORITHMS]), starts_s=STARTS, per_node=st.integers(1, 5))
def test_steps_that_are_alike_take_as_long_as_one_by_one(name, starts_s, per_node):
    cluster = Cluster("c", "", per_node, Link(1.0, 10.0), Between(7.0, 1.0), reduce_gbytes_per_s=5.0)
    pricing = Pricing(by_name(name).schedule(0, 12), cluster)
    clock_s = np.array(starts_s)
    for pattern, times in pricing.runs:
        for _ in range(times):
            clock_s = pattern._step(clock_s, 1e6 / pricing.schedule.chunks)
    assert pricing.price(1e6, starts_s).finish_s == pytest.approx(clock_s, rel=1e-9)


TABLE = [
    (4, 4, 5.1, 7.8),
    (8, 8, 6.3, 7.0),
    (16, 16, 10.2, 6.6),
    (32, 32, 25.6, 6.8),
    (32, 34, 26.9, 6.9),
    (32, 64, 46.1, 7.5),
    (64, 64, 87.0, 7.9),
]
"""Grid, and the milliseconds that a model of ABCI expects of a ring and of the torus."""


def test_on_abci_the_torus_takes_what_the_closed_form_says():
    for x, y, ring_ms, torus_ms in TABLE:
        found = Pricing(Torus2D((x, y)).schedule(0, x * y), ABCI).price(RESNET50_FP16)
        assert (x, y, found.steps) == (x, y, 2 * (x - 1) + 2 * (y - 1))
        columns_s = 2 * (y - 1) * (10e-6 + RESNET50_FP16 / (x * y) / 5e9)
        assert found.seconds == pytest.approx(ring_s(x, RESNET50_FP16, 10e-6, 20e9) + columns_s, rel=1e-9)
        assert (x, y, round(1e3 * found.seconds, 1)) == (x, y, torus_ms)
        found_s = seconds(Ring(), x * y, ABCI, RESNET50_FP16)
        assert found_s == pytest.approx(ring_s(x * y, RESNET50_FP16, 10e-6, 20e9), rel=1e-9)
        assert 1e3 * found_s == pytest.approx(ring_ms, rel=0.005)
        assert found_s / found.seconds == pytest.approx(ring_ms / torus_ms, rel=0.05)


@given(
    name=st.sampled_from([*ALGORITHMS, "gossip"]),
    ranks=st.integers(2, 24),
    gpus=st.integers(1, 5),
    nics=st.integers(1, 3),
    racks=st.none() | st.builds(Racks, st.integers(1, 3), st.floats(1, 4)),
    nbytes=st.floats(0, 1e9),
)
def test_nothing_is_faster_than_the_lower_bound(name, ranks, gpus, nics, racks, nbytes):
    cluster = Cluster("any", "", gpus, Link(3, 50), Between(10, 5, nics, nics), racks=racks)
    bound_s = (exchange_bound_s if name == "gossip" else all_reduce_bound_s)(cluster, ranks, nbytes)
    assert seconds(by_name(name), ranks, cluster, nbytes) >= bound_s * (1 - 1e-9)


def moved(*pairs, combine=COPY):
    src, dst = zip(*pairs, strict=True)
    return Schedule("moved", 8, 1, lambda: iter([Step.of(src, dst, 0, 1, combine)]))


HOSTS_OF_FOUR = Cluster("small", "", 4, Link(1, 100), Between(10, 10, nics=2, nics_per_rank=1))
RACKS_OF_FOUR = Cluster("racks", "", 1, Link(0, 100), Between(0, 10), racks=Racks(4, oversubscription=2.0))
ADDING = one_each(0, 10, reduce_gbytes_per_s=100)
WAYS = {
    "inside a node": (HOSTS_OF_FOUR, moved((0, 1)), 1e-6 + 0.01),
    "one rank uses one of two cards": (HOSTS_OF_FOUR, moved((0, 4)), 10e-6 + 0.1),
    "two ranks use both": (HOSTS_OF_FOUR, moved((0, 4), (1, 5)), 10e-6 + 0.1),
    "four ranks share two cards": (HOSTS_OF_FOUR, moved((0, 4), (1, 5), (2, 6), (3, 7)), 10e-6 + 0.2),
    "both directions at once": (HOSTS_OF_FOUR, moved((0, 4), (4, 0)), 10e-6 + 0.1),
    "one rank sends twice": (HOSTS_OF_FOUR, moved((0, 4), (0, 5)), 10e-6 + 0.2),
    "one rank receives twice": (HOSTS_OF_FOUR, moved((0, 4), (1, 4)), 10e-6 + 0.2),
    "to itself": (HOSTS_OF_FOUR, moved((3, 3)), 0.0),
    "one node of a rack": (RACKS_OF_FOUR, moved((0, 4)), 0.1),
    "all nodes of a rack": (RACKS_OF_FOUR, moved((0, 4), (1, 5), (2, 6), (3, 7)), 0.2),
    "inside a rack": (RACKS_OF_FOUR, moved((0, 1), (1, 0), (2, 3), (3, 2)), 0.1),
    "what is copied": (ADDING, moved((0, 1)), 0.1),
    "what is added": (ADDING, moved((0, 1), combine=ADD), 0.11),
    "what is added from two ranks": (ADDING, moved((1, 0), (2, 0), combine=ADD), 0.2 + 0.02),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_shares_a_way_waits_for_each_other_and_adding_up_takes_its_time(way):
    cluster, schedule, expected_s = WAYS[way]
    assert Pricing(schedule, cluster).price(1e9).seconds == pytest.approx(expected_s)


def test_a_rank_that_begins_late_holds_up_only_those_that_need_it():
    two_pairs = moved((0, 1), (2, 3))
    finish_s = Pricing(two_pairs, one_each(0, 10)).price(1e9, start_s=[0, 0.5, 0, 0, 0, 0, 0, 0]).finish_s
    assert finish_s.tolist() == pytest.approx([0.6, 0.6, 0.1, 0.1, 0, 0, 0, 0])


def test_a_cluster_has_no_more_ranks_than_gpus():
    with pytest.raises(UsageError, match="abci has 4352 GPUs, 4 on each of 1088 nodes, and not 5000"):
        Pricing(Ring().schedule(0, 5000), ABCI)


OVERLAP = {
    12.5: {4: (92.8, 99.7, 99.7), 32: (90.7, 99.2, 99.5), 128: (89.5, 98.0, 99.5)},
    3.125: {4: (76.5, 98.8, 98.8), 32: (71.4, 98.1, 98.4), 128: (70.3, 86.0, 98.3)},
    1.25: {4: (56.6, 88.0, 88.3), 32: (50.2, 69.1, 73.2), 128: (49.3, 56.5, 71.6)},
}
"""GB/s, ranks: efficiency in % of a ring after the backward pass, of one under it, of halving-doubling under it."""
GOSSIP = {12.5: 99.8, 3.125: 99.2, 1.25: 98.0}


@pytest.mark.parametrize(("gbytes_per_s", "ranks"), [(speed, ranks) for speed in OVERLAP for ranks in OVERLAP[speed]])
def test_efficiency_on_fast_and_slow_links_is_what_a_model_of_gossip_expects(gbytes_per_s, ranks):
    cluster, compute_s, nbytes = one_each(10, gbytes_per_s), 0.16, 102.2e6
    buckets = [ReadyBucket(nbytes / 25, FORWARD + (1 - FORWARD) * (number + 1) / 25) for number in range(25)]
    ring, halving, gossip = (
        WirePricing(by_name(name).schedule(0, ranks), cluster) for name in ("ring", "halving_doubling", "gossip")
    )
    steps = [blocking_step(ring, nbytes, compute_s)]
    steps += [overlapped_step(pricing, buckets, compute_s) for pricing in (ring, halving, gossip)]
    expected = (*OVERLAP[gbytes_per_s][ranks], GOSSIP[gbytes_per_s])
    assert [100 * step.efficiency for step in steps] == pytest.approx(expected, abs=1.0)


JITTER = [
    (Jitter(variation=0.05), {4: (95.1, 96.4, 99.8), 32: (90.3, 95.3, 99.6), 128: (87.9, 94.9, 99.4)}),
    (Jitter(variation=0.1), {4: (90.5, 93.0, 99.3), 32: (81.7, 90.7, 98.4), 128: (77.6, 90.1, 98.1)}),
]
"""Ranks: efficiency in % if all wait for all, for a partner's message, for one of the step before."""


@pytest.mark.slow
@pytest.mark.parametrize(("law", "expected"), JITTER, ids=["5 %", "10 %"])
def test_stragglers_cost_gossip_what_a_model_expects(law, expected):
    for ranks, efficiencies in expected.items():
        times_s = law.sample(np.random.default_rng(0), 1500, ranks)
        found = [barrier_efficiency(times_s)]
        found += [gossip_efficiency(times_s, Gossip(staleness=late)) for late in (0, 1)]
        assert [100 * each for each in found] == pytest.approx(efficiencies, abs=1.0)


def test_an_exchange_of_nothing_under_jitter_is_a_barrier():
    times_s = Jitter(variation=0.1).sample(np.random.default_rng(0), 40, 8)
    pricing = WirePricing(by_name("halving_doubling").schedule(0, 8), one_each(0, 1))
    assert mean_efficiency(pricing, [ReadyBucket(0.0, 1.0)], times_s) == pytest.approx(barrier_efficiency(times_s))


def test_a_message_that_takes_long_is_waited_for():
    times_s = np.ones((50, 4))
    assert gossip_efficiency(times_s, Gossip(), message_s=0.25) == pytest.approx(0.8)
    assert gossip_efficiency(times_s, Gossip(staleness=1), message_s=1.0) == pytest.approx(1.0)
    assert gossip_efficiency(times_s, Gossip(staleness=1), message_s=3.0) == pytest.approx(0.5, rel=0.05)


@given(numel=st.integers(1, 10_000), parts=st.integers(1, 40), cap=st.floats(1, 50_000), itemsize=st.integers(1, 8))
def test_buckets_hold_every_gradient_once_and_the_last_ends_the_backward_pass(numel, parts, cap, itemsize):
    buckets = Workload.even(numel, parts).buckets(cap, itemsize)
    assert sum(bucket.nbytes for bucket in buckets) == numel * itemsize
    assert buckets[-1].at == pytest.approx(1.0)
    assert all(before.at <= after.at for before, after in pairwise(buckets))
    assert len(buckets) <= ceil(numel * GRADIENT_NBYTES / cap) + 1  # the first may be small


# Beside figures that others published: optima, simulators and bounds of other projects, as docs/simulate.md.

GB = 1e9
DGX_H100 = Cluster("dgx", "ForestColl's", 8, Link(0.001, 300.0), Between(0.001, 25.0, nics=8))


@pytest.mark.parametrize(("ranks", "all_gather_gb_per_s"), [(8, 342.857), (16, 346.667), (32, 266.667)])
def test_the_lower_bound_equals_the_optimum_that_forestcoll_finds(ranks, all_gather_gb_per_s):
    """An optimal all-reduce takes twice the all-gather."""
    assert all_reduce_bound_s(DGX_H100, ranks, GB) == pytest.approx(2 / all_gather_gb_per_s, rel=1e-5)


@pytest.mark.parametrize(("ranks", "milliseconds"), [(16, 9.375), (32, 9.6875)])
def test_a_ring_per_card_takes_what_its_bytes_take(ranks, milliseconds):
    assert seconds(Rings(8, 8), ranks, DGX_H100, GB) == pytest.approx(milliseconds / 1e3, rel=1e-4)
    assert seconds(Ring(), ranks, DGX_H100, GB) == pytest.approx(8 * milliseconds / 1e3, rel=1e-4)


MIB = (16, 32, 64, 128, 256, 512)
SIMAI = {
    8: (141.84, 153.68, 160.60, 163.85, 165.72, 166.68),
    32: (33.0956, 38.5722, 42.0496, 44.0361, 45.1014, 45.6536),
}
"""Bus bandwidth in GB/s that SimAI's tutorial prints for a ring of so many ranks."""


@pytest.mark.parametrize("ranks", SIMAI)
def test_a_ring_takes_what_simai_prints_once_two_of_six_figures_are_fitted(ranks):
    nbytes, bus = 2.0**20 * np.array(MIB), 1e9 * np.array(SIMAI[ranks])
    measured_s = 2 * (ranks - 1) / ranks * nbytes / bus
    s_per_byte = (measured_s[-1] - measured_s[0]) / (nbytes[-1] - nbytes[0])
    latency_us = 1e6 * (measured_s[0] - s_per_byte * nbytes[0]) / (2 * (ranks - 1))
    link = Link(latency_us, 2 * (ranks - 1) / ranks / s_per_byte / 1e9)
    fitted = Cluster("simai", "", ranks, link, Between(0.0, 1.0))
    found = [seconds(Ring(), ranks, fitted, each) for each in nbytes[1:-1]]
    assert found == pytest.approx(measured_s[1:-1].tolist(), rel=0.01)


def test_the_bound_is_not_above_what_te_ccl_reaches():
    """Its all-gather of 1 GB (of output) over two DGX-2 takes 7.75 ms; half of an all-reduce's bound must fit."""
    dgx2 = Cluster("dgx2", "", 16, Link(0.7, 125.0), Between(2.6, 12.5, nics=8, nics_per_rank=1))
    assert all_reduce_bound_s(dgx2, 32, GB) / 2 <= 7.75e-3


def test_on_one_switch_direct_is_not_cheaper_than_a_ring_but_for_latencies():
    """A simulator that lets receivers' ports take any load makes it twice as fast (astra-sim issue 296)."""
    switch = Cluster("switch", "", 8, Link(0.01, 50.0), Between(0.01, 50.0))
    ring_s, direct_s = (seconds(each, 8, switch, 1e8) for each in (Ring(), Direct()))
    assert ring_s - 12 * 0.01e-6 - 1e-12 <= direct_s <= ring_s
