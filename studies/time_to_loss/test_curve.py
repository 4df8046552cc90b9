# SPDX-License-Identifier: Apache-2.0
"""Recorded curves, and the files that hold them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cases import for_each
from curve import GOSSIP, LOCAL, Curve
from made_curves import save

from commrt.errors import UsageError


def test_a_curve_is_read_as_it_was_written(tmp_path: Path) -> None:
    losses, noise = np.array([2.3, 1.25]), np.array([0.5, float("nan")])
    curve = Curve(LOCAL, 4, 64, losses, {"period": 8}, seed=2, signal=losses / 7, noise=noise)
    save(curve, tmp_path / "a.jsonl")
    found = Curve.read(tmp_path / "a.jsonl")
    assert (found.method, found.ranks, found.batch, found.seed) == ("local, period 8", 4, 64, 2)
    for name in ("losses", "signal", "noise"):
        np.testing.assert_array_equal(getattr(found, name), getattr(curve, name))


def test_a_curve_without_statistics_of_gradients_is_read(tmp_path: Path) -> None:
    save(Curve(GOSSIP, 2, 2, np.array([1.0])), tmp_path / "a.jsonl")
    assert Curve.read(tmp_path / "a.jsonl").noise is None


@for_each(
    ("text", "said"),
    [
        ("", "is no curve"),
        ("[]\n", "line 1: give an object"),
        ("{\n", "line 1 is no JSON"),
        ('{"commrt_curve": 2}\n', "must say commrt_curve 1"),
        ('{"commrt_curve": 1}\n{"loss": 1}\n', "lacks something: KeyError"),
        ('{"commrt_curve": 1, "training": "gossip", "ranks": 1, "batch": 1, "settings": {}, "seed": 0}\n', "0 steps"),
        ('{"commrt_curve": 1}\n{"loss": 1}\n{"step": 1}\n', "a step lacks a number for loss"),
    ],
)
def test_a_malformed_curve_is_refused_with_its_place(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=said):
        Curve.read(tmp_path / "a.jsonl")


@for_each(
    ("settings", "expected"),
    [
        ({}, [9, 1, 5, 6, 2, 7, 8]),
        ({"period": 3}, [9, 9, 9, 6, 6, 6, 8]),
        ({"period": 3, "delay": 1}, [9, 1, 1, 1, 2, 2, 2]),
        ({"period": 8, "delay": 8}, [9, 1, 5, 6, 2, 7, 8]),
        ({"period": "often"}, [9, 1, 5, 6, 2, 7, 8]),
    ],
)
def test_the_loss_of_local_sgd_is_that_after_an_average(
    settings: dict[str, int | float | str], expected: list[int]
) -> None:
    losses = np.array([9.0, 1.0, 5.0, 6.0, 2.0, 7.0, 8.0])
    assert Curve(LOCAL, 2, 2, losses, settings).common_losses.tolist() == expected


HEAD = {"commrt_curve": 1, "training": "gossip", "ranks": 2, "batch": 4, "settings": {}, "seed": 0}


@for_each(
    ("changed", "said"),
    [
        ({"ranks": 2.5}, "ranks=2.5: give a whole number"),
        ({"ranks": True}, "ranks=True: give a whole number"),
        ({"training": ["gossip"]}, "training must be a text"),
        ({"settings": [1]}, "settings an object of numbers and texts"),
        ({"settings": {"period": [8]}}, "settings an object of numbers and texts"),
    ],
)
def test_a_head_of_other_kinds_is_refused_with_the_file(changed: dict[str, object], said: str, tmp_path: Path) -> None:
    text = "".join(f"{json.dumps(line)}\n" for line in (HEAD | changed, {"loss": 1.0}))
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"a\.jsonl") as refusal:
        Curve.read(tmp_path / "a.jsonl")
    assert said in str(refusal.value)


def test_a_huge_loss_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{json.dumps(HEAD)}\n{{"loss": 1{"0" * 400}}}\n', encoding="utf-8")
    with pytest.raises(UsageError, match="a step lacks a number for loss"):
        Curve.read(tmp_path / "a.jsonl")


def test_a_period_far_beyond_the_run_needs_no_memory() -> None:
    assert Curve(LOCAL, 2, 2, np.array([3.0, 2.0]), {"period": 10**12}).common_losses.tolist() == [3.0, 3.0]


@for_each("order", [slice(None, None, 10), slice(None, None, -1)])
def test_a_curve_without_all_steps_in_order_is_refused(tmp_path, order):
    file = tmp_path / "a.jsonl"
    save(Curve("synchronous", 1, 16, np.ones(40)), file)
    head, *steps = file.read_text().splitlines()
    file.write_text("\n".join([head, *steps[order]]))
    with pytest.raises(UsageError, match=r"step [01] comes as (10|39): a curve has all steps in order"):
        Curve.read(file)


def test_losses_of_two_dimensions_are_refused():
    with pytest.raises(UsageError, match="must be a row of numbers, not of 2 dimensions"):
        Curve("synchronous", 1, 16, np.ones((3, 2)))
