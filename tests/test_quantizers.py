# SPDX-License-Identifier: Apache-2.0
"""Codings as settings, the rules that choose their bits, and the schedules that may carry them."""

from __future__ import annotations

from itertools import product

import pytest

import commrt
from commrt import Direct, HalvingDoubling, Ring, Torus2D
from commrt.algorithms import DoubleTree, direct, halving_doubling, ring
from commrt.errors import CommrtError, UsageError
from commrt.options import summing_steps
from commrt.proof.replay import prove
from commrt.proof.spec import all_reduce
from commrt.quantization import Adaptive, Int2, Int8, Quantizer, adaquant, dq


def fails_to_sum(algorithm, hosts):
    """What the proof finds wrong."""
    schedule = algorithm.schedule(0, algorithm.within * hosts)
    try:
        prove(schedule, all_reduce(schedule.ranks, schedule.chunks))
    except CommrtError as error:
        return error
    return None


def test_hosts_may_sum_among_themselves_in_any_way():
    inner = (HalvingDoubling(), DoubleTree(), Torus2D())  # a ring is proven by `make prove`
    rows = product([Direct(within, between) for between in inner for within in (2, 3, 4)], (1, 2, 3, 4, 7, 12))
    assert {row: error for row in rows if (error := fails_to_sum(*row))} == {}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"between": Ring()}, r"between=Ring\(\) without within=: give the number of ranks of a host too"),
        ({"within": 2, "between": Ring}, "makes no schedules: pass an object"),
    ],
)
def test_what_cannot_sum_between_hosts_is_refused(given, why):
    with pytest.raises(UsageError, match=why):
        Direct(**given)


def test_direct_refuses_ranks_that_do_not_fill_hosts():
    with pytest.raises(UsageError, match=r"6 ranks do not fill hosts of within=4: use Direct\(\)"):
        Direct(within=4).schedule(0, 6)


def test_schedules_that_sum_over_many_steps_are_known():
    schedules = (
        ring.all_reduce(8),
        halving_doubling.all_reduce(8),
        direct.all_reduce(8),
        direct.all_reduce_within(2, direct.all_reduce(4)),
    )
    assert [summing_steps(each) for each in schedules] == [7, 3, 1, 2]


NO_SENSE = {
    "blocks of 64, 128": lambda: Int8(block=100),
    "bits from 2 to 8": lambda: Quantizer(9),
    'use "nearest" or "stochastic"': lambda: Int8(rounding="up"),
    "diverges": lambda: Int2(rounding="stochastic"),
    "8 bits": lambda: Quantizer(4, is_float=True),
    "no function": lambda: Adaptive(3),
    "bits from least=5 to most=4": lambda: Adaptive(dq(1, 1), least=5, most=4),
    "target=0": lambda: dq(0, 10),
    "bits=4.0 ": lambda: Quantizer(4.0),
    "block=256.0,": lambda: Quantizer(4, block=256.0),
    "seed=1.5:": lambda: Quantizer(4, seed=1.5),
    "feedback='no'": lambda: Quantizer(4, feedback="no"),
}


def test_settings_that_make_no_sense_are_refused():
    for message, make in NO_SENSE.items():
        with pytest.raises(UsageError, match=message):
            make()


def test_bits_follow_the_norm_and_the_step():
    wire = Adaptive(dq(target=10.0, steps=100, decay=0.99))
    early, late = (wire.quantizer(commrt.quantization.Progress(step, 1.0)).bits for step in (0, 99))
    assert early < late
    assert wire.quantizer(commrt.quantization.Progress(99, 1e-9)).bits == 2
    assert wire.quantizer(commrt.quantization.Progress(99, float("nan"))).bits == 8


def test_bits_follow_the_loss():
    losses = iter([4.0, 1.0, 0.0])
    wire = Adaptive(commrt.quantization.adaquant(1.0, lambda: next(losses)))
    assert [wire.quantizer(commrt.quantization.Progress(step, 1.0)).bits for step in range(3)] == [2, 3, 8]


def test_the_first_loss_of_a_rule_can_be_given():
    losses = [float("nan"), 4.0, 1.0]
    rule = adaquant(3.0, lambda: losses.pop(0))
    assert [rule(None) for _ in range(3)] == [float("inf"), 3.0, 6.0]
    assert adaquant(3.0, lambda: 1.0, first=4.0)(None) == 6.0
