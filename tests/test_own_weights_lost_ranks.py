# SPDX-License-Identifier: Apache-2.0
"""Gossip and local SGD go on without whom they lose: by death, by an end of its own, one or several, at any instant."""

import gc
import logging
import os
import signal
import threading
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from weakref import ref

import failing_ranks
import pytest
import torch
from cases import for_each, on_ranks, taking_turns
from gossip_models import model_of, params, same
from hypothesis import given, settings
from hypothesis import strategies as st
from local_loops import ALGORITHMS, Loop
from peer_group import wait_until
from torch.distributed import HashStore

import commrt
from commrt import Direct, Gossip
from commrt.errors import DisagreementError, Place, UsageError
from commrt.local_sgd import LocalSGD, Nesterov
from commrt.quantization import Int8
from commrt.runtime import connection
from commrt.testing import ranks as rank_threads
from commrt.testing.processes import run_processes
from commrt.training.join_progress import JoinProgress
from commrt.transport.names import TRANSPORTS

STEPS, PATIENT_S = 14, 30.0
run_ranks = partial(rank_threads.run_ranks, timeout_s=PATIENT_S)
gossip_loop = partial(Loop, make=torch.optim.SGD)


def finished(world, algorithm, ends):
    """Train up to this rank's end; those who work to the last become equal. Notes whom each heard, and who is left."""
    loop, heard = gossip_loop(world, algorithm), []
    for _ in range(ends.get(world.rank, STEPS)):
        loop.run(1)
        if isinstance(algorithm, Gossip):
            loop.replica.drain()
            heard.append(loop.replica.last.received_from)
    if world.rank not in ends:
        loop.replica.consolidate()
    loop.heard, loop.members = heard, tuple(world.members)
    return loop


def sources(algorithm, step, members, rank):
    steps = algorithm.among(len(members)).schedule(step, len(members)).steps()
    pairs = (pair for each in steps for pair in zip(each.src.tolist(), each.dst.tolist(), strict=True))
    return {members[src] for src, dst in pairs if members[dst] == rank}


def require_they_went_on(loops, algorithm, gone):
    stay = [rank for rank in range(len(loops)) if rank not in gone]
    for rank in stay:
        loop = loops[rank]
        assert loop.members == tuple(stay)
        assert {loss.rank for loss in loop.replica.lost} == {*gone}
        assert same(params(loop.model), params(loops[stay[0]].model))
        resumed = max(loss.step for loss in loop.replica.lost)
        wanted = [sources(algorithm, step, stay, rank) for step in range(resumed, STEPS)] if loop.heard else []
        assert loop.heard[resumed:] == wanted


LOSING = {
    "a hypercube that has lost its shape": (Gossip("hypercube"), 4, 3),
    "rows of which one has a gap": (Gossip(within=2), 6, 3),
    "one row": (Gossip(within=2), 2, 3),
    "as an average leaves": (LocalSGD(4, 2, outer=Nesterov(0.7, 0.6)), 3, 4),
    "as an average comes": (LocalSGD(4, 2, outer=Nesterov(0.7, 0.6)), 3, 6),
    "fragments": (LocalSGD(4, 4, fragments=2), 3, 5),
    "codes and residuals": (LocalSGD(3, 1, inner=Direct(), wire=Int8(feedback=True)), 3, 7),
}


@for_each(("algorithm", "ranks", "end"), LOSING.values(), ids=LOSING)
def test_the_others_go_on_without_a_rank_that_is_lost(algorithm, ranks, end):
    loops = run_ranks(ranks, lambda world: finished(world, algorithm, {1: end}))
    require_they_went_on(loops, algorithm, {1})


def test_a_loss_is_logged_once_and_reported(caplog):
    with caplog.at_level(logging.WARNING, "commrt"):
        outcomes = run_ranks(3, lambda world: finished(world, Gossip(), {1: 4}))
    (loss,) = outcomes[0].replica.lost
    told = f"commrt: rank 1 is lost, as the others noticed in step {loss.step}: it closed its world; 2 ranks go on"
    assert [record.getMessage() for record in caplog.records] == [told]
    assert f"step {loss.step}: rank 1 is lost" in outcomes[2].replica.report()


