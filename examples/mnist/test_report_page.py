# SPDX-License-Identifier: Apache-2.0
"""``--report``: the page of made-up runs, that of a real one, and what is refused before a run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from base64 import b64decode
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import history
import pytest
import run_jobs
import torch
from commands import invoke
from dataset import Images
from history import AveragedStep, HistoryRecorder, Iteration, RankHistory, RunRecord
from job import Job
from report_page import page, prepare_report
from result import Result
from results_table import rows
from train import app, train_rank

from commrt.buckets.engine import Span
from commrt.errors import CommrtError, UsageError
from commrt.runtime.membership import Loss
from commrt.threads.recording import Timeline
from commrt.training import StepReport

CHROMIUM = shutil.which("chromium")
VOID = {"meta", "br", "img"}
PICTURE = "data:image/svg+xml;base64,"
RANKS, STEPS = 4, 6


def picture(url):
    assert url.startswith(PICTURE)
    return b64decode(url.removeprefix(PICTURE)).decode()


class Parsed(HTMLParser):
    """Elements that are opened and closed in order, their attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], Counter(), [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "img":
            self.words += re.findall(r"<!-- (.*?) -->", picture(dict(attrs)["src"]))  # what matplotlib writes in it
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def text(self):
        return " ".join(" ".join(self.words).split())


JOB = Job("torus2d", 1, 64, 0.05, 0, "fp32", 25.0, 60.0, 120.0)


def events(rank):
    """Steps of 10 ms, without the numbers that only some ways of averaging give to their waits."""
    made = []
    for step in range(STEPS):
        spans = [("forward", 0, 3000), ("backward", 3000, 5000), ("optimizer", 8000, 1000)]
        where = {"ph": "X", "pid": rank, "args": {}}
        made += [where | {"name": name, "ts": 1e4 * step + at, "dur": dur} for name, at, dur in spans]
    return made


def recorded(rank, members=lambda step: tuple(range(RANKS)), peers=lambda step: ()):
    iterations = [Iteration(step, 0.01 + 0.001 * rank, 2.0 / (step + 1), step / STEPS) for step in range(STEPS)]
    averaged = [
        AveragedStep(step, members(step), peers(step), rank in members(step), 0.002, 0.004, 1000 + rank)
        for step in range(STEPS)
    ]
    return RankHistory(rank, iterations, averaged, events(rank))


def a_run(algorithm, record, **given):
    late = dict.fromkeys(range(RANKS), 0)
    facts = (algorithm, "plain", RANKS, "fp32", 1, STEPS, 0.913, 1.25e-6, False, 5123.0, 0.0125, 0.0021, 0.004, 1000)
    return replace(Result(*facts, "", (), late, 0.0, record), **given)


def page_of(*runs):
    return page(runs, JOB.backups, [])


def synchronous():
    return a_run("torus2d", RunRecord("shared", tuple(map(recorded, range(RANKS)))))


def gossiping():
    """Rank 3 dies at step 3."""

    def members(step):
        return tuple(range(RANKS if step < 3 else 3))

    histories = tuple(recorded(rank, members, lambda step, rank=rank: ((rank + 1) % 3,)) for rank in range(3))
    record = RunRecord("shared", histories, (Loss(3, 3, "rank 2 found that <it> is gone"),))
    return a_run("gossip", record, lost=(3,))


def with_backups():
    """Of rank 0 the others never hear after step 1, and it tells nothing."""

    def members(step):
        return (0, 1, 2) if step < 2 else (1, 2, 3)

    record = RunRecord("gloo", tuple(recorded(rank, members) for rank in (1, 2, 3)))
    return a_run("backup", record, lost=(0,), late={1: 2, 2: 0, 3: 2}, saved_seconds=1.5)


def with_ddp():
    averaged = [AveragedStep(step, tuple(range(RANKS)), (), True, 0.003, None, None) for step in range(STEPS)]
    histories = tuple(replace(recorded(rank), averaged_steps=averaged) for rank in range(RANKS))
    return a_run("ddp", RunRecord("shared", histories), bytes_sent_per_step=None, comm_seconds=None)


RUNS = {
    "torus2d": synchronous,
    "gossip": gossiping,
    "backup": with_backups,
    "ddp": with_ddp,
}
FACTS = [("command", "train.py '<script>alert(1)</script>' \"&\""), ("torch", "2.13.0")]


@pytest.fixture(scope="module")
def of_all():
    runs = [make() for make in RUNS.values()]
    return runs, page(runs, JOB.backups, FACTS)


def test_the_page_is_well_formed_and_asks_for_nothing(of_all):
    _, text = of_all
    parsed = Parsed(text)
    for tag, name, value in parsed.attributes:
        assert name not in {"srcset", "data", "action"}, tag
        assert name != "src" or value.startswith(PICTURE), tag
        assert not name.startswith("on"), tag
        assert name != "href" or value.startswith("#"), value
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert parsed.tags.keys() & {"script", "link", "iframe", "base", "object"} == set()
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in parsed.attributes


def test_every_figure_of_the_table_is_on_the_page(of_all):
    runs, text = of_all
    said = Parsed(text).text()
    for name, *cells in rows(runs):
        assert " ".join([name, *cells]) in said


def test_what_comes_from_outside_is_text(of_all):
    _, text = of_all
    parsed = Parsed(text)
    assert FACTS[0][1] in parsed.text()
    assert "rank 2 found that <it> is gone" in parsed.text()


SAID = {
    "torus2d": [
        "All 4 ranks counted in each of 6 steps.",
        "rank 2 6 6 steps 12.00 ms 2.00 ms 4.00 ms 1,002 B 6,012 B",
        "torus 2x2: 4 ranks, 4 chunks, 4 steps",
        "torus2d, step 4: 10.00 ms",
    ],
    "gossip": [
        "rank 1 · · 6 · ",
        "Blue: it took part in the step",
        "Rank 3: step 2 was the last in which it counted; the others noticed in step 3: rank 2 found",
    ],
    "backup": [
        "Blue: it counted in the step; orange: it did not count; a column is a step",
        "rank 0 - - - - - - -",
        "Rank 0: step 1 was the last in which it counted",
        "torus 3x1: 3 ranks",
    ],
    "ddp": [
        "there is no schedule to show",
    ],
}


def test_a_run_is_told_by_what_its_ranks_noted():
    for name, sentences in SAID.items():
        text = Parsed(page_of(RUNS[name]())).text()
        assert [says for says in sentences if says not in text] == [], name


def test_a_run_of_which_nothing_was_noted_has_a_page_too():
    run = a_run("ring", None)
    text = Parsed(page_of(run)).text()
    assert "No step was recorded." in text
    assert "No rank that was left at the end recorded it." in text


def test_many_steps_share_columns_and_points():
    def repeated(its):
        iterations = [Iteration(step, 0.01, 1.0, 0.5) for step in range(10_000)]
        averaged = [AveragedStep(step, (0, 1, 2), (), True, 0.0, 0.0, 0) for step in range(10_000)]
        return replace(its, histories=(RankHistory(0, iterations, averaged, left_out=7),))

    run = with_backups()
    text = page_of(replace(run, steps=10_000, record=repeated(run.record)))
    assert len(text) < 400_000
    assert "a column is 63 steps" in text
    assert "7 later passes were not kept." in text


def test_steps_that_a_rank_did_not_see_are_known_from_others():
    record = with_backups().record
    assert record.members_by_step()[4] == {1, 2, 3}
    assert gossiping().record.mix_counts(RANKS)[2] == [6, 0, 0, 0]


# What is refused, and what is left when writing fails.


def foreign(folder):
    folder.mkdir()
    (folder / "report.html").write_text("<html>my own</html>")
    return folder


def a_file(path):
    path.write_text("")
    return path


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (foreign, "there is a report.html that commrt did not write"),
        (a_file, "nothing can be written there"),
        (lambda path: a_file(path) / "deeper", "nothing can be written there"),
        (lambda _: "", "the name of the folder is empty: give one, such as --report out"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_trained(make, says, tmp_path, monkeypatch):
    monkeypatch.setattr(run_jobs, "_start", lambda *_: pytest.fail("it trained"))
    job = replace(JOB, report=str(make(tmp_path / "out")))
    with pytest.raises(UsageError, match=f"^--report .*{says}"):
        run_jobs.run(train_rank, job, [], 4, as_json=False)


def test_the_missing_extra_is_named_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"matplotlib: pip install 'commrt\[demo\]'"):
        prepare_report(str(tmp_path))


def test_a_page_of_ours_is_written_over_and_folders_are_made(tmp_path):
    path = prepare_report(str(tmp_path / "a" / "b"))
    path.write_text(page_of(synchronous()))
    assert prepare_report(str(tmp_path / "a" / "b")) == path
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]


