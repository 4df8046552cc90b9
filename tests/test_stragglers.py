# SPDX-License-Identifier: Apache-2.0
"""When gradients come, and how many of them to wait for.

Figures called published are as recalled, not checked against the paper; the targets beside them are our own estimates.
"""

import json
import re
from functools import reduce
from itertools import product
from math import inf

import numpy as np
import pytest
from cases import for_each
from commands import invoke, refused, told
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from commrt.errors import UsageError
from commrt.tools.commands.arguments import BackupOptions
from commrt.tools.commands.backup_estimate import estimate_backups
from commrt.tools.planning.computing_times import Exponential, HeavyTails, SlowSteps
from commrt.tools.planning.stragglers import Published, Scaling, choose, kth_time_s, step_time_s

ESTIMATED_S = {1: 1.23, 50: 1.46, 80: 1.54, 90: 1.58, 94: 1.61, 95: 1.63, 96: 1.65, 97: 1.70, 98: 1.81, 99: 2.16}
"""k to mean time of the k-th of 100 gradients, by an earlier sampling of the same family of laws; the 100th: 4.99."""


def rng(seed=0):
    return np.random.default_rng(seed)


def sampled(law, ranks=100, steps=10_000, seed=0):
    return law.sample(rng(seed), steps, ranks)


PAPER = sampled(HeavyTails())
TIMES = arrays(np.float64, st.tuples(st.integers(1, 12), st.integers(1, 9)), elements=st.floats(0.125, 64, width=16))


def expected_kth_s(law, ranks):
    """[ranks]: the mean time of the k-th gradient of a step, in closed form."""
    if isinstance(law, Exponential):  # after k gradients the next comes from the ranks - k that are left
        return law.constant_s + np.cumsum(1 / np.arange(ranks, 0, -1)) / law.rate_per_s
    chances = reduce(np.convolve, [(1 - law.chance, law.chance)] * ranks, np.ones(1))
    slow, k = np.arange(ranks + 1)[:, None], np.arange(1, ranks + 1)
    place = np.maximum(k - (ranks - slow), 0)  # the j-th of m slow ones is expected j / (m + 1) of the way up
    factor = np.where(place > 0, law.low + (law.high - law.low) * place / (slow + 1), 1.0)
    return law.base_s * (chances @ factor)


SLOW = (SlowSteps(), SlowSteps(2.0, 0.5, 1.0, 3.0), SlowSteps(chance=0.2, low=4.0, high=4.0))


@for_each(("law", "ranks"), product([Exponential(), Exponential(0.0, 4.0), *SLOW], [1, 8, 33]))
def test_samples_tend_to_closed_forms(law, ranks):
    kth_s = np.sort(sampled(law, ranks, 10_000), axis=1)
    error_s = kth_s.std(axis=0) / np.sqrt(len(kth_s))
    rare_s = 1e-3  # what too few steps show at all, such as eight slow ranks of eight
    assert (np.abs(kth_s.mean(axis=0) - expected_kth_s(law, ranks)) <= 5 * error_s + rare_s).all()


def test_the_fit_meets_the_two_published_percentages_and_the_estimated_times_and_steps_have_something_in_common():
    arrivals_s, kth_s = np.sort(PAPER, axis=1), kth_time_s(PAPER)
    assert (arrivals_s[:, 97] < 2).mean() == pytest.approx(0.80, abs=0.06)
    assert (arrivals_s[:, 99] < 2).mean() == pytest.approx(0.30, abs=0.06)
    assert arrivals_s.max() <= 310
    assert {k: kth_s[k - 1] for k in ESTIMATED_S} == pytest.approx(ESTIMATED_S, rel=0.02)
    assert kth_s[99] == pytest.approx(4.99, rel=0.12)  # the mean of a tail whose variance is in the cap
    medians = np.median(PAPER[:, :50], axis=1), np.median(PAPER[:, 50:], axis=1)
    assert np.corrcoef(*medians)[0, 1] > 0.95


@given(TIMES)
def test_gradients_come_one_after_the_other_and_uninterrupted_late_ranks_only_make_steps_longer(times_s):
    kth_s = kth_time_s(times_s)
    assert (np.diff(kth_s) >= 0).all()
    assert kth_s.sum() == pytest.approx(times_s.mean(axis=0).sum())
    steps_s = step_time_s(times_s, np.arange(1, len(kth_s) + 1))
    assert (steps_s >= kth_s - 1e-9).all()
    assert steps_s[-1] == pytest.approx(kth_s[-1])