@for_each(("batches", "dies_at"), [((3, 6, 9, 12), 5), ((3, 9, 3), 7)], ids=["one of several", "the last with data"])
def test_the_remaining_ranks_end_equal_if_rank_1_is_lost_in_join_and_are_told_why(batches, dies_at):
    def body(world):
        loop = gossip_loop(world, Gossip())
        with loop.replica.join():
            loop.run(dies_at if world.rank == 1 else batches[world.rank])
            if world.rank == 1:
                raise OSError("the disk is full")
        seen.append((params(loop.model), loop.replica.step, tuple(world.members), loop.replica.lost))

    seen = []
    with pytest.raises(OSError, match="the disk is full"):
        run_ranks(len(batches), body)
    stay = tuple(rank for rank in range(len(batches)) if rank != 1)
    assert len(seen) == len(stay)
    for found, step, members, lost in seen:
        assert same(found, seen[0][0])
        assert step == seen[0][1] >= max(batches[rank] for rank in stay)
        why = "it gave up: the disk is full"
        assert (members, [(loss.rank, loss.why) for loss in lost]) == (stay, [(1, why)])


def test_ranks_without_data_follow_one_that_is_lost_to_the_step_that_it_had_begun():
    store, membership = HashStore(), SimpleNamespace(any_gone=lambda _: False)
    world = SimpleNamespace(rank=0, members=(0, 1, 2), timeout_s=PATIENT_S, membership=membership)
    progress = JoinProgress(store, world)
    store.multi_set(["1", "2"], ["7 1", "3 0"])
    world.members = (0, 2)  # another rank may have seen those 7 steps before
    assert [*progress.outlast(3)] == [3, 4, 5, 6]
    assert progress.last() == 0


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=8)
def test_a_ring_shuffle_loses_only_the_samples_of_a_lost_rank(data):
    staleness, ranks, kept = data.draw(st.integers(0, 1), "staleness"), data.draw(st.integers(3, 6), "ranks"), 8
    gone, last = data.draw(st.integers(0, ranks - 1), "gone"), data.draw(st.integers(0, 11), "last step")

    def body(world):
        loop = gossip_loop(world, Gossip(staleness=staleness))
        ring = commrt.RingShuffle((torch.arange(kept) + kept * world.rank,), batch_size=2, world=world)
        for _ in range(4):
            for _ in ring:
                if world.rank == gone and loop.step == last:
                    return None
                loop.run(1)
        ring.drain()
        return ring.state_dict()["samples"][0].tolist()

    held = [samples for samples in run_ranks(ranks, body) if samples is not None]
    left = [sample for samples in held for sample in samples]
    assert len(held) == ranks - 1
    assert len(left) == len(set(left)) == kept * (ranks - 1)


@for_each(
    "make_loops",
    [
        lambda world: [gossip_loop(world, Gossip(payload="gradients"))],
        lambda world: [gossip_loop(world, Gossip(), model_of(seed)) for seed in (0, 1)],
    ],
    ids=["gradients", "two models"],
)
def test_what_has_no_weights_of_its_own_or_no_step_in_common_ends_with_a_lost_rank(make_loops):
    def body(world):
        loops = make_loops(world)
        for _ in range(1 if world.rank == 1 else 5):
            for loop in loops:
                loop.run(1)
        for loop in loops:
            loop.replica.drain()

    with pytest.raises(commrt.PeerLost):
        run_ranks(2, body)


def is_collected(kept):
    gc.collect()
    return kept() is None


@for_each("how", ["detached", "dropped"])
def test_a_model_that_gossips_after_another_was_detached_or_dropped_survives_a_lost_rank(how):
    def body(world):
        loop = gossip_loop(world, Gossip()).run(1)
        loop.replica.drain()
        if how == "detached":
            loop.replica.detach()  # the variable keeps it alive
        else:
            kept = ref(loop.replica)
            del loop
            wait_until(lambda: is_collected(kept))  # not while another rank collects
        return finished(world, Gossip(), {1: 4}).replica.lost

    first, _, last = run_ranks(3, body)
    assert [loss.rank for loss in first] == [loss.rank for loss in last] == [1]


@for_each("what", ["join", "load_state_dict", "disagreement", "replicas_equal", "all_reduce"])
@on_ranks(3, timeout_s=PATIENT_S)
def test_a_collective_completes_after_a_loss_that_no_rank_has_noticed(world, what):
    loop = gossip_loop(world, Gossip()).run(1)
    replica = loop.replica
    replica.drain()
    if what == "all_reduce":
        world.all_reduce(torch.ones(3), "sum")
    if world.rank == 1:
        return
    if what == "join":
        with replica.join():
            loop.run(1)
    elif what == "load_state_dict":
        replica.load_state_dict(replica.state_dict())
    elif what == "all_reduce":
        tensor, before = torch.full((3,), float(world.rank)), {**world._sums._memory}
        assert world.all_reduce(tensor, "sum", async_op=True).is_completed()
        assert tensor.tolist() == [2.0] * 3
        after = world._sums._memory  # a broken peer may read what was there before
        assert {one.data_ptr() for one in before.values()}.isdisjoint(one.data_ptr() for one in after.values())
    else:
        getattr(replica, what)()
    assert tuple(world.members) == (0, 2)