def test_a_page_that_fails_does_not_cost_the_table(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError("the disk is full")

    run = synchronous()
    monkeypatch.setattr(run_jobs, "page", fail)
    monkeypatch.setattr(run_jobs, "_start", lambda *_: [run])
    with pytest.raises(CommrtError, match="the run is over, but its page failed: OSError: the disk is full"):
        run_jobs.run(train_rank, replace(JOB, report=str(tmp_path)), [], 4, as_json=False)
    assert "91.3%" in capsys.readouterr().out


def test_the_record_is_not_in_the_json():
    assert "record" not in synchronous().facts()


# What a rank records.


def recorder_of(timeline=None):
    return HistoryRecorder(SimpleNamespace(rank=1, recorder=timeline))


def iterate(recorder, step, report=None):
    recorder.record_iteration(step, 0.5, torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 1]), report)


def test_an_iteration_is_recorded_with_what_averaging_told_once():
    recorder = recorder_of()
    report = StepReport(0, (0, 1), 0.25, (Span(0, 1.0, 1.5, 64),), received_from=frozenset({0}))
    iterate(recorder, 0, report)
    iterate(recorder, 1, report)
    iterations = recorder.history.iterations
    assert [(each.step, each.loss, each.accuracy) for each in iterations] == [(0, 0.5, 0.5), (1, 0.5, 0.5)]
    assert recorder.history.averaged_steps == [AveragedStep(0, (0, 1), (0,), True, 0.25, 0.5, 64)]
    assert RankHistory.from_json(recorder.history.to_json()) == recorder.history


