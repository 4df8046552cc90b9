# SPDX-License-Identifier: Apache-2.0
"""Prices of steps in which groups of ranks share fully connected layers, and the programs of this folder."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

import commands
import das2016
import plan_hybrid
import pytest
import torch
from hybrid_prices import BUCKET_NBYTES, HybridPricing, closed_form_groups
from torch import nn

import commrt
from commrt.algorithms.halving_doubling import HalvingDoubling
from commrt.errors import UsageError
from commrt.pricing.cluster import Between, Cluster, Link
from commrt.tools.planning.timeline import overlapped_step
from commrt.tools.planning.wires import WirePricing
from commrt.tools.planning.workload import Layer, Workload

CLUSTERS = Path(__file__).parent / "clusters"
invoke, refused, told = (
    partial(run, program=plan_hybrid.app) for run in (commands.invoke, commands.refused, commands.told)
)
DENSE = Workload("dense", (Layer(4_001_000, 4e6, 4000, 1000),))


def cluster(gbytes_per_s=10.0, latency_us=0.0, **more):
    link = (latency_us, gbytes_per_s)
    return Cluster("flat", "", 1, Link(*link), Between(*link), **more)


def pricing(workload=DENSE, ranks=16, batch=8, compute_s=1e-3, on=None):
    return HybridPricing(on or cluster(), ranks, workload, batch, compute_s)


def test_a_step_takes_its_computing_where_exchanges_take_no_time():
    for groups in (1, 4, 16):
        step = pricing(Workload.named("vgg_a"), on=cluster(1e9)).uniform(groups)
        assert (groups, step.seconds) == (groups, pytest.approx(step.compute_s, rel=1e-3))


@pytest.mark.parametrize("model", ["overfeat_fast", "cd_dnn", "resnet50"])
def test_with_as_many_groups_as_ranks_a_step_is_that_of_data_parallelism(model):
    workload, on = Workload.named(model), cluster(latency_us=5.0, pack_gbytes_per_s=50.0)
    hybrid = pricing(workload, compute_s=0.05, on=on).uniform(16)
    plain = WirePricing(HalvingDoubling().schedule(0, 16), on)
    buckets = workload.buckets(BUCKET_NBYTES, 4)
    assert hybrid.seconds == pytest.approx(overlapped_step(plain, buckets, 0.05).seconds)
    assert hybrid.activations_s == pytest.approx(0.0, abs=1e-12)


def costs_of_groups():
    """Yield numbers of groups, and the cost of the only layer with them."""
    found = pricing()
    for groups in (1, 2, 4, 8, 16):
        (cost,) = found.costs(found.uniform(groups))
        yield groups, cost


def test_a_rank_sends_the_bytes_of_the_closed_form():
    for groups, cost in costs_of_groups():
        size, returned = 16 // groups, 8 * 1000 * (16 // groups - 1) / (16 // groups)
        assert (groups, cost.activations_nbytes) == (groups, 8 * 8 * 4000 * (size - 1) + 8 * returned)
        assert cost.gradients_nbytes == pytest.approx(8 * 4_001_000 / size * (groups - 1) / groups)


def test_exchanges_on_links_without_latency_take_their_bytes():
    for groups, cost in costs_of_groups():
        assert (groups, cost.activations_s) == (groups, pytest.approx(cost.activations_nbytes / 10e9))
        assert cost.gradients_s == pytest.approx(cost.gradients_nbytes / 10e9)


def test_one_group_has_no_gradients_to_exchange():
    step = pricing().uniform(1)
    assert step.gradients_s == 0.0
    assert step.seconds == pytest.approx(step.compute_s + step.exchange_s)


def test_where_nothing_is_hidden_the_best_number_of_groups_is_next_to_the_closed_form():
    for ranks, batch, outputs in ((12, 1, 1024), (16, 4, 4096), (64, 64, 1024), (16, 1, 1024), (64, 4, 4096)):
        wide = Workload("wide", (Layer(100_000 * outputs, 1.0, 100_000, outputs),))
        (groups,) = pricing(wide, ranks, batch, 1e-9).best().groups
        closed = min(max(closed_form_groups(ranks, batch, outputs), 1), ranks)
        divisors = [each for each in range(1, ranks + 1) if ranks % each == 0]
        around = {max(each for each in divisors if each <= closed), min(each for each in divisors if each >= closed)}
        assert groups in around, (ranks, batch, outputs)


def test_the_closed_form_with_overlap_counts_half_of_the_gradients():
    assert closed_form_groups(64, 4, 4096, overlap=1.0) == pytest.approx(2 * 2**0.5)


@pytest.mark.parametrize(("model", "gbytes_per_s"), [("vgg_a", 1.0), ("overfeat_fast", 6.0)])
def test_the_best_step_is_the_best_of_all_that_there_are(model, gbytes_per_s):
    found = pricing(Workload.named(model), batch=4, compute_s=0.1, on=cluster(gbytes_per_s, 2.0))
    every = product(*map(found.choices, found.workload.layers))
    assert found.best().sort_key == min(found.step(groups).sort_key for groups in every)


def test_gradients_overlap_the_backward_pass_and_activations_do_not():
    workload = Workload("two", (Layer(4_000_000, 1e9), Layer(4_001_000, 1.0, 4000, 1000)))
    step = pricing(workload, compute_s=1.0).step([16, 4])
    costs = list(pricing(workload).costs(step))
    assert step.activations_s == pytest.approx(costs[1].activations_s)
    assert step.gradients_s == pytest.approx(costs[0].gradients_s)


def test_activations_wait_for_gradients_that_were_ready_before_them():
    dense = Layer(16_004_000, 1.0, 4000, 4000)
    found = pricing(Workload("two", (dense, dense)), compute_s=1e-9)
    step = found.step([4, 16])
    first, last = found.costs(step)
    assert step.activations_s == pytest.approx(first.activations_s + last.gradients_s)


def test_small_layers_share_a_bucket_only_if_they_have_the_same_groups():
    small = Layer(10_100, 1.0, 100, 100)
    found = pricing(Workload("small", (small, small)), on=cluster(latency_us=100.0))
    alone_s, shared_s = (
        found.step(groups).exchange_s - sum(cost.activations_s for cost in found.costs(found.step(groups)))
        for groups in ([4, 16], [16, 16])
    )
    assert alone_s == pytest.approx(sum(cost.gradients_s for cost in found.costs(found.step([4, 16]))))
    assert shared_s < alone_s


def test_groups_are_consecutive_ranks_that_exchange_activations_inside_nodes():
    nodes = Cluster("nodes", "", 4, Link(0.0, 40.0), Between(0.0, 10.0))
    found = pricing(on=nodes)
    (cost,) = found.costs(found.uniform(4))
    assert cost.activations_s == pytest.approx(cost.activations_nbytes / 40e9)
    assert cost.gradients_s == pytest.approx(4 * cost.gradients_nbytes / 10e9)  # ranks of a node share its card


def test_a_layer_has_no_more_ranks_in_a_group_than_outputs():
    few = Layer(6_000, 1.0, 1_000, 6)
    assert pricing(Workload("few", (few,)), ranks=16).choices(few) == [4, 8, 16]


def test_one_rank_exchanges_nothing():
    step = pricing(ranks=1).best()
    assert (step.seconds, step.exchange_s) == (step.compute_s, 0.0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"ranks": 300}, "above 256, give a power of two"),
        ({"ranks": 1025}, "hybrid parallelism of 1,025 ranks: give a number from 1 to 1,024"),
        ({"batch": 0}, "a step of 0 samples"),
        ({"compute_s": 0.0}, "computes for 0 s: both must be above 0"),
        ({"workload": Workload.even(1000)}, "no fully connected layer of 1,000 parameters has a known shape: take vgg"),
        ({"on": cluster(nodes=4)}, "flat has 4 GPUs"),
    ],
)
def test_steps_that_cannot_be_priced_are_refused_in_words(arguments, says):
    with pytest.raises(UsageError, match=says):
        pricing(**arguments)


# A published study --------------------------------------------------------------------------------------------------


def test_five_of_six_published_speed_ups_are_predicted_within_20_percent_and_the_page_has_these_figures():
    results = [das2016.result(point) for point in das2016.POINTS]
    assert [each.point.name for each in results if not each.is_close] == ["CD-DNN, 16 nodes"]
    page = (CLUSTERS.parent / "README.md").read_text()
    for each in results:
        shown = f"| {each.data_parallel:.1f} | {each.hybrid:.1f} | {100 * each.off:+.0f} % |"
        assert shown in page, each.point.name


def test_without_the_fitted_number_fewer_points_are_near():
    results = [das2016.result(point, **das2016.efficiency(1.0)) for point in das2016.POINTS[1:]]
    assert [each.is_close for each in results] == [True, False, True, True, False]


def test_what_is_recalled_is_printed_as_recalled(monkeypatch):
    monkeypatch.setattr(das2016, "sensitivities", lambda: iter(()))
    monkeypatch.setattr(das2016, "POINTS", das2016.POINTS[-2:])
    said = "\n".join(das2016.report())
    assert das2016.ASSUMPTIONS in said
    assert "| 11.9x | 4.0x | 11.3x | -5% | 2 2 2 | recalled |" in said
    assert "within 20%: 1 of 2, with one fitted number" in said
    assert "the number of frames in a step is unknown" in said


# The command --------------------------------------------------------------------------------------------------------

FDR = ("--cluster", CLUSTERS / "das2016-fdr.toml", "--model", "vgg_a")


def test_the_command_tells_what_each_layer_exchanges_and_what_that_gains():
    record = told(*FDR, "--ranks", 64, "--batch", 4)
    assert [(run["first"], run["last"], run["parallel"]) for run in record["layers"]] == [
        (1, 8, "data"),
        (9, 9, "hybrid"),
        (10, 10, "hybrid"),
        (11, 11, "hybrid"),
    ]
    assert record["layers"][1]["closed_form_groups"] == 2.0
    assert record["data_parallel"]["step_seconds"] > record["hybrid"]["step_seconds"] > 4 / 28 / 0.8
    assert record["hybrid"]["speed_up"] == pytest.approx(64 * 4 / 28 / record["hybrid"]["step_seconds"])
    assert record["is_run_by_commrt"] is False


def test_the_command_says_that_hybrid_steps_are_not_run():
    output = invoke(*FDR, "--ranks", 4, "--batch", 4).stdout
    assert "commrt runs data parallelism only: hybrid parallelism is priced here, not run" in output
    assert "times as fast as one; the best data-parallel plan, with HalvingDoubling(), " in output


@pytest.mark.parametrize(("batch", "gains"), [(4, True), (512, False)])
def test_the_command_says_whether_hybrid_steps_gain_over_the_best_data_parallel_plan(batch, gains):
    args = (*FDR, "--ranks", 8, "--batch", batch)
    record = told(*args)
    plain = commands.told("plan", "step", *args, "--wire", "fp32")["best"]
    assert record["data_parallel_plan"]["step_seconds"] == plain["step_seconds"]
    assert record["gains"] is (record["hybrid"]["step_seconds"] < plain["step_seconds"])
    assert (record["gains"], "gains nothing here" in invoke(*args).stdout) == (gains, not gains)


def test_a_given_time_of_computing_is_that_of_a_step_of_the_batch():
    record = told(*FDR, "--ranks", 8, "--batch", 2, "--compute-ms", 50)
    assert record["hybrid"]["compute_seconds"] == 0.05
    assert record["one_rank_seconds"] == pytest.approx(8 * 0.05)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--model", "1e6"], "how long a step of 1,000,000 parameters computes"),
        (["--model", "1e6", "--compute-ms", 5], "no fully connected layer of 1,000,000 parameters"),
        (["--model", "vgg_a", "--ranks", 2048, "--compute-ms", 5], "hybrid parallelism of 2,048 ranks"),
    ],
)
def test_options_that_do_not_fit_hybrid_plans_are_refused_in_words(args, says):
    assert says in refused(*args)


def test_a_model_of_one_s_own_has_its_fully_connected_layers(tmp_path):
    file, model = tmp_path / "mine.json", nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    commrt.tools.workload_of(model, torch.zeros(1, 512), name="mine").save(file)
    hybrid = told("--ranks", 8, "--model", file, "--compute-ms", 30, "--batch", 4)
    assert [(layer["inputs"], layer["outputs"]) for layer in hybrid["layers"]] == [(512, 512)] * 2
