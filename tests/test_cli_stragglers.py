# SPDX-License-Identifier: Apache-2.0
"""``commrt simulate backups`` and ``commrt plan backups`` as a user calls them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from cases import for_each
from commands import invoke, refused, told

from commrt.tools.commands.options import BackupOptions
from commrt.tools.commands.simulate_backups import estimate_backups
from commrt.tools.planning.stragglers import step_time_s

FAST = ("--steps", "500")
BACKUP = ("simulate", "backups")
STEP = ("--model", "resnet50", "--wire", "bf16")


def test_simulate_backup_says_which_split_is_best_and_what_each_costs():
    record = told("simulate", "backups", "--ranks", "100", *FAST)
    assert record["best_quorum"] in range(94, 98)
    assert record["backups"] == 100 - record["best_quorum"]
    assert len(record["kth_time_s"]) == len(record["hours"]) == 100
    assert record["hours"][:49] == [None] * 49  # nothing was published for so few
    assert min(record["hours"][49:]) == record["hours"][record["best_quorum"] - 1] == pytest.approx(37.2, rel=0.03)
    assert record["law"]["name"] == "paper"
    assert record["sources"].count("as recalled") == 2


def test_the_same_seed_gives_the_same_answer_and_another_one_another():
    first, again, other = (told("simulate", "backups", *FAST, "--seed", seed)["kth_time_s"] for seed in "112")
    assert first == again != other


def test_the_table_shows_all_small_numbers_of_backups_and_some_larger_ones():
    output = invoke("simulate", "backups", *FAST).stdout
    shown = [int(number) for number in re.findall(r"^│ +(\d+) +│", output, re.MULTILINE)]
    assert shown == [52, 62, 70, 76, 81, 85, *range(88, 101)]
    assert "hours" in output
    assert re.search(r"^use [6-9] backups: the goal takes 0\.\d\d of the time without$", output, re.MULTILINE)
    assert re.search(r"the published rule, .*, says [3-6] \([3-6] to [3-6] in 90 % of resamplings\)", output)


def test_parameters_of_a_law_are_set_and_hours_that_nobody_knows_are_left_out():
    args = ("simulate", "backups", "--law", "exponential", "--ranks", "8", "--set", "constant_s=0", *FAST)
    record = told(*args)
    assert record["kth_time_s"][5:] == pytest.approx([1.2179, 1.7179, 2.7179], rel=0.1)
    assert record["hours"] is None
    assert record["law"] == {"name": "exponential", "constant_s": 0.0, "rate_per_s": 1.0}
    assert "hours" not in invoke(*args).stdout


def test_what_training_needs_is_assumed_as_the_options_say():
    def best(*args):
        return told("simulate", "backups", "--law", "slow", "--ranks", "8", *FAST, *args)["best_quorum"]

    assert best() == best("--exponent", "1") > best("--exponent", "0")
    assert told("simulate", "backups", *FAST)["iterations"] == {"name": "published"}


def test_ranks_that_finish_though_late_need_more_backups_than_the_published_rule_says():
    record = told("simulate", "backups", *FAST)
    assert 100 - record["best_quorum_if_late_finish"] > record["backups"]
    best = next(row for row in record["table"] if row["quorum"] == record["best_quorum_if_late_finish"])
    assert record["table"][-1]["late_finish_relative_time"] == 1
    assert best["late_finish_relative_time"] == min(row["late_finish_relative_time"] or 1 for row in record["table"])


@pytest.mark.parametrize(("law", "ranks"), [("slow", 64), ("slow", 9), ("exponential", 40)])
def test_the_chosen_number_of_backups_is_about_the_best_of_all_that_may_be(law, ranks):
    found = estimate_backups(BackupOptions(ranks, 500, 0, law, [], None, None))
    allowed = np.arange(ranks // 2 + 1, ranks + 1)
    goal_s = step_time_s(found.times_s, allowed) * found.goal.iterations(allowed)
    assert goal_s[found.best_if_late_finish["quorum"] - allowed[0]] <= 1.02 * goal_s.min()


def test_without_stragglers_no_backups_are_best():
    output = invoke("simulate", "backups", "--law", "slow", "--set", "chance=0", "--ranks", "4", *FAST).stdout
    assert "use 0 backups" in output


RECORDED = [[1.0, 1.1, 1.2, 9.0], [2.0, 2.1, 20.0, 2.2], [1.0, 1.0, 1.0, 1.0]]


@for_each(
    "text",
    [
        json.dumps(RECORDED),
        "\n".join(",".join(map(str, step)) for step in RECORDED),
        "\ufeffrank 0,rank 1,rank 2,rank 3\n\n" + "\r\n".join(", ".join(map(str, step)) for step in RECORDED),
    ],
)
def test_a_recorded_run_is_taken_as_it_is(text, tmp_path):
    file = tmp_path / "times"
    file.write_text(text)
    record = told("simulate", "backups", "--times", str(file))
    assert record["kth_time_s"] == pytest.approx(np.sort(RECORDED, axis=1).mean(axis=0).tolist())
    assert (record["ranks"], record["steps"], record["best_quorum"]) == (4, 3, 3)
    assert record["law"] == {"name": "recorded", "file": str(file)}
    assert record["best_quorum_if_late_finish"] == 3
    assert f"recorded, {file}" in invoke("simulate", "backups", "--times", str(file)).stdout
    plan = told("plan", "backups", "--backups", "auto", *STEP, "--times", str(file), "--ranks", "4")
    assert {each["backups"] for each in plan["plans"]} == {0, 1}


def test_a_timeline_gives_the_times_of_passes_without_what_was_waited(tmp_path):
    def event(rank, name, begin_ms, end_ms):
        return {
            "ph": "X",
            "pid": rank,
            "name": name,
            "ts": 1e3 * begin_ms,
            "dur": 1e3 * (end_ms - begin_ms),
            "args": {},
        }

    events = []
    for rank in range(3):
        for begin_ms in range(0, 500 + 100 * rank, 100):  # a forward pass of 10, and a backward pass that waits for 20
            events += [event(rank, "forward", begin_ms, begin_ms + 10)]
            events += [event(rank, "backward", begin_ms + 15, begin_ms + 50 + rank)]
            events += [event(rank, "wait", begin_ms + 30, begin_ms + 50)]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": [*events, event(1, "forward", 900, 910)]}))
    record = told("simulate", "backups", "--times", str(file))
    assert (record["ranks"], record["steps"]) == (3, 2)
    assert record["kth_time_s"] == pytest.approx([0.030, 0.031, 0.032])


@for_each(
    ("text", "says"),
    [
        (
            "",
            "holds no step: give a timeline, such as examples/mnist/train.py --trace writes, or write one list",
        ),
        ("[]", "holds no step"),
        ("[[]]", "step 0 has 0 times"),
        ("[[1, 2], [1]]", "step 1 has 1 times, step 0 has 2: give each rank's"),
        ("1,2\n1,2,3\n", "step 1 has 3 times, step 0 has 2"),
        ("[[1, 2], [1, null]]", "step 1, rank 1: None is no number of seconds above 0"),
        ("[[1, NaN]]", "step 0, rank 1: nan is no number of seconds"),
        ("[[1, -2]]", "step 0, rank 1: -2 is no number of seconds"),
        ("[[0, 1]]", "step 0, rank 0: 0 is no number of seconds"),
        ("[[1e999, 1]]", "step 0, rank 0: inf is no number of seconds"),
        (f"[[{10**400}, 1]]", "rank 0: 1000"),
        ("1,2\n3,fast\n", "step 1, rank 1: 'fast' is no number of seconds"),
        ("[[1, 2]", "is no JSON: .*; give a timeline, such as examples/mnist"),
        ("[" * 100_000, "is no JSON"),
        ('{"traceEvents": []}', "holds no step"),
        ('{"traceEvents": [1]}', "is no timeline of chrome_trace"),
        ('{"times": [[1]]}', "is no list of lists: give"),
        ("[1, 2]", "is no list of lists"),
    ],
)
def test_a_bad_file_is_refused_with_the_place_of_what_is_wrong(text, says, tmp_path):
    file = tmp_path / "times"
    file.write_text(text)
    assert re.match(f"{re.escape(str(file))}.*{says}", refused(*BACKUP, "--times", str(file)))


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    assert "cannot be read: " in refused("simulate", "backups", "--times", str(tmp_path / "none"))
    assert "cannot be read: " in refused("simulate", "backups", "--times", str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read: " in refused("simulate", "backups", "--times", str(tmp_path / "binary"))


@for_each(
    ("args", "says"),
    [
        (("simulate", "backups", "--ranks", "8"), "say nothing of 8 ranks: give --exponent"),
        (("simulate", "backups", "--ranks", "101"), "say nothing of 101 ranks: give --exponent"),
        (("simulate", "backups", "--exponent", "2"), "an exponent of 2: give one between 0"),
        (("simulate", "backups", "--set", "chance=0.5"), "--set chance=0.5: write NAME=NUMBER, .* common_sd, "),
        (("simulate", "backups", "--law", "slow", "--set", "chance"), "one of base_s, chance, low, high"),
        (("simulate", "backups", "--law", "slow", "--set", "chance=often"), "--set chance=often: write NAME=NUMBER"),
        (("simulate", "backups", "--law", "slow", "--set", "chance=2"), "chance is 2: it must be between 0 and 1"),
        (("simulate", "backups", "--steps", "1000000"), "give up to --steps "),
        (("simulate", "backups", "--times", "run.json", "--law", "slow"), "leave out --law, --set and --steps"),
        (("simulate", "backups", "--times", "run.json", "--steps", "9"), "leave out --law, --set and --steps"),
        (("plan", "backups", "--backups", "many", *STEP, *FAST), "--backups many: give auto, or a number"),
        (("plan", "backups", "--backups", "-1", *STEP, *FAST), "--backups -1: give auto, or a number"),
        (("plan", "backups", "--backups", "100", *STEP, *FAST), "backups=100 of 100 ranks leave 0"),
        (
            ("plan", "backups", "--backups", "20", "--ranks", "60", *STEP, *FAST),
            "no count of updates is known for 40 gradients",
        ),
    ],
)
def test_bad_input_is_one_sentence(args, says):
    assert re.search(says, refused(*args))


def test_a_recording_of_other_ranks_than_asked_for_is_refused(tmp_path):
    file = tmp_path / "times"
    file.write_text("[[1, 2]]")
    assert "holds times of 2 ranks, not of 3: leave --ranks out" in refused(
        "simulate", "backups", "--times", str(file), "--ranks", "3"
    )


def test_one_rank_and_many_work_too():
    one = told(*BACKUP, "--ranks", "1", "--exponent", "1", *FAST)
    assert (one["backups"], len(one["table"])) == (0, 1)
    assert told(*BACKUP, "--ranks", "300", "--exponent", "1", "--steps", "50")["backups"] < 60
