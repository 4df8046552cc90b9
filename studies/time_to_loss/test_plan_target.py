# SPDX-License-Identifier: Apache-2.0
"""The plan of the time to a loss, as a user calls it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import commands
import plan_target
import pytest
from cases import for_each
from convergence import Steps
from curve import GOSSIP, LOCAL, Curve
from made_curves import curves_of, made, steps_of, written
from time_to_target import TimeToTarget, Verdict

from commrt.pricing import cluster

CLUSTERS = Path(cluster.__file__).parent / "clusters"
STEP = ("--model", "resnet50", "--cluster", "ethernet-10g", "--compute-ms", 100)
HIDDEN = ("--model", "resnet50", "--cluster", "abci", "--compute-ms", 100)
"""A step whose exchange is hidden."""
COUNTS = (1, 2, 4)
invoke, refused = (partial(run, program=plan_target.app) for run in (commands.invoke, commands.refused))
told = commands.told


def synchronous(ranks):
    return 4 + 40 / ranks


def planned(files, *args):
    """What the command says, with files as a shell gives them."""
    return told("--target-loss", 0.2, *files, *args, program=plan_target.app)


@pytest.fixture(scope="module")
def one_method(tmp_path_factory):
    return written(tmp_path_factory.mktemp("one"), curves_of(synchronous, COUNTS, seeds=2))


@pytest.fixture(scope="module")
def two_methods(tmp_path_factory):
    """Synchronous curves, and those of local SGD that need 1.5 times as many steps."""
    folder = tmp_path_factory.mktemp("two")
    local = curves_of(lambda ranks: 1.5 * synchronous(ranks), COUNTS, seeds=2, training=LOCAL, period=8)
    return written(folder, curves_of(synchronous, COUNTS, seeds=2)) + written(folder, local)


def test_times_are_steps_times_the_time_of_a_step_on_the_cluster(one_method):
    record = planned(one_method, *STEP)
    priced = told("plan", "step", "--ranks", 4, *STEP, "--wire", "fp32")["best"]
    plan = next(each for each in record["plans"] if each["ranks"] == 4)
    assert (plan["algorithm"], plan["step_seconds"]) == (priced["algorithm"], priced["step_seconds"])
    for end in ("", "_low", "_high"):
        assert plan[f"seconds{end}"] == pytest.approx(plan[f"steps{end}"] * plan["step_seconds"])


def test_one_rank_exchanges_nothing(one_method):
    first = planned(one_method, *STEP)["plans"][0]
    assert (first["ranks"], first["algorithm"], first["step_seconds"]) == (1, "-", 0.1)


def test_rank_counts_go_one_doubling_beyond_the_largest_recorded(one_method):
    plans = planned(one_method)["plans"]
    assert [(plan["ranks"], plan["recorded"]) for plan in plans] == [(1, True), (2, True), (4, True), (8, False)]
    assert plans[-1]["steps"] == pytest.approx(steps_of(synchronous(8), 0.2), rel=0.1)


def test_rank_counts_go_up_to_those_asked_for(one_method):
    assert [plan["ranks"] for plan in planned(one_method, "--ranks", 12)["plans"]] == [1, 2, 4, 8, 12]
    assert [plan["ranks"] for plan in planned(one_method, "--ranks", 2)["plans"]] == [1, 2]


def test_local_sgd_is_priced_with_its_period_and_delay(tmp_path):
    def step_s(**settings):
        curves = curves_of(synchronous, (4,), seeds=2, training=LOCAL, **settings)
        return planned(written(tmp_path, curves), *STEP)["plans"][0]["step_seconds"]

    exchange_s = told("simulate", "step", "halving_doubling", "--ranks", 4, *STEP)["seconds"]
    packing_s = 2e-3
    assert step_s(period=8) == pytest.approx(0.1 + exchange_s / 8, abs=packing_s)
    assert step_s(period=16) == pytest.approx(0.1 + exchange_s / 16, abs=packing_s)
    assert step_s(period=8, delay=8) == pytest.approx(0.1)


def test_gossip_is_priced_under_the_next_forward_pass(tmp_path):
    files = written(tmp_path, curves_of(synchronous, (4,), seeds=2, training=GOSSIP))
    simulated = told("simulate", "step", "gossip", "--ranks", 4, *STEP)["exchanges"][1]
    assert planned(files, *STEP)["plans"][0]["step_seconds"] == pytest.approx(simulated["step_seconds"])


def test_a_wire_makes_steps_shorter_for_all_methods(two_methods):
    fp32, bf16 = (planned(two_methods, *STEP, "--wire", wire)["plans"] for wire in ("fp32", "bf16"))
    assert all(
        narrow["step_seconds"] < wide["step_seconds"]
        for narrow, wide in zip(bf16, fp32, strict=True)
        if wide["ranks"] > 1
    )


def test_curves_that_were_recorded_with_a_wire_are_priced_with_it(tmp_path):
    files = written(tmp_path, curves_of(synchronous, (4,), seeds=2, wire="int4"))
    assert planned(files, *STEP)["plans"][0]["algorithm"] == "Direct()"
    assert "were recorded with wire int4: leave --wire out" in refused(
        *("--target-loss", 0.2, *files, *STEP, "--wire", "bf16")
    )


def test_computing_takes_as_long_as_the_recorded_batch_where_the_speed_is_known(one_method):
    record = planned(one_method[::-1], "--model", "resnet50", "--cluster", "abci")
    same = told("simulate", "step", "ring", "--model", "resnet50", "--cluster", "abci", "--batch", 16)
    assert record["compute_seconds"] == pytest.approx(same["compute_seconds"])


def test_a_clear_winner_is_named_with_its_algorithm_and_ranks(two_methods):
    record = planned(two_methods, *HIDDEN, "--ranks", 4)
    assert (record["best"]["method"], record["best"]["ranks"]) == ("synchronous", 4)
    assert record["best"]["seconds"] == min(plan["seconds"] for plan in record["plans"])
    assert (record["best_method"], record["undecided"], record["deciding_ranks"]) == ("synchronous", [], None)


def test_methods_whose_times_overlap_have_no_winner(two_methods):
    record = planned(two_methods, *STEP)
    assert (record["best"], record["best_method"]) == (None, None)
    assert {each["method"] for each in record["undecided"]} == {"synchronous", "local, period 8"}
    assert record["deciding_ranks"] == 8


def test_the_answer_says_what_would_decide(two_methods):
    output = " ".join(invoke("--target-loss", 0.2, *two_methods, *STEP).stdout.split())
    assert "no winner, as the intervals of time overlap: " in output
    assert "a curve on 8 ranks would decide" in output


def test_the_answer_says_how_steps_were_predicted(one_method):
    output = " ".join(invoke("--target-loss", 0.2, *one_method, *STEP).stdout.split())
    assert re.search(r"synchronous: predicted by .*; errors per doubling for counts that were held out: ", output)
    assert re.search(r"least time: synchronous.* with \S+\(\) on 8 ranks, [\d.]+ s \[", output)


def test_without_a_model_only_steps_are_told(one_method):
    record = planned(one_method)
    assert (record["best"], record["undecided"], record["model"]) == (None, [], None)
    assert "seconds" not in record["plans"][0]
    assert "these are steps: give --model" in invoke("--target-loss", 0.2, *one_method).stdout


def test_a_curve_of_each_of_two_methods_is_enough_to_compare_them(tmp_path):
    files = written(tmp_path, {"a": made(20, 4), "b": made(20, 4, 0, GOSSIP)})
    output = invoke("--target-loss", 0.2, *files, *STEP).stdout
    assert "(needs more seeds)" in output
    assert "curves with more seeds would decide" in output


def test_a_picture_has_a_line_per_method_and_shows_what_is_predicted(two_methods, tmp_path):
    path = tmp_path / "times.svg"
    invoke("--target-loss", 0.2, *two_methods, *STEP, "--out", path)
    texts = set(re.findall(r"<!-- (.*?) -->", path.read_text()))
    assert {"synchronous", "local, period 8", "predicted", "ranks", "8"} <= texts
    assert any("ethernet-10g: time to a loss of 0.2" in text for text in texts)
    assert ET.parse(path).getroot() is not None  # noqa: S314  # our own


def test_a_picture_without_anything_predicted_does_not_say_so(one_method, tmp_path):
    path = tmp_path / "times.svg"
    invoke("--target-loss", 0.2, *one_method, "--ranks", 4, *STEP, "--out", path)
    assert "<!-- predicted -->" not in path.read_text()


@for_each(
    ("args", "says"),
    [
        (["--target-loss", 0, "FILE"], "--target-loss 0: give a loss above 0"),
        (["--target-loss", "nan", "FILE"], "--target-loss nan: give a loss above 0"),
        (["--target-loss", 0.2, "/nowhere.jsonl"], "/nowhere.jsonl cannot be read"),
        (["--target-loss", 0.2, "FILE", "--wire", "bf16"], "are for the time of a step: give --model"),
        (["--target-loss", 0.2, "FILE", "--out", "a.svg"], "--out draws times: give --model too"),
        (["--target-loss", 0.2, "FILE", *STEP, "--out", "a.txt"], "give a file that ends in .svg"),
        (["--target-loss", 0.2, "FILE", "--ranks", 1], "the curves begin at 4 ranks"),
        (["--target-loss", 0.2, "FILE", "--ranks", 8], "curves of 4 ranks say nothing of 8"),
        (["--target-loss", 0.001, "FILE"], "does not reach a loss of 0.001"),
        (["--target-loss", 0.2, "FILE", "--model", "1e6"], "how long a step of 1,000,000 parameters"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(args, says, tmp_path):
    (file,) = written(tmp_path, {"a": made(20, 4)})
    assert says in refused(*(file if arg == "FILE" else arg for arg in args))


@for_each(
    ("training", "settings", "says"),
    [
        (LOCAL, {}, "do not say a period"),
        (LOCAL, {"period": "8"}, "period is '8', not a whole number"),
        ("backup", {}, "no step of 'backup' has a price"),
        ("synchronous", {"wire": "fp3"}, "no wire is called 'fp3'"),
    ],
)
def test_curves_of_training_that_has_no_price_are_refused(training, settings, says, tmp_path):
    files = written(tmp_path, {"a": made(20, 4, 0, training, **settings)})
    assert says in refused("--target-loss", 0.2, *files, *STEP)


def test_names_from_files_are_printed_as_they_are(tmp_path):
    losses = made(20, 1).losses
    files = written(tmp_path, {"a": Curve("synchronous", 1, 16, losses, {"rate": "[red]"})})
    assert "synchronous, rate [red]" in invoke("--target-loss", 0.2, *files).stdout


# What can be said of times ------------------------------------------------------------------------------------------


def timed(method, ranks, seconds, share=0.1, is_recorded=True):
    """A time whose interval is `share` wide on each side."""
    steps = Steps(seconds, seconds * (1 - share), seconds * (1 + share), is_recorded)
    return TimeToTarget(method, "Ring()", ranks, steps, 1.0)


def test_rank_counts_of_one_method_that_overlap_have_a_method_but_no_winner():
    best, alike, worse = timed("a", 8, 10), timed("a", 4, 11), timed("b", 8, 20)
    verdict = Verdict([worse, alike, best])
    assert (verdict.winner, verdict.method, verdict.close) == (None, "a", [best, alike])
    assert verdict.fewest_ranks is alike


def test_a_time_of_another_method_that_overlaps_leaves_the_method_open():
    best, other = timed("a", 8, 10), timed("b", 8, 12)
    verdict = Verdict([other, best])
    assert (verdict.winner, verdict.method, verdict.close, verdict.deciding_ranks) == (None, None, [best, other], None)


def test_intervals_that_only_just_do_not_overlap_have_a_winner():
    best = timed("a", 8, 10, share=0.1)
    assert Verdict([best, timed("b", 8, 12.3, share=0.1)]).winner is best


def test_the_largest_predicted_count_among_the_undecided_would_decide():
    times = [timed("a", 16, 10, is_recorded=False), timed("b", 8, 10.5), timed("b", 64, 30, is_recorded=False)]
    assert Verdict(times).deciding_ranks == 16


def test_of_equal_times_that_of_fewer_ranks_is_the_least():
    assert Verdict([timed("a", 8, 10), timed("a", 4, 10)]).least.ranks == 4


def test_two_files_of_one_seed_are_refused(tmp_path):
    files = written(tmp_path, {"a": made(20, 4), "b": made(20, 4)})
    assert "both record seed 0 of synchronous on 4 ranks" in refused("--target-loss", 0.2, *files)


def test_rank_counts_of_one_method_that_overlap_are_told_with_the_advice_to_take_the_fewest(tmp_path):
    files = written(tmp_path, curves_of(lambda _: 40, (2, 4), seeds=3, noise=0.2))  # where more ranks gain nothing
    record = planned(files, *HIDDEN)
    assert (record["best"], record["best_method"]) == (None, "synchronous")
    assert {each["ranks"] for each in record["undecided"]} == {2, 4}
    output = " ".join(invoke("--target-loss", 0.2, *files, *HIDDEN).stdout.split())
    assert "least time: synchronous; its rank counts cannot be told apart" in output
    assert "take the fewest, 2 ranks; curves with more seeds would decide" in output


def test_counts_that_no_curve_tells_are_left_out_unless_asked_for(tmp_path):
    files = written(tmp_path, curves_of(synchronous, (1, 4), seeds=2))
    assert [plan["ranks"] for plan in planned(files)["plans"]] == [1, 4]
    assert "curves of 1, 4 ranks say nothing of 8" in refused("--target-loss", 0.2, *files, "--ranks", 8)


def test_default_rank_counts_fit_on_the_cluster(one_method, tmp_path):
    small = tmp_path / "small.toml"
    small.write_text("nodes = 4\n" + (CLUSTERS / "ethernet-10g.toml").read_text())
    record = planned(one_method, *STEP[:2], "--cluster", small, "--compute-ms", 100)
    assert [plan["ranks"] for plan in record["plans"]] == [1, 2, 4]


def test_take_the_fewest_means_those_that_overlap_no_other_method():
    times = [timed("a", 8, 10.0), timed("a", 4, 11.5), timed("a", 2, 12.0, share=0.25), timed("b", 8, 14.5, share=0.05)]
    verdict = Verdict(times)
    assert [each.ranks for each in verdict.close] == [8, 4, 2]
    assert (verdict.method, verdict.fewest_ranks.ranks) == ("a", 4)


def test_a_method_without_a_row_at_the_least_time_leaves_the_winner_open():
    verdict = Verdict([timed("a", 8, 1.0), timed("a", 4, 5.0), timed("b", 4, 9.0)])
    assert (verdict.method, verdict.winner, verdict.uncompared) == (None, None, ["b"])


def test_methods_that_cannot_be_predicted_there_are_named(tmp_path):
    files = written(tmp_path, curves_of(synchronous, COUNTS, seeds=2))
    files += written(
        tmp_path, curves_of(lambda ranks: 9 * synchronous(ranks), (1, 2), seeds=2, training=LOCAL, period=8)
    )
    said = invoke("--target-loss", 0.2, *files, *HIDDEN).stdout
    assert "on 8 ranks" in said
    assert "where local, period 8 was not compared" in said
    assert planned(files, *HIDDEN)["best_method"] is None


def test_one_seed_of_one_curve_is_said_to_tell_nothing_of_the_spread(tmp_path):
    files = written(tmp_path, curves_of(synchronous, (4,), seeds=1))
    said = invoke("--target-loss", 0.2, *files, *STEP).stdout
    assert "nothing is known of the spread between seeds" in said


def test_a_target_above_the_first_loss_is_refused(tmp_path):
    files = written(tmp_path, curves_of(synchronous, COUNTS, seeds=2))
    assert "from its first step on: give a lower --target-loss" in refused("--target-loss", 5, *files, *STEP)


@pytest.mark.slow
def test_a_plan_for_65_536_ranks_prices_few_candidates():
    record = told("plan", "step", "--ranks", 65536, "--cluster", "h100", *STEP[:2], *STEP[4:], "--wire", "fp32")
    assert record["best"]["step_seconds"] > 0.1


@pytest.mark.parametrize(
    ("recipes", "says"),
    [
        (({"epochs": 3}, {"epochs": 4}), "with epochs 3, and .* with 4: such runs do not compare"),
        (
            ({"lr": 0.1, "epochs": 3}, {"lr": 0.2, "epochs": 3}),
            "with lr 0.1, and .* with 0.2: such runs do not compare",
        ),
    ],
)
def test_runs_of_different_recipes_are_refused(tmp_path, recipes, says):
    curves = curves_of(synchronous, (4,), seeds=2).items()
    files = written(
        tmp_path, {name: replace(one, recipe=own) for (name, one), own in zip(curves, recipes, strict=True)}
    )
    assert re.search(says, refused("--target-loss", 0.2, *files, *STEP))


def test_learning_rates_may_follow_the_number_of_ranks(tmp_path):
    curves = curves_of(synchronous, COUNTS, seeds=2)
    files = written(tmp_path, {name: replace(one, recipe={"lr": one.ranks * 0.1}) for name, one in curves.items()})
    assert planned(files, *STEP)["plans"]
