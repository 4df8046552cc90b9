# SPDX-License-Identifier: Apache-2.0
"""Local SGD goes on without lost ranks, and makes an average again that some have not got."""

from __future__ import annotations

from threading import Event

import failing_ranks
import pytest
from cases import for_each, taking_turns
from gossip_models import params, same
from hypothesis import given, settings
from hypothesis import strategies as st
from local_loops import ALGORITHMS, PATIENT_S, Loop

import commrt
from commrt import Direct, Gossip
from commrt.buckets.engine import Engine
from commrt.errors import Place
from commrt.local_sgd import HeavyBall, LocalSGD, Nesterov
from commrt.quantization import Int8
from commrt.testing.processes import run_processes
from commrt.testing.ranks import run_ranks


def finished(world, algorithm, end, steps=14):
    """Train; the ranks that are left consolidate."""
    loop = Loop(world, algorithm).run(min(end, steps))
    if end < steps:
        return None
    loop.replica.consolidate()
    return params(loop.model), tuple(world.members), [loss.rank for loss in loop.replica.lost]


LOSING = [
    LocalSGD(4),
    LocalSGD(4, 2, outer=Nesterov(0.7, 0.6)),
    LocalSGD(4, 4, fragments=2),
    LocalSGD(3, 1, inner=Direct(), wire=Int8(feedback=True)),  # codes, and residuals
]


@for_each(("algorithm", "end"), [*taking_turns(LOSING, [1, 4, 5, 7]), (LOSING[1], 6)])
def test_the_others_go_on_without_a_rank_that_is_lost(algorithm, end):
    found = run_ranks(3, lambda world: finished(world, algorithm, end if world.rank == 1 else 99), timeout_s=PATIENT_S)
    assert found[1] is None
    assert found[0][1:] == found[2][1:] == ((0, 2), [1])
    assert same(found[0][0], found[2][0])


def test_no_rank_can_be_lost_while_another_one_still_connects_in_attach(monkeypatch):
    """Rank 1 has no transfer with rank 5, so nothing but `attach` itself makes it wait for that rank."""
    connect = Engine._connect_peers

    def slow_on_rank_5(engine, *args):
        if engine.world.rank == 5:
            Event().wait(0.5)
        connect(engine, *args)

    monkeypatch.setattr(Engine, "_connect_peers", slow_on_rank_5)
    found = run_ranks(
        6, lambda world: finished(world, LocalSGD(2), 0 if world.rank == 1 else 99, 4), timeout_s=PATIENT_S
    )
    assert [members for _, members, _ in (found[0], *found[2:])] == [(0, 2, 3, 4, 5)] * 5


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=25)
def test_the_others_go_on_without_ranks_that_are_lost_one_after_the_other(data):
    ranks, period = data.draw(st.integers(2, 6), "ranks"), data.draw(st.integers(1, 5), "period")
    delay, fragments = (
        data.draw(st.integers(0, period), "delay"),
        data.draw(st.integers(1, min(period, 3)), "fragments"),
    )
    gone = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1), "gone")
    ends = {rank: data.draw(st.integers(0, 13), f"end of {rank}") for rank in sorted(gone)}
    inner = data.draw(st.sampled_from([commrt.Torus2D(), Direct(), Gossip()]), "inner")
    algorithm = LocalSGD(period, delay, outer=HeavyBall(0.7, 0.3), fragments=fragments, inner=inner)
    found = run_ranks(ranks, lambda world: finished(world, algorithm, ends.get(world.rank, 99)), timeout_s=PATIENT_S)
    stay = [rank for rank in range(ranks) if rank not in gone]
    for rank in stay:
        assert found[rank][1] == tuple(stay)
        assert same(found[rank][0], found[stay[0]][0])


@pytest.mark.cpu_limit(6, reason="real ranks are lost")
@for_each(("algorithm", "number"), taking_turns([*ALGORITHMS[2:4], ALGORITHMS[5]], [0, 1, 3]))
def test_an_average_that_one_rank_has_not_got_is_made_again_by_all(algorithm, number):
    def body(world, fails):
        loop = Loop(world, algorithm)
        engine, calls = loop.replica._exchange.engine, iter(range(1000))
        run = engine.reduce_now

        def lost_at_the_last_moment(*args):
            span = run(*args)
            if next(calls) == number and fails and world.rank == 1:
                raise commrt.PeerLost("the connection broke", Place(1, 0))
            return span

        engine.reduce_now = lost_at_the_last_moment
        return params(loop.run(14).model), tuple(world.members)

    expected = run_ranks(3, lambda world: body(world, fails=False), timeout_s=PATIENT_S)
    found = run_ranks(3, lambda world: body(world, fails=True), timeout_s=PATIENT_S)
    assert {members for _, members in found} == {(0, 1, 2)}
    assert all(same(own, before) for (own, _), (before, _) in zip(found, expected, strict=True))


@pytest.mark.processes
@pytest.mark.parametrize("where", ["backward", pytest.param("exchange", marks=pytest.mark.slow)])
def test_the_others_go_on_without_a_process_that_is_killed(where):
    algorithm = LocalSGD(4, 2, outer=Nesterov(0.7, 0.6), fragments=2)
    outcomes = run_processes(4, failing_ranks.killed_in_local_sgd, algorithm, 2, where, limit_s=90)
    left = [outcome.value for rank, outcome in enumerate(outcomes) if rank != 2]
    assert outcomes[2].value is None
    assert [members for _, members in left] == [[0, 1, 3]] * 3
    assert len({weights for weights, _ in left}) == 1
