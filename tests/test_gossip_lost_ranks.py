# SPDX-License-Identifier: Apache-2.0
"""Gossip goes on without whom it loses: by death, by an end of its own, one or several, at any instant."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading

import failing_ranks
import pytest
import torch
from cases import for_each
from gossip_models import local_step, model_of, optimizer_of, params, same
from hypothesis import given, settings
from hypothesis import strategies as st

import commrt
from commrt.algorithms.gossip import Gossip
from commrt.errors import UsageError
from commrt.runtime import connection
from commrt.store.launcher import TRANSPORTS
from commrt.testing.processes import run_processes
from commrt.testing.ranks import run_ranks

PATIENT_S = 30.0
STEPS = 16


def attached(world, algorithm=None, seed=0):
    model = model_of(seed)
    optimizer = optimizer_of(model)
    return commrt.attach(model, optimizer, algorithm or Gossip(), world=world, bucket_cap_mb=1e-4), optimizer


def trained(world, algorithm, ends):
    """Steps until this rank's end; whom it heard in each, and what it holds."""
    replica, optimizer = attached(world, algorithm)
    heard = []
    for step in range(ends.get(world.rank, STEPS)):
        local_step(replica.model, optimizer, step, world.rank)
        replica.drain()
        heard.append(replica.last.received_from)
    return replica, heard


def finished(world, algorithm, ends):
    """As `trained`; those who worked to the end become equal."""
    replica, heard = trained(world, algorithm, ends)
    if world.rank not in ends:
        replica.consolidate()
    return replica, heard, params(replica.model), tuple(world.members)


def sources(algorithm, step, members, rank):
    """Those that `rank` hears from."""
    steps = algorithm.among(len(members)).schedule(step, len(members)).steps()
    pairs = (pair for each in steps for pair in zip(each.src.tolist(), each.dst.tolist(), strict=True))
    return {members[src] for src, dst in pairs if members[dst] == rank}


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=16)
def test_the_remaining_ranks_gossip_among_themselves(data):
    staleness, ranks = data.draw(st.integers(0, 1), "staleness"), data.draw(st.integers(2, 7), "ranks")
    gone = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1), "gone")
    ends = {rank: data.draw(st.integers(0, STEPS - 1), f"end of {rank}") for rank in sorted(gone)}
    algorithm = Gossip(staleness=staleness)
    outcomes = run_ranks(ranks, lambda world: finished(world, algorithm, ends), timeout_s=PATIENT_S)
    stay = [rank for rank in range(ranks) if rank not in gone]
    assert all(same(outcomes[rank][2], outcomes[stay[0]][2]) for rank in stay)
    for rank in stay:
        replica, heard, _, members = outcomes[rank]
        assert members == tuple(stay)
        assert {loss.rank for loss in replica.lost} == gone
        resumed = max(loss.step for loss in replica.lost)
        for step in range(resumed, STEPS):
            assert heard[step] == sources(algorithm, step, stay, rank)


UNFIT = {
    "a hypercube that has lost its shape": (Gossip("hypercube"), 4),
    "rows of which one has a gap": (Gossip(within=2), 6),
    "one row": (Gossip(within=2), 2),
    "no rotation": (Gossip(rotate=False), 5),
}


@for_each(("algorithm", "ranks"), UNFIT.values(), ids=UNFIT)
def test_dissemination_replaces_a_topology_that_does_not_fit_the_remaining_ranks(algorithm, ranks):
    outcomes = run_ranks(ranks, lambda world: finished(world, algorithm, {1: 3}), timeout_s=PATIENT_S)
    stay = [rank for rank in range(ranks) if rank != 1]
    assert all(same(outcomes[rank][2], outcomes[0][2]) for rank in stay)
    replica, heard, *_ = outcomes[0]
    assert [heard[step] for step in range(replica.lost[0].step, STEPS)] == [
        sources(algorithm, step, stay, 0) for step in range(replica.lost[0].step, STEPS)
    ]


