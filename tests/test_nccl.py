# SPDX-License-Identifier: Apache-2.0
"""GPUs' transports over stand-ins: the bits they give, failures of NCCL that come late, and who is refused."""

import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from unittest.mock import Mock, patch

import nccl_stand_in as stand_in
import pytest
import torch
from cases import taking_turns
from local_loops import Loop
from moved_clock import moved_clock
from peer_group import over_peers, wait_until
from torch import nn
from torch.distributed import HashStore
from transports import over_nccl

from commrt.algorithms import direct
from commrt.algorithms.catalogue import ALGORITHMS, by_name
from commrt.c10d.device_messages import DeviceMessages
from commrt.errors import (
    DeadlineExceeded,
    DisagreementError,
    PeerLost,
    Place,
    TransportClosed,
    TransportError,
    UsageError,
)
from commrt.nccl_groups import MOST_MESSAGES
from commrt.runtime.world import World
from commrt.testing.ranks import run_ranks
from commrt.transport import group_watch, nccl_binding, nccl_communicator
from commrt.transport import nccl as transport_module
from commrt.transport.message_groups import uncut
from commrt.transport.nccl import NcclTransport
from commrt.transport.protocol import CPU, P2PGroup, P2PMessage, Tag

NOW = Tag(step=3, bucket=1)
PATIENT_S = 20.0


UNTRAINED = nn.Sequential(nn.Linear(5, 17), nn.BatchNorm1d(17), nn.Linear(17, 3))


def trained(world, algorithm, wire):
    loop = Loop(world, algorithm, deepcopy(UNTRAINED), wire=wire, bucket_cap_mb=0.0005).run(3)
    assert loop.replica.replicas_equal()
    return [param.tolist() for param in loop.model.parameters()]


RANKS = ((1, 4), (2, 7), (3, 6), (4, 5), (7, 2), (6, 3))
"""Of each algorithm: over NCCL, and over peers' memory."""
WIRES = ((None, torch.bfloat16), (torch.bfloat16, None))


@pytest.mark.parametrize(("name", "ranks", "wires"), taking_turns(sorted(ALGORITHMS), RANKS, WIRES), ids=str)
def test_training_gives_the_bits_that_threads_give(name, ranks, wires):
    for connect, count, wire in zip((over_nccl, over_peers), ranks, wires, strict=True):
        body = partial(trained, algorithm=by_name(name), wire=wire)
        assert run_ranks(count, body, connect=connect) == run_ranks(count, body)


class Queue:
    """A stream on which things happen when the test says so."""

    def __init__(self):
        self.reached, self.users = threading.Event(), SimpleQueue()

    def use(self):
        self.users.put(threading.current_thread().name)

    enter = use

    def current(self):
        return 7

    def record_event(self):
        return SimpleNamespace(query=self.reached.is_set, synchronize=self.reached.wait)


class Silent:
    """A binding whose calls return at once, as on a GPU, and its communicator; an abort lets the queue run empty."""

    NCCL_INT8, available = 0, True

    def __init__(self, queue):
        self.queue, self.calls, self.polls, self.trouble = queue, [], SimpleQueue(), None
        self.get_version = self.get_build_version = lambda: 22809
        self.get_unique_id = lambda: bytes(128)
        self.NcclCommunicator = lambda *_: self
        self.groupStart, self.groupEnd, self.destroy = (
            partial(self.calls.append, name) for name in ("start", "end", "destroy")
        )
        self.send, self.recv = (
            lambda *given, name=name: self.calls.append((name, *given)) for name in ("send", "recv")
        )

    def check_async_error(self):
        self.polls.put(threading.current_thread().name)
        if self.trouble is not None:
            raise self.trouble

    def abort(self):
        self.calls.append("abort")
        self.queue.reached.set()


