# SPDX-License-Identifier: Apache-2.0
"""Steps with sharded parameters: their halves of all-reduces, their times, and the program that shows them."""

from __future__ import annotations

from functools import partial

import commands
import numpy as np
import price_fsdp
import pytest
from cases import for_each
from sharded_steps import Halves, Unit, halves_of, sharded_step, sharding_candidates, units_of

from commrt.algorithms.direct import Direct
from commrt.algorithms.halving_doubling import HalvingDoubling
from commrt.algorithms.ring import Ring, Rings
from commrt.algorithms.torus import Torus2D
from commrt.errors import UsageError
from commrt.pricing.cluster import Between, Cluster, Link
from commrt.pricing.price import Pricing
from commrt.schedule import ADD, Schedule
from commrt.tools.planning.workload import FORWARD, Workload

SLOW = Cluster("slow", "", 1, Link(0.0, 1.0), Between(0.0, 1.0))
UNITS = [Unit(250_000, 0.25)] * 4
FSDP = ("--ranks", 8, "--cluster", "ethernet-10g", "--model", "4e6", "--compute-ms", 100)
ONE_WAY = (*FSDP, "--wire", "fp32", "--unit-mb", 25)
invoke, refused, told = (
    partial(run, program=price_fsdp.app) for run in (commands.invoke, commands.refused, commands.told)
)


def halves(algorithm, ranks, cluster=SLOW):
    return Halves(algorithm, *(Pricing(half, cluster) for half in halves_of(algorithm.schedule(0, ranks))))


def complete_sums(schedule):
    """Return [ranks, chunks]: whether a rank holds the sum over all ranks."""
    held = np.broadcast_to(
        np.eye(schedule.ranks, dtype=np.int64)[:, None], (schedule.ranks, schedule.chunks, schedule.ranks)
    ).copy()
    for step in schedule.steps():
        before = held.copy()
        for src, dst, lo, hi, combine in zip(step.src, step.dst, step.lo, step.hi, step.combine, strict=True):
            held[dst, lo:hi] = before[src, lo:hi] + (held[dst, lo:hi] if combine == ADD else 0)
    return (held == 1).all(axis=2)


@for_each("algorithm", [Ring(), Rings(2, 4), HalvingDoubling(), Torus2D((4, 2)), Torus2D(both_ways=True), Direct()])
def test_the_first_half_leaves_each_rank_an_equal_share_that_no_other_rank_has(algorithm):
    scatter, _ = halves_of(algorithm.schedule(0, 8))
    complete = complete_sums(scatter)
    assert (complete.sum(axis=0) == 1).all()
    assert (complete.sum(axis=1) == scatter.chunks // 8).all()


@for_each("algorithm", [Ring(), HalvingDoubling(), Torus2D((4, 2))])
def test_both_halves_together_cost_what_the_all_reduce_costs(algorithm):
    whole = Pricing(algorithm.schedule(0, 8), SLOW).price(8e6).seconds
    parts = halves(algorithm, 8)
    assert sum(each.price(8e6).seconds for each in (parts.reduce_scatter, parts.all_gather)) == pytest.approx(whole)


@for_each(("algorithm", "ranks"), [(HalvingDoubling(), 6), (Torus2D(), 7)])
def test_an_all_reduce_that_folds_ranks_has_no_halves(algorithm, ranks):
    assert halves_of(algorithm.schedule(0, ranks)) is None


@for_each("ranks", [1, 2, 3, 7, 8, 12])
def test_every_number_of_ranks_has_a_way_to_shard(ranks):
    assert list(sharding_candidates(SLOW, ranks, 1e6))


def test_without_communication_a_step_takes_its_computing():
    step = sharded_step(UNITS, halves(Ring(), 1), 0.1, 4)
    assert (step.seconds, step.exchange_s) == (pytest.approx(0.1), 0.0)


def test_without_computing_a_step_takes_all_its_exchanges():
    step = sharded_step(UNITS, halves(Ring(), 4), 0.0, 4)
    assert step.seconds == pytest.approx(step.exchange_s)  # Python 3.12 adds floats more exactly
    assert step.exchange_s == pytest.approx((4 + 3 + 4) * 3 / 4 * 1e6 / 1e9)


def test_where_computing_is_longer_only_the_first_gather_and_the_last_scatter_show():
    step = sharded_step(UNITS, halves(Ring(), 4), 1.0, 4)
    assert step.exposed_s == pytest.approx(2 * 3 / 4 * 1e6 / 1e9)


def test_where_exchanges_are_longer_a_step_takes_them_and_the_turn_in_which_the_lane_waits():
    parts, compute_s = halves(Ring(), 4), 1e-4
    step = sharded_step(UNITS, parts, compute_s, 4)
    # At the turn from forward to backward both passes of the last unit are computed while one gather runs,
    # which must wait until the unit before is free; the last scatter waits for the last backward pass.
    assert step.exchange_s < step.seconds <= step.exchange_s + compute_s


def test_a_rank_holds_at_most_two_units():
    gather_s, compute_s = 0.75e-3, 1.2e-3
    step = sharded_step(UNITS[:3], halves(Ring(), 4), compute_s, 4)
    forward_s = FORWARD * compute_s / 4
    # the third gather could begin at 2 gather_s, and does so only after the first unit is computed
    assert gather_s + forward_s < 2 * gather_s
    assert step.seconds >= 3 * gather_s + forward_s


def test_units_are_consecutive_layers_that_hold_all_parameters_and_all_work():
    workload = Workload.transformer(256, 4, 64)
    units = units_of(workload, 2.0)
    assert sum(unit.numel for unit in units) == workload.numel
    assert sum(unit.share for unit in units) == pytest.approx(1.0)
    assert len(units_of(workload, 1e6)) == 1


def test_units_of_no_size_are_refused():
    with pytest.raises(UsageError, match="give a size above 0"):
        units_of(Workload.even(10), 0.0)


def test_a_schedule_that_copies_before_it_adds_has_no_halves():
    ring = Ring().schedule(0, 4)
    assert halves_of(Schedule("other", 4, 4, lambda: reversed([*ring.steps()]))) is None


def test_fsdp_stands_beside_replicated_parameters():
    record = told(*ONE_WAY)
    assert record["best"] == min(record["plans"], key=lambda each: each["step_seconds"])
    assert record["best"]["exposed_seconds"] == pytest.approx(record["best"]["step_seconds"] - 0.1)
    assert record["replicated"]["step_seconds"] <= record["best"]["step_seconds"]


def test_units_and_wires_are_searched():
    record = told(*FSDP)
    assert {each["wire"] for each in record["plans"]} == {"fp32", "bf16"}
    assert record["best"]["step_seconds"] <= told(*ONE_WAY)["best"]["step_seconds"]


def test_the_table_names_the_memory_of_a_rank():
    shown = invoke(*ONE_WAY).output
    assert "4.0 MB, and up to two units of" in shown
    assert "replicated 32.0 MB" in shown


@for_each(
    ("args", "said"),
    [
        (("--wire", "int8"), "codes would round the parameters"),
        (("--unit-mb", "0"), "give a size above 0"),
        (("--ranks", 2048), "priced up to 1,024 ranks"),
        (("--cluster", "mars"), "no cluster is called 'mars'"),
    ],
)
def test_what_cannot_be_priced_is_refused(args, said):
    assert said in refused(*FSDP, *args)
