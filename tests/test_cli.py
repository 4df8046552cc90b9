# SPDX-License-Identifier: Apache-2.0
"""The command as a user calls it: its help, its exit codes, what it refuses, and what it proves."""

import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from cases import for_each
from commands import app, built, commands_of, ended, invoke, told

import commrt
from commrt.algorithms.catalogue import candidates

NO_TORCH = "import sys; sys.modules['torch'] = None; from commrt.tools.commands.app import main; main()"
STARTS = {
    "commrt": [str(Path(sys.executable).with_name("commrt"))],
    "python -m commrt": [sys.executable, "-m", "commrt"],
    "without torch": [sys.executable, "-c", NO_TORCH],
}


@for_each(("line", "steps"), [("torus2d --ranks 12 --grid 3x4", 10), ("direct --ranks 6 --within 3", 4)])
def test_verify_reports_the_cost_of_the_shape_that_was_asked_for(line, steps):
    record = told(f"verify {line}")
    ranks = record["ranks"]
    cost = (True, steps, pytest.approx(2 * (ranks - 1) / ranks))
    assert (record["ok"], record["steps"], record["bytes_per_rank"]) == cost


def test_verify_proves_one_schedule_of_a_collective_or_all():
    one = told("verify broadcast --schedule tree --ranks 12 --root 3")["schedules"]
    every = told("verify broadcast --ranks 12")["schedules"]
    assert (list(one), list(every)) == (["tree"], [*candidates("broadcast", 12)])
    assert (one["tree"]["collective"], one["tree"]["steps"]) == ("broadcast", 4)


@for_each(
    ("line", "words"),
    [
        ("verify torus2d", "0  add  0->1 [2:4)"),
        ("verify BackupWorkers --ranks 3", "3 ranks is a correct all_reduce"),
        ("verify ring --json", '"shown": ["ring'),
        ("verify barrier --json", '"shown": "'),
        ("verify ring", "adds in several orders: chunk 0 as (0 + (3 + (1 + 2))), and chunk 1 as "),
        ("verify all_to_all --ranks 3 --schedule pairwise", "1  copy  0->2 [2:3)"),
        ("verify gossip --ranks 4", "after 2 steps every rank holds exactly the mean; 0 of the differences"),
        ("verify gossip --ranks 5", "is a correct doubly_stochastic"),
        ("verify gossip --ranks 5", "holds 0.625 to 1.25 times its share of each; 0.202 of the differences"),
        ("verify gossip --ranks 8", "left at most; ranks have met all others directly after 25 steps"),
        ("verify gossip --ranks 8 --topology hypercube", "hypercube 0"),
        ("verify gossip --ranks 8 --within 2", "left at most; rows of 2 have met all others directly after 5 steps"),
    ],
)
def test_verify_says_what_is_proven_and_can_show_the_schedule(line, words):
    assert words in invoke(line, "--show").stdout