@pytest.fixture
def queued(monkeypatch):
    """Rank 0 of two, alone: its exchanges are queued and end when `queue.reached` is set."""
    queue = Queue()
    monkeypatch.setattr(transport_module, "streams_of", lambda device: queue)
    monkeypatch.setattr(
        nccl_communicator, "gather", lambda *_: dict.fromkeys(range(2), nccl_communicator._RankInfo(22809, None, "00"))
    )
    binding = Silent(queue)
    store = HashStore()
    failures = SimpleQueue()
    transport = NcclTransport(store, 0, range(2), PATIENT_S, CPU, binding, failures.put)
    yield SimpleNamespace(transport=transport, binding=binding, queue=queue, store=store, failures=failures)
    transport.abort()


def swap(transport, numel=5):
    return transport.bind(P2PGroup([P2PMessage(1, torch.ones(numel))], [P2PMessage(1, torch.zeros(numel))], hop=4))


def failure_of(queued):
    """What the watchdog reports."""
    return queued.failures.get(timeout=PATIENT_S)


def wait_until_watched(queued):
    """Wait until the watchdog has looked, from the beginning of its look to the end, at what is queued now."""
    for _ in range(3 + queued.binding.polls.qsize()):
        queued.binding.polls.get(timeout=PATIENT_S)


def test_an_exchange_is_one_group_of_bytes_on_the_current_stream(queued):
    sent, landing = torch.ones(5, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.float64)
    queued.transport.bind(P2PGroup([P2PMessage(1, sent)], [P2PMessage(1, landing)]))(NOW)
    send, recv = ("send", sent.data_ptr(), 10, 0, 1, 7), ("recv", landing.data_ptr(), 24, 0, 1, 7)
    assert queued.binding.calls == ["start", send, recv, "end"]


def test_an_exchange_returns_when_it_is_queued_and_close_waits_until_it_has_happened(queued):
    swap(queued.transport)(NOW)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(queued.transport.close)
        assert queued.binding.calls[-1] == "end"
        queued.queue.reached.set()
        closing.result(PATIENT_S)
    assert queued.binding.calls[-1] == "destroy"


def test_what_is_late_on_the_gpu_is_the_next_exchanges_error_and_names_the_late_one(queued):
    with moved_clock() as clock:
        exchange = swap(queued.transport)
        exchange(NOW)
        clock.advance(PATIENT_S + 1)
        failure = failure_of(queued)
    with pytest.raises(DeadlineExceeded, match=r"no transfer with ranks \[1\] within 20 s") as raised:
        exchange(Tag(4, 0))
    assert raised.value is failure
    assert (failure.place.step, failure.place.bucket, failure.place.hop) == (3, 1, 4)
    assert queued.queue.reached.wait(PATIENT_S)  # by the abort
    queued.transport.close()


def test_an_exchange_that_was_in_time_costs_nothing(queued):
    with moved_clock() as clock:
        swap(queued.transport)(NOW)
        queued.store.set("left/1", '{"0": 1}')
        clock.advance(PATIENT_S - 1)
        while not queued.transport.watch._notices._known:
            wait_until_watched(queued)
        queued.queue.reached.set()
        wait_until_watched(queued)
        clock.advance(PATIENT_S + 1)
        wait_until_watched(queued)
    queued.transport.close()
    assert queued.failures.empty()


def failing():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_what_nccl_reports_later_is_the_next_exchanges_error(queued):
    swap(queued.transport)(NOW)
    queued.binding.trouble = KeyError(8)  # CuPy has no name for it
    failure_of(queued)
    with pytest.raises(TransportError, match=r"the GPU or NCCL failed \(.*8"):
        swap(queued.transport)


@pytest.mark.parametrize("left", ["null", "{}", '{"0": 0}'], ids=["gave up", "met nobody", "met others"])
def test_a_peer_that_left_without_its_part_is_noticed_on_the_store(queued, left):
    swap(queued.transport)(NOW)
    queued.store.set("left/1", left)
    failure_of(queued)
    with pytest.raises(PeerLost) as failure:
        swap(queued.transport)
    assert failure.value.place == Place(0, 1, *NOW[:2], 4)


