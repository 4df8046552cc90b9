# SPDX-License-Identifier: Apache-2.0
"""Every collective of the backend, along every schedule, in slices of any size, over threads and over NCCL's calls."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial

import pytest
import torch
from c10d_calls import HOST, options, request, values, wrong_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp
from transports import over_nccl

from commrt.algorithms.catalogue import COLLECTIVES, candidates
from commrt.c10d import call_engine
from commrt.c10d.call_engine import CallEngine
from commrt.c10d.checked_calls import CheckedCalls
from commrt.c10d.group import DeviceMessages
from commrt.errors import TransportClosed, UsageError
from commrt.pricing.selection import Selection
from commrt.runtime.world import World
from commrt.testing.ranks import over_threads, run_ranks
from commrt.threads.comm_thread import CommThread

CONNECTED = {"threads": over_threads, "nccl": over_nccl}


def case(collective, numel, root=0):
    """For `wrong_calls`: a call with the pieces of all ranks in one tensor."""
    if collective == "barrier":
        return lambda ask: (ask.barrier(), [])
    return partial(request, collective, x=partial(values, (numel,), torch.float32), root=root, joined=True)


@pytest.fixture
def narrow(monkeypatch):
    """A wire of 1 KB, so that calls travel in many slices; all of them may land in the caller's memory."""
    monkeypatch.setitem(call_engine.WIRE_NBYTES, "cpu", 1024)
    monkeypatch.setattr(call_engine, "LANDING_NUMEL", 1)


@pytest.mark.parametrize("connect", CONNECTED)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_schedule_gives_every_rank_what_the_collective_promises_in_one_slice_and_in_many(
    narrow, collective, connect
):
    numels = [37, 37, 1000, 37]  # the second call is the first one that finds its programs bound
    for name in COLLECTIVES[collective]:
        cases = {f"call {at}": case(collective, numel, root=2) for at, numel in enumerate(numels)}
        assert wrong_calls(4, cases, {collective: name}, CONNECTED[connect]) == [], name


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(COLLECTIVES)), st.integers(1, 9), st.integers(0, 100), st.data())
def test_any_size_on_any_number_of_ranks_along_any_schedule(collective, size, numel, data):
    name = data.draw(st.sampled_from([None, *candidates(collective, size)]))
    call = case(collective, numel, root=data.draw(st.integers(0, size - 1)))
    assert wrong_calls(size, {"call": call}, {collective: name} if name else None) == []


def test_a_receive_that_nothing_depends_on_lands_in_the_callers_memory(narrow, monkeypatch):
    copied, carry = [], call_engine._carry

    def noted(part, *given):
        copied.append([(each.elements.start, each.elements.stop) for each in part.take])
        carry(part, *given)

    monkeypatch.setattr(call_engine, "_carry", noted)
    assert wrong_calls(2, {"call": case("all_gather", 128)}, {"all_gather": "direct"}) == []
    assert sorted(copied) == [[(0, 512)], [(512, 1024)]]  # of two slots, each rank copies its own


def test_a_mean_is_divided_where_it_lands_in_the_callers_memory(narrow):
    def mean(ask):
        own = torch.full((512,), float(ask.rank))
        return ask.whole("all_reduce", own, options(op=ReduceOp.AVG)), [(own, torch.full((512,), 1.5))]

    found = [wrong_calls(4, {name: mean}, {"all_reduce": name}) for name in COLLECTIVES["all_reduce"]]
    assert found == [[]] * len(found)


def test_after_a_call_the_wire_is_whole_again(narrow):
    def body(world):
        engine, ask = CallEngine(world, Selection(HOST, range(2)), "test"), CheckedCalls(world.rank, 2)
        first = torch.zeros(256)
        engine.begin(ask.pieces("all_gather", torch.full((128,), 1.0 + world.rank), first)).result()
        kept = first.clone()
        engine.begin(ask.pieces("all_gather", torch.full((128,), 3.0 + world.rank), torch.zeros(256))).result()
        assert torch.equal(first, kept)

    run_ranks(2, body)


def test_uneven_parts_of_an_all_to_all_meet(narrow):
    size = 3
    counts = [[0, 5, 300], [7, 1, 0], [2, 400, 16]]  # [source][target]

    def uneven(ask):
        rank, into = ask.rank, [of_one[ask.rank] for of_one in counts]
        sent = torch.cat([torch.full((numel,), 10.0 * rank + to) for to, numel in enumerate(counts[rank])])
        expected = torch.cat([torch.full((numel,), 10.0 * source + rank) for source, numel in enumerate(into)])
        output = torch.empty(sum(into))
        return ask.all_to_all_single(output, sent, into, counts[rank]), [(output, expected)]

    assert wrong_calls(size, {"uneven": uneven}) == []