def test_a_late_rank_misses_the_steps_in_which_it_is_not_done():
    times_s = np.array([[1.0, 1.0, 9.0], [1.0, 2.0, 1.0], [9.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    # steps end at 1, at 3, at 10, when the third rank, free from 9 on, is the second one to be done, and at 11
    assert step_time_s(times_s, [2, 3]).tolist() == [11 / 4, 21 / 4]
    assert kth_time_s(times_s)[1:].tolist() == [1.0, 21 / 4]


@settings(max_examples=40)  # each draws its steps again a hundred times
@given(TIMES, st.floats(0.125, 1).map(Scaling))
def test_the_best_split_is_the_cheapest(times_s, goal):
    choice = choose(times_s, goal, rng())
    assert choice.goal_s[choice.best - 1] == choice.goal_s.min()
    assert 1 <= choice.likely[0] <= choice.likely[1] <= len(choice.kth_s)


def test_all_are_waited_for_if_nobody_straggles_and_the_first_if_more_do_not_help_and_no_free_one_is_wasted():
    assert choose(np.full((5, 40), 3.0), Scaling(0.125), rng()).likely == (40, 40)
    assert choose(PAPER[:100], Scaling(0.0), rng()).best == 1
    assert choose(np.array([[1.0, 1.0, 1.0, 2.0]]), Scaling(0.0), rng()).best == 3


def test_a_few_steps_do_not_decide_what_many_do():
    few, many = (choose(times_s, Published(), rng()).likely for times_s in (PAPER[:20], PAPER[:2000]))
    assert few[1] - few[0] > many[1] - many[0]


@for_each(
    ("build", "says"),
    [
        (lambda: HeavyTails(tail_chance=1.5), "tail_chance is 1.5: it must be between 0 and 1"),
        (lambda: HeavyTails(cap_s=1.0), "cap_s is 1: it must be at least 1.1, and finite"),
        (lambda: Exponential(rate_per_s=-1.0), "rate_per_s is -1: it must be at least 1e-09"),
        (lambda: Exponential(constant_s=inf), "constant_s is inf: it must be at least 0, and finite"),
        (lambda: SlowSteps(chance=-0.1), "chance is -0.1: it must be between 0 and 1"),
        (lambda: SlowSteps(low=0.5), "low is 0.5: it must be at least 1"),
        (lambda: SlowSteps(low=5.0, high=4.0), "high is 4: it must be at least 5"),
        (lambda: Scaling(1.5), "an exponent of 1.5: give one between 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(build, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        build()


# ``commrt simulate backups`` and ``commrt plan backups`` as a user calls them.

BACKUPS = "simulate backups --steps 500"
RECORDED = [[1.0, 1.1, 1.2, 9.0], [2.0, 2.1, 20.0, 2.2], [1.0, 1.0, 1.0, 1.0]]


@pytest.fixture(scope="module")
def record():
    return told(BACKUPS)


def test_simulate_backups_says_which_split_is_best_and_what_each_costs_and_the_same_for_the_same_seed(record):
    assert record["best_quorum"] in range(94, 98)
    assert record["backups"] == 100 - record["best_quorum"]
    assert len(record["kth_time_s"]) == len(record["hours"]) == 100
    assert record["hours"][:49] == [None] * 49  # nothing was published for so few
    assert min(record["hours"][49:]) == record["hours"][record["best_quorum"] - 1] == pytest.approx(37.2, rel=0.03)
    assert (record["law"]["name"], record["iterations"]) == ("paper", {"name": "published"})
    assert record["sources"].count("as recalled") == 2
    again, other = (told(BACKUPS, "--seed", seed)["kth_time_s"] for seed in (0, 1))
    assert record["kth_time_s"] == again != other


def test_ranks_that_finish_though_late_need_more_backups_than_the_published_rule_says(record):
    assert 100 - record["best_quorum_if_late_finish"] > record["backups"]
    best = next(row for row in record["table"] if row["quorum"] == record["best_quorum_if_late_finish"])
    assert record["table"][-1]["late_finish_relative_time"] == 1
    assert best["late_finish_relative_time"] == min(row["late_finish_relative_time"] or 1 for row in record["table"])


def test_the_table_shows_all_small_numbers_of_backups_and_some_larger_ones():
    output = invoke(BACKUPS).stdout
    shown = [int(number) for number in re.findall(r"^│ +(\d+) +│", output, re.MULTILINE)]
    assert shown == [52, 62, 70, 76, 81, 85, *range(88, 101)]
    assert "hours" in output
    assert re.search(r"^use [6-9] backups: the goal takes 0\.\d\d of the time without$", output, re.MULTILINE)
    assert re.search(r"the published rule, .*, says [3-6] \([3-6] to [3-6] in 90 % of resamplings\)", output)


def test_parameters_of_a_law_are_set_and_hours_that_nobody_knows_are_left_out():
    line = f"{BACKUPS} --law exponential --ranks 8 --set constant_s=0"
    record = told(line)
    assert record["kth_time_s"][5:] == pytest.approx([1.2179, 1.7179, 2.7179], rel=0.1)
    assert record["hours"] is None
    assert record["law"] == {"name": "exponential", "constant_s": 0.0, "rate_per_s": 1.0}
    assert "hours" not in invoke(line).stdout


def test_what_training_needs_is_assumed_as_the_options_say():
    line = f"{BACKUPS} --law slow --ranks 8"
    usual, one, none = (told(line, *more)["best_quorum"] for more in ([], ["--exponent", 1], ["--exponent", 0]))
    assert usual == one > none


@for_each(("law", "ranks"), [("slow", 64), ("slow", 9), ("exponential", 40)])
def test_the_chosen_number_of_backups_is_about_the_best_of_all_that_may_be(law, ranks):
    found = estimate_backups(BackupOptions(ranks, 500, 0, law, [], None, None))
    allowed = np.arange(ranks // 2 + 1, ranks + 1)
    goal_s = step_time_s(found.times_s, allowed) * found.goal.iterations(allowed)
    assert goal_s[found.best_if_late_finish["quorum"] - allowed[0]] <= 1.02 * goal_s.min()


def test_one_rank_and_many_work_too():
    one = told(f"{BACKUPS} --ranks 1 --exponent 1")
    assert (one["backups"], len(one["table"])) == (0, 1)
    assert told("simulate backups --ranks 300 --exponent 1 --steps 50")["backups"] < 60


@for_each(
    "text",
    [
        json.dumps(RECORDED),
        "\n".join(",".join(map(str, step)) for step in RECORDED),
        "\ufeffrank 0,rank 1,rank 2,rank 3\n\n" + "\r\n".join(", ".join(map(str, step)) for step in RECORDED),
    ],
    ids=["JSON", "CSV", "CSV of a spreadsheet"],
)
def test_a_recorded_run_is_taken_as_it_is(text, tmp_path):
    file = tmp_path / "times"
    file.write_text(text)
    record = told("simulate backups --times", file)
    assert record["kth_time_s"] == pytest.approx(np.sort(RECORDED, axis=1).mean(axis=0).tolist())
    assert (record["ranks"], record["steps"], record["best_quorum"]) == (4, 3, 3)
    assert record["law"] == {"name": "recorded", "file": str(file)}
    assert record["best_quorum_if_late_finish"] == 3
    assert f"recorded, {file}" in invoke("simulate backups --times", file).stdout
    plan = told("plan backups --backups auto --model resnet50 --wire bf16 --ranks 4 --times", file)
    assert {each["backups"] for each in plan["plans"]} == {0, 1}
    says = "holds times of 4 ranks, not of 3: leave --ranks out"
    assert says in refused("simulate backups --ranks 3 --times", file)


def test_a_timeline_gives_the_times_of_passes_without_what_was_waited(tmp_path):
    events = []
    for rank in range(3):
        spans = {"forward": (0, 10), "backward": (15, 35 + rank), "wait": (30, 20)}  # begin and duration in ms
        for begin_ms in range(0, 500 + 100 * rank, 100):
            for name, (at_ms, ms) in spans.items():
                times = {"ts": 1e3 * (begin_ms + at_ms), "dur": 1e3 * ms}
                events.append({"ph": "X", "pid": rank, "name": name, "args": {}, **times})
    events.append({"ph": "X", "pid": 1, "name": "forward", "args": {}, "ts": 9e5, "dur": 1e4})
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    record = told("simulate backups --times", file)
    assert (record["ranks"], record["steps"]) == (3, 2)
    assert record["kth_time_s"] == pytest.approx([0.030, 0.031, 0.032])


@for_each(
    ("content", "says"),
    [
        (b"", "holds no step: give a timeline, such as examples/mnist/train.py --trace writes, or write one list"),
        (b"[[]]", "step 0 has 0 times"),
        (b"1,2\n1,2,3\n", "step 1 has 3 times, step 0 has 2"),
        (b"[[1, 2], [1, null]]", "step 1, rank 1: None is no number of seconds above 0"),
        (b"[[0, 1]]", "step 0, rank 0: 0 is no number of seconds"),
        (b"[[1e999, 1]]", "step 0, rank 0: inf is no number of seconds"),
        (b"1,2\n3,fast\n", "step 1, rank 1: 'fast' is no number of seconds"),
        (b"[" * 100_000, "is no JSON"),
        (b'{"traceEvents": [1]}', "is no timeline of chrome_trace"),
        (b'{"times": [[1]]}', "is no list of lists: give"),
        (b"[1, 2]", "is no list of lists"),
        (b"\xff\xfe\x00", "cannot be read: "),
    ],
)
def test_a_bad_file_is_refused_with_the_place_of_what_is_wrong(content, says, tmp_path):
    file = tmp_path / "times"
    file.write_bytes(content)
    assert re.match(f"{re.escape(str(file))}.*{says}", refused("simulate backups --times", file))