def test_a_store_that_does_not_answer_holds_no_deadline_up(queued, monkeypatch):
    answering = threading.Event()
    monkeypatch.setattr(queued.transport.watch._notices, "_read", lambda peers: answering.wait(PATIENT_S))
    with moved_clock() as clock:
        swap(queued.transport)(NOW)
        clock.advance(PATIENT_S + 1)
        assert isinstance(failure_of(queued), DeadlineExceeded)
    assert not answering.is_set()
    answering.set()


@pytest.mark.parametrize("watched", [True, False])
def test_on_a_gpu_that_failed_the_next_call_says_so_and_the_communicator_is_freed(queued, watched, monkeypatch):
    if not watched:
        queued.transport.watch.communicator.ended.set()
    monkeypatch.setattr(queued.queue, "record_event", lambda: SimpleNamespace(query=failing, synchronize=failing))
    swap(queued.transport)(NOW)
    if watched:
        failure_of(queued)
    with pytest.raises(TransportError, match="illegal memory access"):
        queued.transport.close()
    queued.transport.close()
    assert queued.binding.calls[-1] == "abort"


def test_an_abort_waits_while_calls_are_being_issued(queued, monkeypatch):
    monkeypatch.setattr(nccl_communicator, "BUSY_S", PATIENT_S)
    held = []
    queued.binding.send = lambda *arguments: held.append(queued.transport.watch.communicator.in_use.locked())
    swap(queued.transport)(NOW)
    assert held == [True]
    with ThreadPoolExecutor(1) as pool:
        with queued.transport.watch.communicator.in_use:
            aborting = pool.submit(queued.transport.abort)
            assert not threading.Event().wait(0.1)
            assert "abort" not in queued.binding.calls
        aborting.result(PATIENT_S)
    assert queued.binding.calls[-1] == "abort"


def test_an_exchange_that_waits_while_the_communicator_is_freed_is_not_issued(queued):
    exchange = swap(queued.transport)
    with ThreadPoolExecutor(1) as pool:
        with queued.transport.watch.communicator.in_use:  # as while it is freed
            issuing = pool.submit(exchange, NOW)
            wait_until(lambda: queued.transport.watch._pending)
            queued.transport.watch.is_closed = True
        with pytest.raises(TransportClosed):
            issuing.result(PATIENT_S)
    assert queued.binding.calls == []


def test_a_forked_child_waits_for_no_lock_that_a_thread_of_its_parent_held(queued):
    held = queued.transport.watch.communicator
    with ThreadPoolExecutor(1) as pool, held.in_use, held.ended._cond:
        pool.submit(queued.transport.watch.leave_to_parent).result(PATIENT_S)


def polled(queued):
    """Whether this thread asks NCCL for errors if it looks for a failure now."""
    names = []
    queued.binding.check_async_error = lambda: names.append(threading.current_thread().name)
    queued.transport.watch._find_failure()
    return threading.current_thread().name in names


@pytest.mark.parametrize("how", ["close", "abort", "collected"])
def test_errors_are_not_asked_for_while_the_communicator_is_freed_and_afterwards(queued, how):
    asked = []

    def freeing():
        asked.append((threading.current_thread().name, polled(queued)))

    queued.binding.abort = queued.binding.destroy = freeing
    end = queued.transport.watch.communicator._collected if how == "collected" else getattr(queued.transport, how)
    if aborted := end():
        aborted.result(PATIENT_S)
    assert asked == [("commrt-store-call", False)]
    assert how == "collected" or not polled(queued)


def test_errors_are_not_asked_for_while_calls_are_being_issued(queued):
    while not polled(queued):  # the watchdog may be asking
        pass
    with queued.transport.watch.communicator.in_use:
        assert not polled(queued)


def test_the_watchdog_and_the_creating_thread_use_the_gpu_of_this_rank(queued):
    users = {queued.queue.users.get(timeout=PATIENT_S) for _ in range(2)}
    assert users == {"commrt-watchdog", "commrt-store-call"}


