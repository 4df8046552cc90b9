# SPDX-License-Identifier: Apache-2.0
"""What local_accuracy.py measures with: its settings, each trained for a few steps, beside plain torch."""

from __future__ import annotations

import local_accuracy
import plain_local_sgd
import pytest
import torch
from cases import for_each
from mnist_images import FEEDS, small_images
from small_cnn import network
from torch.nn.functional import cross_entropy

from commrt import Torus2D
from commrt.local_sgd import LocalSGD, Mix

RULES = {
    "synchronous": None,
    "late": LocalSGD(4, 3),
    "one period late": LocalSGD(4, 4),
    "mixed": LocalSGD(3, 2, Mix(0.25)),
}


CASES = {case.name: case for case in local_accuracy.cases()}


def loss_of_few(model, nbytes=0.0):
    """In place of the results of 5,000 images, which take the longest."""
    train, _ = small_images()
    with torch.no_grad():
        return cross_entropy(model(train.pixels[::40]), train.digits[::40]).item()


@pytest.mark.slow
@for_each("case", CASES.values(), ids=CASES)
def test_each_setting_trains_and_ends_with_equal_replicas(monkeypatch, case):
    monkeypatch.setattr(local_accuracy, "assessed", loss_of_few)
    assert local_accuracy.trained(case, 0, steps=5, ranks=2) < loss_of_few(network(0)) - 1e-4


@for_each("name", ["as mix 0.5, int4", "NoLoCo, H 16"])
def test_a_run_can_be_repeated(name):
    first, again = (local_accuracy.trained(CASES[name], 0, steps=5, ranks=2) for _ in range(2))
    assert torch.equal(first.weights, again.weights)
    assert first.loss < 2.5


def test_settings_have_names_of_their_own():
    assert len(CASES) == len(local_accuracy.cases())


@pytest.mark.slow
@for_each("rule", RULES)
def test_the_runtime_trains_as_a_plain_loop_does(rule):
    algorithm = RULES[rule]
    other, plain = plain_local_sgd.trained(algorithm, [0, 1], steps=10, ranks=3)
    real = local_accuracy.trained(local_accuracy.Case(rule, algorithm or Torus2D()), 1, steps=10, ranks=3)
    torch.testing.assert_close(real.weights, plain.weights, rtol=0, atol=1e-6)
    assert not torch.allclose(real.weights, other.weights, rtol=0, atol=1e-3)


def test_a_row_has_the_bytes_relative_to_synchronous_training():
    synchronous, fourth = (local_accuracy.Case(f"{rule}", rule) for rule in (Torus2D(), LocalSGD(4)))
    nbytes = local_accuracy.trained(synchronous, 0, steps=4, ranks=2).nbytes
    assert "1/4 " in local_accuracy.row(fourth, [local_accuracy.trained(fourth, 0, steps=4, ranks=2)], nbytes)


def test_seeds_are_compared_one_by_one():
    found = plain_local_sgd.trained(None, [0, 1], steps=2, ranks=2)
    assert plain_local_sgd.paired(found, found) == "+0.00 +- 0.00"
    assert [list(part) for part in plain_local_sgd.groups(7)] == [[0, 1, 2, 3, 4], [5, 6]]


@for_each("feed", FEEDS)
def test_a_pass_gives_each_image_once(feed):
    steps = 4000 // 16 // 2
    batches = [pixels for pixels, _ in FEEDS[feed](0, steps, 2)]
    assert len(batches) == steps
    assert torch.cat(batches, 1).flatten(2).sum(2).flatten().unique().numel() > 3900
