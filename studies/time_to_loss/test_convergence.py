# SPDX-License-Identifier: Apache-2.0
"""Steps to a loss: read from curves, and predicted for more ranks than were recorded."""

from __future__ import annotations

from functools import cache
from math import exp, log

import numpy as np
import pytest
from cases import for_each
from convergence import (
    FAMILIES,
    Convergence,
    Run,
    convergence_of,
    deviation,
    fit_floor,
    mean_log,
    smoothed,
    steps_to,
)
from curve import LOCAL, Curve
from lasso import descend, fit_losses
from made_curves import NOISE, curves_of, made, made_power, steps_of

from commrt.errors import UsageError

TARGET = 0.2
FLOOR = lambda ranks: 6 + 60 / ranks  # noqa: E731
POWER = lambda ranks: 60 * ranks**-0.7  # noqa: E731


@cache
def fitted(half_of, counts=(1, 2, 4), **given):
    (found,) = convergence_of(curves_of(half_of, counts, **given), TARGET)
    return found


def test_smoothing_leaves_a_constant_loss_as_it_is():
    np.testing.assert_allclose(smoothed(np.full(50, 1.5)), 1.5)


def test_smoothing_moves_quick_and_slow_runs_by_the_same_share():
    quick, slow = (steps_to(made(half, 1, noise=0).losses, TARGET) / steps_of(half, TARGET) for half in (20, 160))
    assert quick == pytest.approx(slow, rel=0.01)
    assert slow == pytest.approx(1, rel=0.05)


def test_one_step_with_a_low_loss_does_not_reach_a_target():
    losses = np.full(100, 1.0)
    losses[40] = 0.01
    assert steps_to(losses, 0.5) is None


def test_a_target_above_the_first_loss_is_reached_in_the_first_step():
    assert steps_to(np.array([1.0, 0.9]), 1.0) == 1


def test_a_run_that_diverges_after_the_target_has_reached_it():
    assert steps_to(np.array([1.0, 0.4, 0.3, 0.3, np.inf, np.nan]), 0.45) == 2


@for_each("last", [-1.0, 0.0, float("-inf"), 1e308])
def test_odd_losses_after_the_target_change_nothing(last):
    curves = {f"{n}": made(FLOOR(n), n) for n in (1, 2, 4)}
    odd = Curve("synchronous", 4, 64, np.append(curves["4"].losses, [last, last]))
    steps = [convergence_of(curves | {"4": each}, TARGET)[0].steps(8).steps for each in (curves["4"], odd)]
    assert steps[0] == pytest.approx(steps[1])


