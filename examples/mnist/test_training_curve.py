# SPDX-License-Identifier: Apache-2.0
"""``--curve``: the file that it writes, what the file says about the run, and runs that have no curve."""

from __future__ import annotations

import numpy as np
import pytest
from cases import for_each
from commands import refused
from curve import Curve  # of studies/time_to_loss, which reads what is written here
from forked_commands import command
from job import Job, LocalSettings
from train import app
from training_curve import has_statistics, settings_of, training_of


def trained(file, *options):
    """Return the curve of two workers, in two steps of 999 images each."""
    args = ["--workers", "2", "--epochs", "1", "--batch-size", "1999", "--curve", file, *options]
    result = command(*args, program="train")
    assert result.returncode == 0, result.stderr
    return Curve.read(file)


def run_of(algorithm, wire="fp32", local=None):
    return Job(algorithm, 1, 64, 0.1, 0, wire, 25.0, 60.0, 120.0, local=local or LocalSettings())


@pytest.fixture(scope="module")
def of_an_all_reduce(tmp_path_factory):
    file = tmp_path_factory.mktemp("ring") / "a.jsonl"
    return trained(file, "--algorithm", "ring", "--seed", "3", "--compare", "gossip")


@pytest.mark.slow
@pytest.mark.processes
def test_train_writes_the_curve_of_its_first_run(of_an_all_reduce):
    curve = of_an_all_reduce
    assert (curve.method, curve.ranks, curve.batch, curve.seed) == ("synchronous", 2, 2 * 999, 3)
    assert curve.recipe["epochs"] == 1
    assert curve.losses == pytest.approx([2.3, 2.3], abs=0.1)
    assert (curve.noise > 0).all()


@pytest.mark.slow
@pytest.mark.processes
def test_ddp_has_the_same_curve_as_an_all_reduce(of_an_all_reduce, tmp_path):
    theirs = trained(tmp_path / "a.jsonl", "--algorithm", "ddp", "--seed", "3")
    for name in ("losses", "signal", "noise"):
        np.testing.assert_array_equal(getattr(of_an_all_reduce, name), getattr(theirs, name))  # two ranks: one sum


@pytest.mark.slow
@pytest.mark.processes
def test_local_sgd_has_a_curve_without_statistics(tmp_path):
    curve = trained(tmp_path / "a.jsonl", "--algorithm", "local", "--period", "2")
    assert (curve.method, curve.signal, curve.noise) == ("local, period 2", None, None)
    assert np.isfinite(curve.losses).all()


def test_a_curve_says_what_else_decides_how_training_converges():
    every = {"period": 8, "delay": 2, "fragments": 4, "outer": "0.7,0.5", "wire": "int4"}
    cases = [
        (run_of("torus2d"), "synchronous", {}),
        (run_of("ddp", "bf16"), "synchronous", {"wire": "bf16"}),
        (run_of("gossip"), "gossip", {}),
        (run_of("local"), "local", {"period": 16}),
        (run_of("local", "int4", LocalSettings(8, 2, 4, "0.7,0.5")), "local", every),
    ]
    for run, training, settings in cases:
        assert (training_of(run), settings_of(run)) == (training, settings), run


def test_statistics_are_recorded_where_each_step_averages_gradients_and_not_codes():
    runs = [("ring", "bf16"), ("ddp", "fp32"), ("direct", "int8"), ("gossip", "fp32")]
    assert [has_statistics(run_of(*each)) for each in runs] == [True, True, False, False]


@for_each(
    ("options", "said"),
    [
        (["--algorithm", "backup"], "--curve with backup"),
        (["--recipe", "large-batch"], "its batches grow"),
        (["--curve", "missing/a.jsonl"], "there is no folder"),
        (["--curve", ""], "the name of the file is empty"),
    ],
)
def test_what_has_no_curve_is_refused_before_anything_starts(options, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in refused("--curve", "a.jsonl", *options, program=app)
    assert [*tmp_path.iterdir()] == []


def test_a_run_that_is_compared_may_have_no_curve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused("--curve", "a.jsonl", "--compare", "backup", "--batch-size", "5000", program=app)
    assert said.startswith("--batch-size 5000")