def test_no_more_exchanges_are_queued_than_nccl_has_room_for(queued, monkeypatch):
    monkeypatch.setattr(group_watch, "MAX_PENDING", 3)
    exchange = swap(queued.transport)
    for _ in range(3):
        exchange(NOW)
    with ThreadPoolExecutor(1) as pool:
        fourth = pool.submit(exchange, NOW)
        with pytest.raises(TimeoutError):
            fourth.result(0.1)
        assert queued.binding.calls.count("start") == 3
        queued.queue.reached.set()
        fourth.result(PATIENT_S)
    assert queued.binding.calls.count("start") == 4


def test_a_stream_that_something_else_holds_up_is_waited_for_until_the_deadline(queued):
    queued.transport.watch.communicator.ended.set()  # nobody watches
    with moved_clock() as clock, ThreadPoolExecutor(1) as pool:
        swap(queued.transport)(NOW)
        waiting = pool.submit(queued.transport.wait)
        try:
            clock.advance_until(waiting.done, step_s=10.0)
        finally:
            queued.queue.reached.set()  # or a thread would wait for ever
        with pytest.raises(DeadlineExceeded, match="held up by something else"):
            waiting.result()


def test_a_rank_0_without_an_id_is_named_by_the_others_at_once():
    first, second = two(but(get_unique_id=failing), stand_in)
    assert isinstance(first, RuntimeError)
    assert isinstance(second, PeerLost)
    assert "rank 0 could not make a communicator" in str(second)


def test_at_the_end_of_the_interpreter_no_thread_is_started_to_abort(queued):
    threads, queued.binding.abort = [], lambda: threads.append(threading.get_ident())
    with patch.object(threading, "main_thread", return_value=SimpleNamespace(is_alive=bool)):
        queued.transport.watch.communicator._collected()
    assert threads == [threading.get_ident()]