REFUSED = [
    (
        lambda ask: ask.pieces("all_gather", torch.zeros(2), torch.zeros(5)),
        r"1 outputs of all_gather, float32\[5\].*: give 2 with as many elements, or one with 2 times as many",
    ),
    (lambda ask: ask.pieces("all_gather", torch.zeros(2), [torch.zeros(3)] * 2), "give 2 with as many elements"),
    (lambda ask: ask.whole("broadcast", torch.zeros(2), options(root=2)), r"rank 2 cannot be the root.*one of 0..1"),
    (lambda ask: ask.pieces("scatter", torch.zeros(2), [torch.zeros(2).double()] * 2), "must have one dtype"),
    (lambda ask: ask.all_to_all_single(torch.zeros(3), torch.zeros(3), [], []), "3 rows do not divide into 2"),
    (lambda ask: ask.all_to_all_single(torch.zeros(2), torch.zeros(2), [1, 2], []), r"\[1, 2\].*sum up to 2 rows"),
    (lambda ask: ask.all_to_all_single(torch.zeros(2), torch.zeros(2), [2, 0], []), "4 bytes of its own.* 8"),
    (
        lambda ask: ask.all_to_all_single(torch.zeros(1).expand(2), torch.zeros(2), [], []),
        r"float32\[2\] on cpu has elements that share one place",
    ),
    (lambda ask: ask.whole("broadcast", torch.zeros(2).to_sparse()), "only all_reduce takes sparse"),
]


def test_what_cannot_work_is_refused_before_anything_is_sent():
    for make, message in REFUSED:
        with pytest.raises(UsageError, match=message):
            make(CheckedCalls(0, 2))


def test_a_call_that_waits_runs_on_its_own_thread_unless_another_is_pending():
    thread, hold, ran = CommThread(lambda _: None), threading.Event(), []
    thread.run(lambda: ran.append(threading.current_thread()))
    pending = thread.submit(hold.wait)
    waiting = threading.Thread(target=thread.run, args=[lambda: ran.append(threading.current_thread())], daemon=True)
    waiting.start()
    hold.set()
    pending.result()
    waiting.join(20)
    thread.submit(lambda: None).result()
    assert ran[0] is threading.current_thread()
    assert ran[1] not in {waiting, threading.current_thread()}
    thread.close()


@pytest.fixture
def stand_in(monkeypatch):
    """CPU tensors that travel over the stand-in for NCCL, to which all ranks are connected already."""
    monkeypatch.setattr(World, "connect", lambda world, device: None)


def test_sends_and_receives_of_a_gpu_travel_in_one_batch_when_somebody_waits(stand_in):
    def body(world):
        messages, peer = DeviceMessages(world), 1 - world.rank
        first, second = torch.zeros(3), torch.zeros(5)
        works = [messages.post(torch.full((size,), float(world.rank)), peer, is_send=True) for size in (3, 5)]
        works += [messages.post(target, peer, is_send=False) for target in (first, second)]
        works[0].wait()
        done = [work.is_completed() for work in works]
        return done, first.tolist(), second.tolist()

    assert run_ranks(2, body, connect=over_nccl) == [
        ([True] * 4, [float(1 - r)] * 3, [float(1 - r)] * 5) for r in (0, 1)
    ]


def test_a_batch_leaves_when_a_collective_begins_and_the_next_message_is_in_another(stand_in):
    def body(world):
        messages, peer, target = DeviceMessages(world), 1 - world.rank, torch.zeros(3)
        works = [messages.post(torch.ones(3), peer, is_send=True), messages.post(target, peer, is_send=False)]
        messages.flush()
        world.comm_thread.submit(lambda: None).result()
        arrived = [work.is_completed() for work in works], target.tolist()
        messages.flush()  # nothing is left to leave
        again = messages.post(torch.zeros(3), peer, is_send=True), messages.post(target, peer, is_send=False)
        again[1].wait()
        return *arrived, target.tolist()

    assert run_ranks(2, body, connect=over_nccl) == [([True, True], [1.0] * 3, [0.0] * 3)] * 2


def test_every_question_about_a_batch_that_cannot_leave_has_the_same_answer(stand_in, monkeypatch):
    monkeypatch.setattr(call_engine, "_newest", deque(maxlen=32))  # as with torch 2.8

    def body(world):
        messages = DeviceMessages(world)
        works = [messages.post(torch.zeros(3), 1 - world.rank, is_send=True) for _ in range(2)]
        world.comm_thread.close()
        for work in [*works, *works]:
            with pytest.raises(TransportClosed, match="closed"):
                work.wait()
        assert [work.is_completed() for work in works] == [True] * 2
        assert {type(work.exception()) for work in works} == {type(works[0].exception())}

    run_ranks(2, body, connect=over_nccl)


def test_a_batch_that_a_signal_handler_cannot_send_leaves_later(stand_in):
    def body(world):
        messages, peer, target = DeviceMessages(world), 1 - world.rank, torch.zeros(3)
        works = [messages.post(torch.ones(3), peer, is_send=True), messages.post(target, peer, is_send=False)]

        def handler():
            with pytest.raises(UsageError, match="a signal handler"):
                works[0].wait()

        world.comm_thread.run(handler).result()
        works[1].wait()
        return target.tolist()

    assert run_ranks(2, body, connect=over_nccl) == [[1.0] * 3] * 2


def test_a_gpu_cannot_receive_from_any_rank():
    def body(world):
        with pytest.raises(UsageError, match="name the source"):
            DeviceMessages(world).post(torch.zeros(3), None, is_send=False)

    run_ranks(2, body, connect=over_nccl)