def test_a_loss_that_jumps_below_zero_reaches_the_target():
    curves = {f"{n}": Curve("synchronous", n, n, np.append(np.ones(40 // n), -np.ones(9))) for n in (1, 2, 4)}
    assert convergence_of(curves, TARGET)[0].steps(8).steps < convergence_of(curves, TARGET)[0].steps(4).steps


def test_steps_that_fall_to_a_floor_are_fitted_exactly():
    runs = [run for run in fitted(FLOOR).runs if run.points is not None]
    exact = [type(run)(run.ranks, 10 + 100 / run.ranks, run.points) for run in runs]
    assert fit_floor(exact, TARGET)(16) == pytest.approx(10 + 100 / 16)


def test_steps_that_fall_faster_than_batches_grow_are_fitted_without_a_floor():
    runs = [type(run)(run.ranks, 100 * run.ranks**-1.2, run.points) for run in fitted(FLOOR).runs]
    at_4, at_8 = map(fit_floor(runs, TARGET), (4, 8))
    assert at_8 == pytest.approx(at_4 / 2)


def test_coordinate_descent_meets_the_conditions_of_the_optimum():
    rng = np.random.default_rng(0)
    table = rng.standard_normal((200, 6))
    table /= table.std(axis=0)
    moments = table.T @ (table @ np.array([2.0, 0, 0, -1, 0, 0.5]) + 0.1 * rng.standard_normal(200)) / 200
    gram, penalty = table.T @ table / 200, 0.2
    weights = descend(gram, moments, penalty, np.zeros(6))
    rest = moments - gram @ weights
    assert np.flatnonzero(weights).tolist() == [0, 3, 5]
    np.testing.assert_allclose(rest[weights != 0], penalty * np.sign(weights[weights != 0]), atol=1e-3)
    assert np.abs(rest).max() <= penalty + 1e-3


def test_the_largest_penalty_leaves_only_the_mean():
    points = [run.points for run in fitted(FLOOR).runs]
    (model,) = fit_losses(points, [1.0])
    np.testing.assert_array_equal(model.weights, 0)


@pytest.mark.parametrize(
    ("half_of", "family"), [(FLOOR, "S_min + E/B"), (POWER, "power law")], ids=["floor", "power law"]
)
def test_the_family_that_made_the_steps_predicts_two_doublings(half_of, family):
    found = fitted(half_of)
    runs = found.runs
    for ranks, within in ((8, 0.04), (16, 0.08)):
        steps = FAMILIES[family](runs)(runs, TARGET)(ranks)
        assert steps == pytest.approx(steps_of(half_of(ranks), TARGET), rel=within)


def test_a_lasso_predicts_losses_whose_slope_depends_on_the_ranks():
    curves = {f"{n}-{seed}": made_power(n, seed) for n in (1, 2, 4, 8) for seed in range(2)}
    (found,) = convergence_of(curves, 0.5)
    true = (8 / 0.5) ** (1 / (0.5 + 0.06 * log(16)))
    assert found.fits["Lasso"](found.runs, 0.5)(16) == pytest.approx(true, rel=0.05)


def test_the_family_is_the_one_that_predicts_held_out_counts_best():
    found = fitted(POWER, counts=(1, 2, 4, 8))
    assert found.family == "power law" == min(found.errors, key=found.errors.__getitem__)
    assert found.errors["power law"] < 0.05 < found.errors["S_min + E/B"]


def test_only_larger_counts_are_held_out():
    curves = curves_of(FLOOR, (1, 2, 4))
    curves |= {f"4-{seed}": made(2 * FLOOR(4), 4, seed) for seed in range(3)}  # twice the steps of the others' rule
    (found,) = convergence_of(curves, TARGET)
    assert found.errors["S_min + E/B"] == pytest.approx(log(2), abs=0.1)


def test_a_count_that_is_held_out_is_predicted_from_smaller_ones_only():
    of_three = fitted(FLOOR)
    curves = curves_of(FLOOR, (1, 2, 4)) | {f"8-{seed}": made(2 * FLOOR(8), 8, seed) for seed in range(3)}
    (found,) = convergence_of(curves, TARGET)
    last = [
        log(fit_floor(of_three.levels[level], level)(8)) - mean_log(runs, 8) for level, runs in found.levels.items()
    ]
    expected = ((of_three.errors["S_min + E/B"] ** 2 + np.mean(np.square(last))) / 2) ** 0.5
    assert found.errors["S_min + E/B"] == pytest.approx(expected)


def test_intervals_of_predictions_hold_the_spread_of_seeds_too():
    found = fitted(FLOOR, counts=(1, 2, 4, 8))
    steps = found.steps(16)
    assert found.rivals == [found.family]  # nothing else widens it
    assert steps.high / steps.steps > 1.0001 * exp(2 * found.error)


@pytest.mark.parametrize("half_of", [FLOOR, POWER], ids=["floor", "power law"])
def test_intervals_cover_what_was_not_recorded(half_of):
    found = fitted(half_of, counts=(1, 2, 4, 8))
    for ranks in (16, 32):
        steps = found.steps(ranks)
        assert steps.low < steps_of(half_of(ranks), TARGET) < steps.high
        assert not steps.is_recorded


def test_intervals_grow_with_each_doubling():
    found = fitted(POWER, counts=(1, 2, 4, 8))
    widths = [steps.high / steps.low for steps in map(found.steps, (8, 16, 32))]
    assert widths == sorted(widths)
    assert widths[0] < widths[2]


def test_families_that_predict_held_out_counts_as_well_widen_the_interval():
    found = fitted(FLOOR, noise=4 * NOISE)
    assert len(found.rivals) > 1
    others = [found.fits[name](found.runs, TARGET)(16) for name in found.rivals]
    steps = found.steps(16)
    assert steps.low <= min(others) < max(others) <= steps.high


def test_families_that_predict_held_out_counts_far_worse_do_not():
    found = fitted(FLOOR, counts=(1, 2, 4, 8))
    assert found.rivals == ["S_min + E/B"]


def test_recorded_counts_are_read_from_their_curves():
    curves = curves_of(FLOOR, (2, 4, 8))
    (found,) = convergence_of(curves, TARGET)
    own = [log(steps_to(curve.losses, TARGET)) for curve in curves.values() if curve.ranks == 4]
    assert found.steps(4).is_recorded
    assert found.steps(4).steps == pytest.approx(exp(np.mean(own)))


def test_a_count_between_recorded_ones_is_predicted():
    steps = fitted(FLOOR, counts=(1, 2, 8)).steps(4)
    assert not steps.is_recorded
    assert steps.steps == pytest.approx(steps_of(FLOOR(4), TARGET), rel=0.06)


def test_seeds_that_differ_widen_the_interval_of_recorded_counts():
    alike, unlike = (fitted(FLOOR, noise=noise).steps(2) for noise in (NOISE / 10, 4 * NOISE))
    assert alike.high / alike.low < unlike.high / unlike.low


@pytest.mark.parametrize("ranks", [4, 8])
def test_one_seed_of_each_count_says_nothing_about_the_spread(ranks):
    steps = fitted(FLOOR, seeds=1).steps(ranks)
    assert (steps.low, steps.high) == (0, float("inf"))


def test_the_jackknife_of_a_mean_is_its_standard_error():
    runs = [Run(1, steps, None) for steps in (90, 100, 130)]
    expected = np.std(np.log([90, 100, 130]), ddof=1) / 3**0.5
    assert deviation(runs, lambda rest: mean_log(rest, 1)) == pytest.approx(expected)


def test_a_deviation_of_unknown_values_is_infinite():
    runs = [Run(1, steps, None) for steps in (90, 100)]
    assert deviation(runs, lambda rest: float("nan")) == float("inf")


def test_two_seeds_of_one_count_tell_the_spread_of_all():
    curves = curves_of(FLOOR, (1, 2, 4), seeds=1) | {"again": made(FLOOR(1), 1, 1)}
    (found,) = convergence_of(curves, TARGET)
    assert np.isfinite(found.steps(4).high)


def test_only_recorded_counts_are_known_where_too_few_are_recorded():
    assert [ranks for ranks in range(1, 17) if fitted(FLOOR, counts=(1, 4)).knows(ranks)] == [1, 4]


def test_counts_up_to_two_doublings_from_the_least_recorded_one_on_are_known():
    found = fitted(FLOOR, counts=(2, 3, 4))
    assert [ranks for ranks in range(1, 20) if found.knows(ranks)] == list(range(2, 17))


def test_methods_are_fitted_apart():
    curves = curves_of(FLOOR, (1, 2, 4)) | {f"l{n}": made(POWER(n), n, 0, LOCAL, period=8) for n in (1, 2, 4)}
    assert [each.method for each in convergence_of(curves, TARGET)] == ["synchronous", "local, period 8"]


def test_more_than_two_doublings_are_refused_with_what_to_record():
    with pytest.raises(UsageError, match=r"17 ranks are more than 2 doublings of 4.* curve with at least 5 ranks"):
        fitted(FLOOR).steps(17)


def test_two_rank_counts_predict_nothing():
    with pytest.raises(UsageError, match="curves of 1, 2 ranks say nothing of 4: a prediction needs 3 rank counts"):
        fitted(FLOOR, counts=(1, 2)).steps(4)


def test_a_curve_that_does_not_reach_the_target_is_named_with_its_lowest_loss():
    curves = {"a": made(20, 1), "b": Curve("synchronous", 2, 32, np.array([2.0, 1.0, 0.5, 0.5]))}
    with pytest.raises(UsageError, match=r"b \(synchronous, 2 ranks\) does not reach a loss of 0.2: its lowest is 0.5"):
        convergence_of(curves, TARGET)


def test_a_curve_without_finite_losses_is_refused():
    with pytest.raises(UsageError, match="its lowest is not finite"):
        convergence_of({"a": Curve("synchronous", 1, 1, np.full(3, np.nan))}, TARGET)


def test_batches_that_do_not_grow_with_the_ranks_are_refused():
    curves = {"a": made(20, 1), "b": Curve("synchronous", 2, 16, made(20, 2).losses)}
    with pytest.raises(UsageError, match="must be the same in all curves, but are 16 in a and 8 in b"):
        convergence_of(curves, TARGET)


def test_two_equal_methods_with_two_seeds_seldom_differ_beyond_their_intervals():
    random = np.random.default_rng(0)

    def steps():
        runs = [Run(4, float(100 * exp(0.05 * random.standard_normal())), None) for _ in range(2)]
        return Convergence("any", TARGET, runs, {TARGET: runs}).steps(4)

    assert sum(not steps().overlaps(steps()) for _ in range(300)) <= 3


def test_equal_seeds_leave_an_interval_of_a_step():
    found = fitted(FLOOR, seeds=1)
    runs = [*found.runs, found.runs[0]]
    steps = Convergence("any", TARGET, runs, {TARGET: runs}).steps(1)
    assert steps.high - steps.low > 2


def test_with_one_held_out_count_all_families_widen_the_interval():
    found = fitted(POWER)
    others = [exp(found._log_steps(found.runs, 16, name)) for name in FAMILIES]
    steps = found.steps(16)
    assert steps.low <= min(others)
    assert max(others) <= steps.high
