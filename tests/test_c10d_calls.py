# SPDX-License-Identifier: Apache-2.0
"""Every collective of the backend, along every schedule, in slices of any size, over threads and over NCCL's calls."""

from __future__ import annotations

import threading
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp, ReduceOptions, _make_nccl_premul_sum
from transports import over_nccl

from commrt.algorithms.catalogue import COLLECTIVES, candidates
from commrt.c10d import call_engine
from commrt.c10d.call_engine import CallEngine
from commrt.c10d.checked_calls import CheckedCalls
from commrt.c10d.group import DeviceMessages
from commrt.errors import TransportClosed, UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.selection import Selection
from commrt.runtime.world import World
from commrt.testing.ranks import over_threads, run_ranks
from commrt.threads.comm_thread import CommThread

HOST = Cluster.named("host")
CONNECTED = {"threads": over_threads, "nccl": over_nccl}


def row(number, numel):
    """Whole numbers of which none appears twice, and whose sums are exact in any order."""
    return (torch.arange(numel) + 1000.0 * number) - 500


def pieces(rank, size, numel):
    return [row(rank * size + other, numel) for other in range(size)]


def wanted(collective, rank, size, numel, root):
    """What `rank` must hold at the end."""
    of_rank = [row(other, numel) for other in range(size)]
    match collective:
        case "all_reduce" | "reduce":
            found = sum(of_rank)
        case "broadcast":
            found = of_rank[root]
        case "all_gather" | "gather":
            found = torch.cat(of_rank)
        case "scatter":
            found = pieces(root, size, numel)[rank]
        case "reduce_scatter":
            found = sum(pieces(other, size, numel)[rank] for other in range(size))
        case "all_to_all":
            found = torch.cat([pieces(other, size, numel)[rank] for other in range(size)])
        case _:
            found = None
    return None if collective in {"reduce", "gather"} and rank != root else found


def of_root(root):
    opts = ReduceOptions()
    opts.rootRank = root
    return opts


def combining(op):
    opts = ReduceOptions()
    opts.reduceOp = op
    return opts


def request(collective, ask, numel, root):
    """The call of this rank, and the tensor that must hold the result."""
    rank, size = ask.rank, ask.size
    own, mine = row(rank, numel), pieces(rank, size, numel)
    out, whole = torch.full_like(own, 99), torch.full((size * numel,), 99.0)
    opts = of_root(root)
    calls = {
        "all_reduce": lambda: (ask.whole("all_reduce", own), own),
        "reduce": lambda: (ask.whole("reduce", own, opts), own),
        "broadcast": lambda: (ask.whole("broadcast", own, opts), own),
        "all_gather": lambda: (ask.pieces("all_gather", own, whole), whole),
        "gather": lambda: (ask.pieces("gather", own, list(whole.view(size, -1)), opts), whole),
        "scatter": lambda: (ask.pieces("scatter", out, mine, opts), out),
        "reduce_scatter": lambda: (ask.pieces("reduce_scatter", out, torch.cat(mine)), out),
        "all_to_all": lambda: (ask.all_to_all_single(whole, torch.cat(mine), [], []), whole),
        "barrier": lambda: (ask.barrier(), None),
    }
    return calls[collective]()


def run(collective, name, size, numels, root=0, connect=over_threads):
    """Call `collective` once for each of `numels`, along the schedule `name`; return what was wrong, and where."""

    def body(world):
        engine = CallEngine(world, Selection(HOST, range(size), {collective: name} if name else {}), "test")
        return [numel for numel in numels if not is_right(engine, world.rank, numel)]

    def is_right(engine, rank, numel):
        call, result = request(collective, CheckedCalls(rank, size), numel, root)
        engine.begin(call).result()
        expected = wanted(collective, rank, size, numel, root)
        return expected is None or torch.equal(result, expected)

    wrong = enumerate(run_ranks(size, body, connect=connect))
    return [f"{name}, rank {rank}, {numel} elements" for rank, numels in wrong for numel in numels]


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
    found = [run(collective, name, 4, numels, 2, CONNECTED[connect]) for name in COLLECTIVES[collective]]
    assert found == [[]] * len(found)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(COLLECTIVES)), st.integers(1, 17), st.integers(0, 100), st.data())
