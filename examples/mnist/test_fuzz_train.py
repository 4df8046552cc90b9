# SPDX-License-Identifier: Apache-2.0
"""Whatever is typed after ``train.py``: it works,
or it is refused with exit code 2 and one line.
"""

from __future__ import annotations

import re

import pytest
import run_jobs
from commands import ended
from fuzzed_lines import (
    ALGORITHM,
    COUNT,
    FILE,
    LOCAL,
    RANKS,
    SIZE,
    drawn_options,
    mostly,
    told_or_refused,
)
from fuzzing import TEXTS, cases, in_time, met
from hypothesis import given
from hypothesis import strategies as st
from inject_faults import check, parse
from train import app

OPTIONS = {
    "--workers": RANKS, "--algorithm": ALGORITHM, "--backups": COUNT, "--compare": ALGORITHM,
    "--epochs": COUNT, "--batch-size": mostly("64", "4000"), "--lr": SIZE,
    "--recipe": mostly("plain", "large-batch"), "--seed": mostly("0", "-1"),
    "--wire": mostly("bf16", "int2", "float8"), "--bucket-cap-mb": SIZE, "--timeout-s": SIZE,
    "--start-timeout-s": SIZE, "--trace": FILE, "--json": None, **LOCAL,
    "--outer": mostly("0.7,0.9", "1,0", "0.7", "nan,0", "1e400,0", "0.7,0.9,1", ","),
    "--inject": mostly(
        "kill:rank=0,step=1", "slow:prob=0.1,seconds=1", "kill:rank=1,step=2", "stop:rank=0"
    ),
}  # fmt: skip


@st.composite
def lines(draw):
    """A command line."""
    return drawn_options(draw, OPTIONS)


@pytest.fixture
def nothing_starts(monkeypatch, tmp_path):
    """No worker, and a folder to write to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_jobs, "require_images", lambda: None)
    monkeypatch.setattr(run_jobs, "_start", lambda train_rank, jobs, workers: [])
    monkeypatch.setattr(run_jobs, "_report", lambda results, as_json: None)


@cases(60)
@given(words=lines())
def test_train_takes_or_refuses_any_line(nothing_starts, words):
    told_or_refused(app, words, may_be_silent=True)


FIELDS = st.sampled_from(["rank", "step", "prob", "seconds", "low", "high", "kind", ""])
PARTS = st.builds("{}={}".format, FIELDS, mostly("0", "1", "0.5")) | TEXTS


@cases(100)
@given(
    st.builds(
        "{}:{}".format,
        mostly("kill", "slow", "stop", bad=TEXTS),
        st.lists(PARTS, max_size=5).map(",".join),
    )
    | TEXTS
)
def test_a_fault_of_any_text_is_one_or_is_refused_in_words(text):
    fault = met(parse, text)
    if fault is not None:
        met(check, fault, 4, 62)


def test_a_name_that_no_file_can_have_is_refused_in_one_line(nothing_starts):
    with in_time():
        code, out, err = ended("--trace", "1" * 300, program=app)
    assert (code, out) == (2, "")
    assert re.fullmatch("commrt: --trace: no file can have this name.*\n", err)
