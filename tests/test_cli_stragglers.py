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

BACKUPS = "simulate backups --steps 500"
RECORDED = [[1.0, 1.1, 1.2, 9.0], [2.0, 2.1, 20.0, 2.2], [1.0, 1.0, 1.0, 1.0]]


@pytest.fixture(scope="module")
def record():
    return told(BACKUPS)


def test_simulate_backups_says_which_split_is_best_and_what_each_costs(record):
    assert record["best_quorum"] in range(94, 98)
    assert record["backups"] == 100 - record["best_quorum"]
    assert len(record["kth_time_s"]) == len(record["hours"]) == 100
    assert record["hours"][:49] == [None] * 49  # nothing was published for so few
    assert min(record["hours"][49:]) == record["hours"][record["best_quorum"] - 1] == pytest.approx(37.2, rel=0.03)
    assert (record["law"]["name"], record["iterations"]) == ("paper", {"name": "published"})
    assert record["sources"].count("as recalled") == 2


def test_the_same_seed_gives_the_same_answer_and_another_one_another(record):
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
