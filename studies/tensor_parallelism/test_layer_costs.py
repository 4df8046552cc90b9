# SPDX-License-Identifier: Apache-2.0
"""Prices of tensor parallelism, as a program and as a user asks for them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice

import commands
import grid_schedules
import price_layers
import pytest
from grid_schedules import Grid
from layer_costs import LayerSize, grids_of, in_one_dimension, layer_costs, on_grid, schedules_of

from commrt import ScheduleError, UsageError
from commrt.pricing.cluster import Cluster
from commrt.proof.replay import traffic, verify
from commrt.tools.planning.planner import exchange_plans

PUBLISHED = {  # millions of elements: 1-D, [8, 8, 1], [4, 4, 4]
    (6144, 3072): (149, 81, 93),
    (16384, 4096): (528, 220, 198),
    (98304, 8192): (6342, 2114, 1321),
}


COMMAND = ("--cluster", "h100", "--wire", "bf16", "--tflops", 400)
invoke, refused, told = (
    partial(run, program=price_layers.app) for run in (commands.invoke, commands.refused, commands.told)
)


@pytest.fixture(scope="module")
def record():
    """What the command says of 16 ranks."""
    return told(*COMMAND, "--ranks", 16, "--size", "6144x3072")


def sent_on_grid(grid, size):
    return sum(numel * traffic(schedule).bytes_per_rank for schedule, numel in schedules_of(grid, size, slices=None))


def test_three_layouts_send_the_published_elements_at_three_sizes():
    """The page of the algorithm shows them too, as printed by the command."""
    for (tokens, width), published in PUBLISHED.items():
        size = LayerSize(tokens, width)
        one = in_one_dimension(Cluster.named("h100"), 64, size, 2).sent
        sent = [one, *(sent_on_grid(grid, size) for grid in (Grid(8, 1), Grid(4, 4)))]
        assert [float(each) / 1e6 for each in sent] == pytest.approx(published, abs=0.6), size


def test_schedules_send_exactly_the_elements_of_the_formula(record):
    assert [row["layout"] for row in record["layouts"]] == ["1-D", "[4, 4, 1]", "[2, 2, 4]"]
    for row in record["layouts"]:
        assert row["sent_elements"] == pytest.approx(row["formula_elements"], rel=1e-12)


def test_a_layer_takes_its_exchanges_and_its_computing(record):
    row = record["layouts"][0]
    compute_s = 6 * 6144 * 12 * 3072**2 / (16 * 400e12)
    assert row["compute_seconds"] == pytest.approx(compute_s)
    assert row["layer_seconds"] == pytest.approx(row["exchange_seconds"] + compute_s)


def test_the_table_says_what_commrt_does_not_do():
    text = invoke("--ranks", 8, "--size", "4096x1024").stdout
    assert "[2, 2, 2]" in text
    assert "commrt splits no model for you" in text


@pytest.mark.parametrize(("ranks", "layouts"), [(2, ["1-D"]), (4, ["1-D", "[2, 2, 1]"]), (9, ["[3, 3, 1]"])])
def test_layouts_that_do_not_divide_the_layer_are_left_out(ranks, layouts):
    record = told("--ranks", ranks, "--size", "1152x1023" if ranks == 9 else "4096x1024")
    assert [row["layout"] for row in record["layouts"]] == layouts


def test_grids_use_all_ranks():
    grids = [(ranks, grid) for ranks in range(1, 18) for grid in grids_of(ranks)]
    assert [(ranks, grid) for ranks, grid in grids if grid.world != ranks or grid.side < 2] == []


@pytest.mark.parametrize("grid", [Grid(2), Grid(2, 2), Grid(3)], ids=str)
def test_the_schedules_that_are_priced_are_proven(grid):
    size = LayerSize(tokens=12, width=6)
    passes = [grid_schedules.forward_goal, grid_schedules.backward_goal]
    for slices in (None, 3):
        for number, (schedule, _) in enumerate(schedules_of(grid, size, slices)):
            outputs = size.products[number // 2][1]
            wanted = passes[number % 2](grid, schedule.chunks, size.tokens, outputs * grid.depth)
            assert verify(schedule, wanted).counterexample is None


@pytest.mark.slow
def test_short_blocks_move_along_trees_and_long_ones_along_chains_of_many_slices():
    slow = Cluster.named("ethernet-10g")
    short, long = (on_grid(slow, Grid(4), LayerSize(tokens, 64), 4) for tokens in (16, 1 << 24))
    assert (short.by, long.by) == ("trees", "chains of 32 slices")


def test_four_all_reduces_are_one_layer_in_one_dimension():
    cluster, size = Cluster.named("h100"), LayerSize(4096, 1024)
    one = exchange_plans(cluster, 8, 4096 * 1024 * 2.0)[0]
    assert in_one_dimension(cluster, 8, size, 2).seconds == pytest.approx(4 * one.exchange_s)


def test_half_as_many_bytes_take_half_the_time_on_a_grid_if_latencies_are_small():
    slow, size = Cluster.named("ethernet-10g"), LayerSize(1 << 24, 64)
    wide, narrow = (on_grid(slow, Grid(2, 2), size, itemsize).seconds for itemsize in (4, 2))
    assert wide / narrow == pytest.approx(2, rel=0.01)
    assert wide > on_grid(slow, Grid(2, 2), size, 4).sent * 4 / 1.25e9  # 10 Gbit/s


@pytest.mark.parametrize("broken", ["forward", "backward"])
def test_a_schedule_that_is_wrong_is_not_priced(monkeypatch, broken):
    right = getattr(grid_schedules, broken)

    def without_a_step(*given, **named):
        whole = right(*given, **named)
        return replace(whole, steps=lambda: islice(whole.steps(), 1, None))

    monkeypatch.setattr(grid_schedules, broken, without_a_step)
    result = invoke("--ranks", 4, "--size", "64x64")
    assert isinstance(result.exception, ScheduleError)


def test_twice_the_tokens_take_twice_the_time_of_one_dimension_without_latencies():
    fast = Cluster.named("ethernet-10g")
    one, two = (in_one_dimension(fast, 4, LayerSize(tokens, 4096), 4).seconds for tokens in (1 << 18, 1 << 19))
    assert two / one == pytest.approx(2, rel=0.01)


def test_a_layer_that_no_layout_divides_is_refused():
    with pytest.raises(UsageError, match="cannot be split over 7 ranks: for 1-D the ranks must divide the width"):
        layer_costs(Cluster.named("h100"), 7, LayerSize(128, 64), 4)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--size", "3x"], "write tokens x width, such as 6144x3072"),
        (["--size", "0x64"], "write tokens x width"),
        (["--ranks", 1], "over 2 to 256 ranks"),
        (["--ranks", 512], "over 2 to 256 ranks"),
        (["--tflops", 0], "give what a rank computes per second"),
        (["--wire", "int8"], "activations travel as numbers; give fp32, bf16 or fp16"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(args, says):
    assert says in refused(*args)