def test_a_loss_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING, "commrt"):
        outcomes = run_ranks(3, lambda world: finished(world, Gossip(), {1: 4}), timeout_s=PATIENT_S)
    (loss,) = outcomes[0][0].lost
    told = f"commrt: rank 1 is lost, as the others noticed in step {loss.step}: it closed its world; 2 ranks go on"
    assert [record.getMessage() for record in caplog.records] == [told]


def test_a_rank_that_fails_tells_the_others_why():
    def body(world):
        if world.rank == 2:
            trained(world, Gossip(), {2: 4})
            raise OSError("the disk is full")
        return finished(world, Gossip(), {})[0].lost

    seen = []
    with pytest.raises(OSError, match="the disk is full"):
        run_ranks(3, lambda world: seen.append(body(world)), timeout_s=PATIENT_S)
    assert {losses[0].why for losses in seen} == {"it gave up: the disk is full"}


def test_no_rank_waits_for_one_that_detached_its_model():
    def body(world):
        replica, *_ = finished(world, Gossip(), {2: 4})
        if world.rank == 2:
            replica.detach()
            done.wait(PATIENT_S)
        elif world.rank == 1:
            done.set()
        return replica.lost

    done = threading.Event()
    first, _, last = run_ranks(3, body, timeout_s=1.0)
    assert [loss.why for loss in first] == ["it detached its model"]
    assert not last


@for_each(("batches", "dies_at"), [((3, 6, 9, 12), 5), ((3, 9, 3), 7)], ids=["one of several", "the last with data"])
def test_the_remaining_ranks_end_equal_if_rank_1_is_lost_in_join(batches, dies_at):
    def body(world):
        replica, optimizer = attached(world)
        with replica.join():
            for step in range(batches[world.rank]):
                if (world.rank, step) == (1, dies_at):
                    raise OSError("the disk is full")
                local_step(replica.model, optimizer, step, world.rank)
        seen.append((params(replica.model), replica.step, world.members, [loss.rank for loss in replica.lost]))

    seen = []
    with pytest.raises(OSError, match="the disk is full"):
        run_ranks(len(batches), body, timeout_s=PATIENT_S)
    stay = tuple(rank for rank in range(len(batches)) if rank != 1)
    assert len(seen) == len(stay)
    for found, step, members, lost in seen:
        assert same(found, seen[0][0])
        assert step == seen[0][1] >= max(batches[rank] for rank in stay)
        assert (tuple(members), lost) == (stay, [1])


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=8)
def test_a_ring_shuffle_loses_only_the_samples_of_a_lost_rank(data):
    staleness, ranks, kept = data.draw(st.integers(0, 1), "staleness"), data.draw(st.integers(3, 6), "ranks"), 8
    gone, last = data.draw(st.integers(0, ranks - 1), "gone"), data.draw(st.integers(0, 11), "last step")

    def body(world):
        replica, optimizer = attached(world, Gossip(staleness=staleness))
        ring = commrt.RingShuffle((torch.arange(kept) + kept * world.rank,), batch_size=2, world=world)
        steps = 0
        for _ in range(4):
            for step, _ in enumerate(ring):
                if world.rank == gone and steps == last:
                    return None
                local_step(replica.model, optimizer, step, world.rank)
                steps += 1
        ring.drain()
        return ring.state_dict()["samples"][0].tolist()

    held = [samples for samples in run_ranks(ranks, body, timeout_s=PATIENT_S) if samples is not None]
    left = [sample for samples in held for sample in samples]
    assert len(held) == ranks - 1
    assert len(left) == len(set(left)) == kept * (ranks - 1)


def test_the_remaining_ranks_load_a_checkpoint_after_a_loss():
    def body(world):
        replica, *_ = finished(world, Gossip(), {1: 4})
        if world.rank == 1:
            return None
        state = replica.state_dict() | {"step": 2}
        replica.load_state_dict(state)
        before = replica.step
        replica.average()
        replica.drain()
        return before, replica.last.received_from

    found = run_ranks(3, body, timeout_s=PATIENT_S)
    assert found == [(2, {2}), None, (2, {0})]