def meet(replica, what, entered):
    return entered.enter_context(replica.join()) if what == "join" else getattr(replica, what)()


@for_each(
    ("algorithm", "what", "fewer"),
    [
        (Gossip(), "disagreement", 1),
        (Gossip(), "consolidate", 3),
        (Gossip(staleness=1), "replicas_equal", 2),
        (LocalSGD(3), "disagreement", 1),
        (LocalSGD(3, 1), "consolidate", 2),
        (LocalSGD(1, inner=Gossip()), "consolidate", 1),
        (Gossip(), "join", 1),
    ],
)
def test_ranks_that_made_unequal_numbers_of_steps_are_told_where_they_meet(algorithm, what, fewer):
    def body(world):
        loop = gossip_loop(world, algorithm)
        told = r"after \d steps where rank \d comes to .* after \d steps: put the loop into `with replica\.join\(\):`"
        with ExitStack() as entered, pytest.raises(DisagreementError, match=told):
            meet(loop.run(6 - fewer * (world.rank == 1)).replica, what, entered)
        all_told.wait(PATIENT_S)

    all_told = threading.Barrier(3)
    run_ranks(3, body)


def test_after_a_loss_only_gossip_of_weights_can_be_attached():
    def body(world):
        loop = finished(world, Gossip(), {1: 4})
        if world.rank == 1:
            return None
        loop.replica.detach()
        for algorithm in (commrt.Torus2D(), Gossip(payload="gradients")):
            with pytest.raises(UsageError, match=r"rank 1 is lost, .* only gossip of weights goes on"):
                gossip_loop(world, algorithm)
        again = gossip_loop(world, Gossip("hypercube")).run(1)
        again.replica.consolidate()
        return params(again.model)

    first, _, *others = run_ranks(4, body)
    assert all(same(first, other) for other in others)


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
        return params(loop.run(11).model), tuple(world.members)

    expected = run_ranks(3, lambda world: body(world, fails=False))
    found = run_ranks(3, lambda world: body(world, fails=True))
    assert {members for _, members in found} == {(0, 1, 2)}
    assert all(same(own, before) for (own, _), (before, _) in zip(found, expected, strict=True))


@pytest.fixture
def transport(request, monkeypatch):
    if request.param == "both":
        monkeypatch.setattr(connection, "host_identity", lambda: f"host {int(os.environ['RANK']) // 2}")
    else:
        monkeypatch.setenv("COMMRT_TRANSPORT", request.param)


def struck(victims, pauses=()):
    """How four ranks end if some are killed when they say what `victims` has for them."""

    def on_message(rank, message, process):
        if killed := victims.get(rank) == message:
            process.kill()
        return killed

    return run_processes(4, failing_ranks.gossiping, Gossip(staleness=1), 60.0, pauses, on_message=on_message)


def assert_they_went_on(outcomes, lost):
    stay = [rank for rank in range(4) if rank not in lost]
    for rank in stay:
        assert outcomes[rank].error is None
        assert outcomes[rank].value == (True, sorted(lost), stay)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("transport", "victims"),
    [
        pytest.param("shared", {3: 7}, id="one, shared"),
        pytest.param("both", {1: 9, 2: 9}, id="two at once, both"),
        pytest.param("gloo", {1: 8, 3: 11}, id="one after the other, gloo"),
        pytest.param("shared", {3: failing_ranks.STEPS - 1}, id="in the last step, shared"),
        pytest.param("gloo", {3: failing_ranks.STEPS - 1}, id="in the last step, gloo"),
    ],
    indirect=["transport"],
)
def test_killed_processes_are_named_and_the_others_finish_long_before_a_deadline(transport, victims):
    outcomes = struck(victims)
    assert_they_went_on(outcomes, victims)
    assert max(outcome.seconds for outcome in outcomes) < PATIENT_S


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("transport", [*TRANSPORTS, "both"], indirect=True)
def test_a_process_killed_while_replicas_become_equal_is_left_out(transport):
    assert_they_went_on(struck({2: "consolidating"}, pauses=[2]), {2: None})


@pytest.mark.slow
@pytest.mark.processes
def test_a_process_that_is_stopped_for_longer_than_the_timeout_is_evicted():
    def on_message(rank, message, process):
        processes[rank] = process
        if (rank, message) == (2, 7):
            os.kill(process.pid, signal.SIGSTOP)
        elif (rank, message) == (0, "done"):
            os.kill(processes[2].pid, signal.SIGCONT)

    processes = {}
    outcomes = run_processes(4, failing_ranks.gossiping, Gossip(), 2.0, (), 2, on_message=on_message)
    assert_they_went_on(outcomes, {2: None})
    assert outcomes[2].error.startswith("Evicted: this process was evicted, and generation 1 goes on without it")