def two(*bindings):
    """Connect two ranks with these bindings, on threads; the transports or errors."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(NcclTransport, store, rank, range(2), 2.0, CPU, binding)
            for rank, binding in enumerate(bindings)
        ]
        return [future.exception() or future.result() for future in futures]


def but(**changes):
    """The stand-in with other answers."""
    return SimpleNamespace(**{**vars(stand_in), **changes})


def test_ranks_with_different_versions_of_nccl_are_told_so():
    for error in two(stand_in, but(get_version=lambda: 23007)):
        assert isinstance(error, DisagreementError)
        assert "rank 1 disagrees with rank 0 about the version of NCCL: '2.30.7' against '2.28.9'" in str(error)


def test_two_ranks_on_one_gpu_are_told_so(monkeypatch):
    monkeypatch.setattr(nccl_communicator, "_gpu", lambda device: "GPU-1234")
    for error in two(stand_in, stand_in):
        assert isinstance(error, UsageError)
        assert "ranks 0 and 1 chose the same GPU, GPU-1234" in str(error)


def test_two_ranks_may_share_a_gpu_where_nccl_allows_it(monkeypatch):
    monkeypatch.setattr(nccl_communicator, "_gpu", lambda device: "GPU-1234")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    newer = but(get_version=lambda: 23003)
    for transport in two(newer, newer):
        transport.abort()


def test_a_binding_of_an_older_cupy_is_refused():
    with pytest.raises(UsageError, match="this CuPy is older than 14"):
        NcclTransport(HashStore(), 0, range(1), 2.0, CPU, but(get_unique_id=lambda: tuple(range(128))))


@pytest.mark.parametrize(
    ("changes", "blocking", "said"),
    [
        ({"available": False}, "1", "CuPy finds no NCCL library"),
        ({"get_version": lambda: 22707}, "1", r"NCCL 2\.27\.7 was loaded, and CuPy was built with 2\.28\.9"),
        ({}, "0", "NCCL_COMM_BLOCKING=0 makes calls return before they are done"),
    ],
)
def test_an_nccl_that_would_fail_later_is_refused(changes, blocking, said, monkeypatch):
    monkeypatch.setenv("NCCL_COMM_BLOCKING", blocking)
    with pytest.raises(UsageError, match=said):
        nccl_binding.require_usable(but(**changes))


def test_tensors_of_another_device_are_refused():
    (transport,) = over_nccl(HashStore(), 1, 2.0)
    with pytest.raises(UsageError, match="moves tensors on cpu, not those on meta"):
        transport.bind(P2PGroup([P2PMessage(0, torch.ones(2, device="meta"))], [P2PMessage(0, torch.ones(2))]))
    with pytest.raises(UsageError, match="not those on meta"):
        transport.allocate(3, torch.float32, torch.device("meta"))
    transport.close()


# A wide hop is sent in several NCCL groups, the same at both ends; `studies/nccl_cuts` shows why none may be larger.
# `dev/prove.py` counts the messages in the groups of every schedule.

WIDE = 20
LARGE = torch.empty(1 << 20, dtype=torch.uint8, device="meta")


def peers_of(groups):
    return [[each.peer for each in (*some.sends, *some.recvs)] for some in groups]


def test_groups_have_one_order_on_all_ranks_and_small_messages_share_them():
    small = torch.zeros(8)
    sends = [P2PMessage(1, LARGE, 20), P2PMessage(2, small, 20), P2PMessage(3, LARGE, 0), P2PMessage(4, small, 2)]
    found = uncut(P2PGroup(sends, [P2PMessage(5, small, 17)], hop=7), 0, range(6))
    assert peers_of(found) == [[4, 5], [2], [3], [1]]
    assert {some.hop for some in found} == {7}
    assert uncut(P2PGroup([], []), 0, range(6)) == []


def test_a_short_batch_without_a_schedule_is_one_group_as_nccl_s_own():
    """A rank may wait for what another one sends only after a later batch, so its own must not be parted."""
    sends = [P2PMessage(peer, LARGE) for peer in (1, 1, 1, 19)]
    recvs = [P2PMessage(peer, LARGE) for peer in (1, 2, 19)]
    assert peers_of(uncut(P2PGroup(sends, recvs), 0, range(WIDE))) == [[1, 1, 1, 19, 1, 2, 19]]
    assert len(uncut(P2PGroup(sends, [*recvs, P2PMessage(2, LARGE)]), 0, range(WIDE))) > 1
    long = [P2PMessage(peer, LARGE) for peer in range(1, WIDE) for _ in range(3)]
    counts = [len(some.sends) for some in uncut(P2PGroup(long, []), 0, range(WIDE))]
    assert (sum(counts), max(counts)) == (len(long), MOST_MESSAGES)


def exchanged_in_a_wide_hop(world):
    row = torch.full((WIDE, 1), float(world.rank)).flatten()
    world.run(direct.all_gather(WIDE), row)
    return row.tolist() == [*range(WIDE)]


def exchanged_in_a_long_batch(world):
    batch, places = DeviceMessages(world), torch.zeros(3, world.size)
    for number, row in enumerate(places):
        for peer in range(world.size):
            if peer != world.rank:
                batch.post(torch.tensor([100.0 * number + world.rank]), peer, is_send=True)
                work = batch.post(row[peer : peer + 1], peer, is_send=False)
    work.wait()
    expected = torch.arange(world.size) + 100.0 * torch.arange(3)[:, None]
    expected[:, world.rank] = 0.0
    return torch.equal(places, expected)


@pytest.mark.parametrize(("body", "ranks"), [(exchanged_in_a_wide_hop, WIDE), (exchanged_in_a_long_batch, 9)])
def test_what_is_sent_in_several_groups_arrives(body, ranks, monkeypatch):
    """Messages of any size are large here. The stand-in lets ranks whose groups differ wait for ever, or raises."""
    begun = Mock(wraps=stand_in.groupStart)
    monkeypatch.setattr(stand_in, "groupStart", begun)
    monkeypatch.setattr("commrt.nccl_groups.JOINED", ((float("inf"), 1),))
    monkeypatch.setattr(World, "connect", lambda world, device: None)
    assert run_ranks(ranks, body, connect=over_nccl) == [True] * ranks
    assert begun.call_count > ranks