def one_of_gradients(world):
    return [attached(world, Gossip(payload="gradients"))]


def two_models(world):
    return [attached(world), attached(world, seed=1)]


def two_models_of_which_one_was_detached(world):
    first, (other, _) = two_models(world)
    other.detach()
    return [first]


@for_each("attach_models", [one_of_gradients, two_models, two_models_of_which_one_was_detached])
def test_what_has_no_weights_of_its_own_or_no_step_in_common_ends_with_a_lost_rank(attach_models):
    def body(world):
        kept = attach_models(world)
        for step in range(1 if world.rank == 1 else 5):
            for replica, optimizer in kept:
                local_step(replica.model, optimizer, step, world.rank)
        for replica, _ in kept:
            replica.drain()

    with pytest.raises(commrt.PeerLost):
        run_ranks(3, body, timeout_s=PATIENT_S)


@for_each("how", ["detached", "dropped"])
def test_a_model_that_gossips_after_another_was_detached_or_dropped_survives_a_lost_rank(how):
    def body(world):
        replica, optimizer = attached(world)
        local_step(replica.model, optimizer, 0, world.rank)
        replica.drain()
        if how == "detached":
            replica.detach()  # the variable keeps it alive
        else:
            del replica, optimizer
            gc.collect()
        return finished(world, Gossip(), {1: 4})[0].lost

    first, _, last = run_ranks(3, body, timeout_s=PATIENT_S)
    assert [loss.rank for loss in first] == [loss.rank for loss in last] == [1]


def test_a_ring_shuffle_works_on_the_last_remaining_rank():
    def body(world):
        replica, optimizer = attached(world)
        ring = commrt.RingShuffle((torch.arange(8) + 8 * world.rank,), batch_size=2, world=world)
        for _ in range(1 if world.rank else 3):
            for step, _ in enumerate(ring):
                local_step(replica.model, optimizer, step, world.rank)
        replica.consolidate() if world.rank == 0 else None
        return sorted(ring.state_dict()["samples"][0].tolist())

    alone, *_ = run_ranks(3, body, timeout_s=PATIENT_S)
    assert len(alone) == 8


@for_each("what", ["join", "load_state_dict", "disagreement", "replicas_equal", "all_reduce"])
def test_a_collective_completes_after_a_loss_that_no_rank_has_noticed(what):
    def body(world):
        replica, optimizer = attached(world)
        local_step(replica.model, optimizer, 0, world.rank)
        replica.drain()
        if what == "all_reduce":
            world.all_reduce(torch.ones(3), "sum")
        if world.rank == 1:
            return None
        if what == "join":
            with replica.join():
                local_step(replica.model, optimizer, 1, world.rank)
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
        return tuple(world.members)

    assert run_ranks(3, body, timeout_s=PATIENT_S) == [(0, 2), None, (0, 2)]


def test_after_a_loss_only_gossip_of_weights_can_be_attached():
    def body(world):
        replica, *_ = finished(world, Gossip(), {1: 4})
        if world.rank == 1:
            return None
        replica.detach()
        for algorithm in (commrt.Torus2D(), Gossip(payload="gradients")):
            with pytest.raises(UsageError, match=r"rank 1 is lost, .* only gossip of weights goes on"):
                attached(world, algorithm)
        again, optimizer = attached(world, Gossip("hypercube"))
        local_step(again.model, optimizer, 0, world.rank)
        again.consolidate()
        return params(again.model)

    first, _, *others = run_ranks(4, body, timeout_s=PATIENT_S)
    assert all(same(first, other) for other in others)


# processes


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


@pytest.mark.slow
@pytest.mark.processes
def test_the_death_of_the_rank_that_holds_the_store_ends_the_others_in_words():
    outcomes = struck({0: 7})
    for outcome in outcomes[1:]:
        assert "the process that holds the store" in outcome.error
        assert outcome.seconds < PATIENT_S
