# SPDX-License-Identifier: Apache-2.0
"""Local SGD in a user's loop: states that are saved, loaded and refused, and models that leave."""

from __future__ import annotations

import pytest
from cases import for_each, on_ranks
from gossip_models import model_of, params, same
from local_loops import Loop

import commrt
from commrt.errors import DisagreementError, UsageError
from commrt.local_sgd import LocalSGD, Nesterov
from commrt.testing.ranks import run_ranks


@pytest.mark.slow
@for_each(
    ("steps", "period", "delay", "is_refused"), [(5, 3, 3, True), (8, 4, 3, True), (5, 6, 4, True), (3, 5, 1, False)]
)
@on_ranks(2)
def test_period_and_delay_change_only_where_nothing_is_under_way(world, steps, period, delay, is_refused):
    state = Loop(world, LocalSGD(4, 4)).run(steps).state()
    loop = Loop(world, LocalSGD(period, delay))
    if not is_refused:
        assert loop.load(state).run(4).replica.step == steps + 4
        return
    with pytest.raises(UsageError, match=rf"averages in flight of period=4, delay=4.*period={period}, delay={delay}"):
        loop.load(state)


@on_ranks(2)
def test_a_checkpoint_holds_what_is_under_way(world):
    loop = Loop(world, LocalSGD(4, 3, fragments=2)).run(5)
    assert [part["in_flight"] is not None for part in loop.replica.state_dict()["fragments"]] == [True, False]


@on_ranks(2)
def test_a_state_of_other_training_begins_anew_from_the_weights(world):
    loop = Loop(world, commrt.Torus2D()).run(3)
    other = Loop(world, LocalSGD(2, outer=Nesterov()), model_of(1))
    other.load(loop.state())
    assert (same(other.anchors(), params(loop.model)), other.replica.step) == (True, 3)


def test_other_weights_are_taken_for_the_anchor_by_overwrite_with_first():
    def body(world):
        loop = Loop(world, LocalSGD(4, 2)).run(5)
        loop.model.load_state_dict(model_of(2 + world.rank).state_dict())
        loop.replica.overwrite_with_first()
        assert same(loop.anchors(), params(model_of(2)))
        return params(loop.run(9).model)

    run_ranks(2, body)


@for_each(
    ("change", "message"),
    [
        (lambda state: {**state, "fragments": state["fragments"][:1]}, "1 fragments .* attached with 2"),
        (lambda state: {**state, "step": -1}, "without a step number"),
        (
            lambda state: {**state, "fragments": [{**part, "anchors": {}} for part in state["fragments"]]},
            "none as the anchor",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, message):
    def body(world):
        loop = Loop(world, LocalSGD(4, 2, fragments=2)).run(5)
        with pytest.raises(UsageError, match=message):
            loop.replica.load_state_dict(change(loop.replica.state_dict()))
        return loop.replica.step

    assert run_ranks(2, body) == [5, 5]


def test_ranks_that_load_other_anchors_are_told():
    def body(world):
        loop = Loop(world, LocalSGD(4)).run(5)
        state = loop.replica.state_dict()
        if world.rank:
            state["fragments"][0]["anchors"]["0.bias"][0] += 1
        with pytest.raises(DisagreementError, match="anchors"):
            loop.replica.load_state_dict(state)
        return True

    assert run_ranks(2, body)