def test_only_the_first_passes_are_recorded_as_a_timeline():
    recorder = recorder_of()
    world = recorder._world
    for step in range(history.TIMELINE_ITERATIONS + 5):
        if world.recorder is not None:
            world.recorder.begin("forward", {})
            world.recorder.end()
        iterate(recorder, step)
    assert world.recorder is None
    assert len(recorder.history.events) == history.TIMELINE_ITERATIONS


def test_a_timeline_that_was_asked_for_goes_on():
    asked = Timeline(1)
    recorder = recorder_of(asked)
    for step in range(history.TIMELINE_ITERATIONS):
        asked.begin("forward", {})
        asked.end()
        iterate(recorder, step)
    assert recorder._world.recorder is asked
    assert len(recorder.history.events) == history.TIMELINE_ITERATIONS


def test_a_history_ends_where_memory_would(monkeypatch):
    monkeypatch.setattr(history, "MAX_ITERATIONS", 3)
    recorder = recorder_of()
    for step in range(5):
        iterate(recorder, step)
    assert (len(recorder.history.iterations), recorder.history.left_out) == (3, 2)


# Real ones.


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # nothing that is forked here computes
def test_a_run_that_loses_a_worker_ends_with_its_page(tmp_path, monkeypatch):
    noise = Images(torch.randn(4000, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.arange(4000) % 10)
    monkeypatch.setattr(run_jobs, "load", lambda: (noise, Images(noise.pixels[:100], noise.digits[:100])))
    options = ["--algorithm", "gossip", "--inject", "kill:rank=2,step=9", "--batch-size", "198", "--report", tmp_path]
    result = invoke("--workers", "3", "--epochs", "1", *options, program=app)
    assert result.exit_code == 0, result.output
    said = Parsed((tmp_path / "report.html").read_text()).text()
    rows_told = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in result.stdout.splitlines()]
    told = [" ".join(cells) for cells in rows_told if len(cells) == 2]
    assert len(told) == 10
    assert [cells for cells in told if cells not in said] == []
    assert re.search(r"Rank 2: step \d+ was the last in which it counted; the others noticed in step \d+: ", said)
    assert re.search(r"rank 0 20 20 steps [\d.]+ ms", said)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on PATH")
def test_a_browser_has_nothing_to_complain_about(of_all, tmp_path):
    (tmp_path / "page.html").write_text(of_all[1])
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    options += [f"--user-data-dir={tmp_path}/profile", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command = [CHROMIUM, *options, "--enable-logging=stderr", "--dump-dom", f"file://{tmp_path}/page.html"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Content Security Policy" not in result.stderr
    assert "CONSOLE" not in result.stderr
    assert Parsed(result.stdout).tags["img"] >= 3
