# SPDX-License-Identifier: Apache-2.0
"""What record_curves.py records: its methods, each trained for a few steps."""

from __future__ import annotations

import numpy as np
import record_curves
from cases import for_each
from curve import Curve


def recorded(method, seed, steps):
    return Curve.parsed(record_curves.recorded(method, 2, seed, steps))


@for_each("name", record_curves.METHODS)
def test_each_method_can_be_repeated_and_is_what_its_curve_says(name):
    method = record_curves.METHODS[name]
    first, again = (recorded(method, seed=1, steps=9) for _ in range(2))
    assert (first.ranks, first.batch, first.seed, len(first.losses)) == (2, 32, 1, 9)
    assert first.method == {"local": "local, period 8"}.get(name, name)
    assert (first.signal is not None) == (name == "synchronous")
    np.testing.assert_array_equal(first.losses, again.losses)


def test_all_methods_begin_with_the_same_weights_and_images():
    losses = [recorded(method, seed=0, steps=1).losses for method in record_curves.METHODS.values()]
    assert losses[0] == losses[1] == losses[2]