BACKUPS = "--model resnet50 --wire bf16 --steps 500"
INT4 = "--nbytes 51.1e6 --wire int4"
REFUSED = [
    ("verify tree --json", "no algorithm is called 'tree': choose one of .*direct, .*gossip"),
    ("verify all_gather --schedule doubling --ranks 6", "choose one of .*ring, .*direct"),
    ("verify broadcast --root 4", r"choose one of 0\.\.3"),
    ("verify all_gather --root 1", "all_gather has no root: leave --root out"),
    ("verify broadcast --grid 2x2", "a collective takes --schedule and --root: leave --grid out"),
    ("verify ring --root 1", "ring is no collective: leave --root out"),
    ("verify ring --backups 1", "--backups is for backup, not for ring: leave it out"),
    ("verify torus2d --grid 3by3", "write it as 4x3"),
    ("verify ring --both-ways", "--both-ways is for torus2d, not for ring: leave it out"),
    ("verify torus2d --within 2", "--within is for .*double_tree, .*rings.*, not for torus2d"),
    (f"verify {'9' * 5000}", r"no algorithm is called '9+ \.\.\. 9+': choose one of"),
    ("simulate exchange ring --nbytes inf", "--nbytes inf: give a number"),
    ("simulate exchange ring --nbytes 1 --cluster nowhere", "no cluster is called 'nowhere': there are abci, "),
    ("simulate exchange local --nbytes 1", "of local are simulated by another command: commrt simulate local"),
    (f"simulate exchange ring --ranks 60000 --cluster ethernet-10g {INT4}", "cannot carry ring: codes do not add.*dir"),
    (f"simulate exchange gossip --ranks 8 {INT4}", "with gossip: .* or Direct"),
    ("simulate step ring --model 1e6", "how long a step of 1,000,000 parameters computes on abci is not known"),
    ("simulate step ring --model resnet50 --batch 4 --compute-ms 5", "both say how long a step computes"),
    ("simulate step ring --model vgg", "--model vgg: give resnet50, vgg_a, overfeat_fast, cd_dnn, transformer:"),
    ("simulate step ring --model 1e6 --bucket-cap-mb inf", "--bucket-cap-mb inf: give a number"),
    ("simulate step ring --model 1e6 --compute-ms 1 --jitter 1 --steps 1000000000", "give up to --steps 2500000"),
    ("simulate step backup --model resnet50", "by another command: commrt simulate backups"),
    ("simulate backups --ranks 101", "say nothing of 101 ranks: give --exponent"),
    ("simulate backups --set chance=0.5", "--set chance=0.5: write NAME=NUMBER, .* common_sd, "),
    ("simulate backups --steps 1000000", "give up to --steps 200000"),
    ("simulate backups --times run.json --law slow", "leave out --law, --set and --steps"),
    (f"plan backups --backups many {BACKUPS}", "--backups many: give auto, or a number"),
    (f"plan backups --backups 100 {BACKUPS}", "backups=100 of 100 ranks leave 0"),
    (f"plan backups --backups 20 --ranks 60 {BACKUPS}", "no count of updates is known for 40 gradients"),
    ("plan backups --ranks 8 --backups 1 --law slow --model resnet50 --wire int4", "such as int8"),
    (f"plan exchange --ranks 4097 --cluster ethernet-10g {INT4}", "no schedule carries codes between 4,097 ranks"),
    ("plan collective broadcast", "say how much is exchanged: --nbytes"),
    ("plan collective broadcast --nbytes 1 --ranks 4097", "a collective is planned up to 4,096 ranks"),
    ("draw schedule ring --out ring.txt", "--out ring.txt: give a file that ends in .svg, .png, .pdf"),
    ("draw schedule ring --out /nowhere/a.svg", "--out /nowhere/a.svg cannot be written: there is no folder /nowhere"),
    ("draw scaling --model resnet50 --ranks 8 --out a.svg", "8 ranks: how algorithms scale is drawn"),
    ("draw step gossip --model resnet50 --out a.svg", "gossip exchanges between steps"),
    ("probe --out b.toml --timeout-s nan", "--timeout-s=nan is no deadline"),
    ("probe --out a.toml", "--out a.toml is a folder: give a file, such as a.toml/mine.toml"),
    (f"probe --out {'1' * 300}.toml", "--out: no file can have this name"),
]


@for_each(("line", "words"), REFUSED)
def test_bad_input_is_one_line_on_standard_error_and_exit_code_2(line, words, tmp_path, monkeypatch):
    (tmp_path / "a.toml").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    code, out, err = ended(line)
    assert (code, out) == (2, "")
    assert re.fullmatch(f"commrt: .*{words}.*\n", err), err
    assert len(err) < 2000


def test_control_characters_are_not_printed_and_empty_words_are_refused():
    assert r"no algorithm is called 'a\nb\x1b" in ended("verify", "a\nb\x1b[31m")[2]
    assert "the name of the file is empty: give one, such as --out mine.toml" in ended("probe --out", "")[2]


@for_each(
    ("line", "words"),
    [
        ("verify", "Missing argument"),
        ("train --workers 2", "No such command 'train'"),
        ("simulate exchange gossip --json", "Missing option '--nbytes'"),
        ("simulate backups --cluster abci", "No such option: --cluster"),
    ],
)
def test_an_incomplete_line_or_options_of_another_command_end_with_code_2_and_are_named(line, words):
    code, out, err = ended(line)
    assert (code, out) == (2, "")
    assert words in err


COUNTED = [names for names, command in commands_of(built(app)) for param in command.params if "--ranks" in param.opts]


@for_each(("names", "ranks"), product(COUNTED, [0, 65537]))
def test_numbers_of_ranks_that_nobody_has_are_refused(names, ranks):
    code, out, err = ended(*names, "--ranks", ranks)
    assert (code, out) == (2, "")
    assert "Invalid value for '--ranks'" in err


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_the_command_works_however_it_is_started_and_needs_no_torch(start):
    version, good, bad = (
        subprocess.run([*STARTS[start], *line.split()], capture_output=True, text=True, timeout=60, check=False)
        for line in ("--version", "verify ring", "verify tree")
    )
    assert (version.returncode, version.stdout, version.stderr) == (0, f"commrt {commrt.__version__}\n", "")
    assert (good.returncode, good.stderr) == (0, "")
    assert "ring on 4 ranks is a correct all_reduce" in good.stdout
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("commrt: no algorithm is called 'tree': choose one of ")


def test_help_is_short_and_names_each_command_and_exit_code():
    output = invoke("").output
    names = re.findall(r"^│ (\w+) ", output, re.MULTILINE)
    assert names == ["verify", "simulate", "plan", "draw", "probe", "doctor"]
    assert "0 success, 1 runtime failure, 2 invalid input, 130 interrupted" in output
    assert len(output.splitlines()) <= 30