def test_any_size_on_any_number_of_ranks_along_any_schedule(collective, size, numel, data):
    name = data.draw(st.sampled_from([None, *candidates(collective, size)]))
    assert run(collective, name, size, [numel], data.draw(st.integers(0, size - 1))) == []


def test_a_receive_that_nothing_depends_on_lands_in_the_callers_memory(narrow, monkeypatch):
    copied, carry = [], call_engine._carry

    def noted(part, *given):
        copied.append([(each.elements.start, each.elements.stop) for each in part.take])
        carry(part, *given)

    monkeypatch.setattr(call_engine, "_carry", noted)
    assert run("all_gather", "direct", 2, [128]) == []
    assert sorted(copied) == [[(0, 512)], [(512, 1024)]]  # of two slots, each rank copies its own


def test_after_a_call_the_wire_is_whole_again(narrow):
    def body(world):
        engine, ask = CallEngine(world, Selection(HOST, range(2)), "test"), CheckedCalls(world.rank, 2)
        first = torch.zeros(256)
        engine.begin(ask.pieces("all_gather", row(world.rank, 128), first)).result()
        kept = first.clone()
        engine.begin(ask.pieces("all_gather", row(world.rank + 2, 128), torch.zeros(256))).result()
        assert torch.equal(first, kept)

    run_ranks(2, body)


def test_uneven_parts_of_an_all_to_all_meet(narrow):
    size = 3
    counts = [[0, 5, 300], [7, 1, 0], [2, 400, 16]]  # [source][target]

    def body(world):
        rank, into = world.rank, [counts[other][world.rank] for other in range(size)]
        sent = torch.cat([torch.full((n,), 10.0 * rank + to) for to, n in enumerate(counts[rank])])
        output = torch.empty(sum(into))
        call = CheckedCalls(rank, size).all_to_all_single(output, sent, into, counts[rank])
        CallEngine(world, Selection(HOST, range(size)), "test").begin(call).result()
        assert torch.equal(output, torch.cat([torch.full((n,), 10.0 * who + rank) for who, n in enumerate(into)]))

    run_ranks(size, body)


REFUSED = [
    (
        lambda ask: ask.pieces("all_gather", torch.zeros(2), torch.zeros(5)),
        r"1 outputs of all_gather, float32\[5\].*: give 2 with as many elements, or one with 2 times as many",
    ),
    (
        lambda ask: ask.pieces("all_gather", torch.zeros(2), [torch.zeros(2)]),
        r"1 outputs of all_gather, float32\[2\].*: give 2 with as many elements",
    ),
    (lambda ask: ask.pieces("all_gather", torch.zeros(2), [torch.zeros(3)] * 2), "give 2 with as many elements"),
    (lambda ask: ask.whole("broadcast", torch.zeros(2), of_root(2)), r"rank 2 cannot be the root.*one of 0..1"),
    (lambda ask: ask.pieces("scatter", torch.zeros(2), [torch.zeros(2).double()] * 2), "must have one dtype"),
    (
        lambda ask: ask.whole("all_reduce", torch.zeros(2), combining(ReduceOp.BAND)),
        r"and of torch.float32 is not possible",
    ),
    (
        lambda ask: ask.whole("all_reduce", torch.zeros(2).bool(), combining(ReduceOp.AVG)),
        r"mean of torch.bool has no place",
    ),
    (
        lambda ask: ask.whole("all_reduce", torch.zeros(2).long(), combining(_make_nccl_premul_sum(0.5))),
        r"scaled sum of torch.int64 has no place",
    ),
    (lambda ask: ask.all_to_all_single(torch.zeros(3), torch.zeros(3), [], []), "3 rows do not divide into 2"),
    (lambda ask: ask.all_to_all_single(torch.zeros(2), torch.zeros(2), [1, 2], []), r"\[1, 2\].*sum up to 2 rows"),
    (lambda ask: ask.all_to_all_single(torch.zeros(2), torch.zeros(2), [2, 0], []), "4 bytes of its own.* 8"),
    (
        lambda ask: ask.all_to_all_single(torch.zeros(1).expand(4), torch.zeros(4), [], []),
        r"float32\[4\] on cpu has elements that share one place",
    ),
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
    waiting = threading.Thread(
        target=lambda: thread.run(lambda: ran.append(threading.current_thread())).result(), daemon=True
    )
    waiting.start()
    hold.set()
    pending.result()
    waiting.join(20)
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
