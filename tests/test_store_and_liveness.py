# SPDX-License-Identifier: Apache-2.0
"""A store keeps first values; ranks agree on it in time or name who is missing; a process lives while it answers."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import partial
from threading import Event, Thread
from time import monotonic, sleep
from types import SimpleNamespace

import failing_ranks
import pytest
from cases import for_each, on_ranks
from moved_clock import moved_clock
from peer_group import on_threads
from torch.distributed import HashStore, PrefixStore, TCPStore

from commrt.backup_workers.quorum import set_and_wake
from commrt.elastic.links import LinkCheck, probe
from commrt.elastic.listener import MESSAGE, Listener, send_message
from commrt.errors import DeadlineExceeded, DisagreementError, PeerLost, Place, UsageError
from commrt.runtime import connection
from commrt.store import records
from commrt.store.client import ANSWER_S, TimedStore, call_store, clone_connection
from commrt.store.parsing import typed
from commrt.store.records import gather, wait_until_read
from commrt.store.reports import BROKEN_GRACE_S, GRACE_S, diagnose
from commrt.testing.processes import run_processes

LIMIT_S = 20.0
PATIENT_S = 30.0
ENDS_AS_THE_STORE_WAKES = """
import sys, time
from torch.distributed import HashStore
from commrt.store import client
class Waker:
    def __del__(self, store=HashStore(), sleep=time.sleep):  # as the interpreter ends
        store.set("key", "")
        sleep(0.2)  # nobody says that the thread would come back; too short, and this passes for no reason
client.ANSWER_S = 0.1
client.start_request(lambda store=Waker.__del__.__defaults__[0]: store.wait(["key"]))
sys.modules["waker"] = Waker()
sys.exit(5)
"""


def lives(address):
    return probe([address], LIMIT_S)[address]


def test_a_listener_answers_until_it_is_closed(monkeypatch):
    monkeypatch.setattr(socket, "SOMAXCONN", 2)
    with closing(Listener("127.0.0.1")) as listener:
        assert [lives(listener.address) for _ in range(20)] == [True] * 20  # more often than its queue is long
        listener.close()
        assert lives(listener.address) is False


@pytest.mark.parametrize("error", [TimeoutError(), OSError(errno.EMFILE, "too many files"), UnicodeError("label")])
def test_only_a_refusal_says_that_a_process_is_gone(monkeypatch, error):
    def fail(*_):
        raise error

    assert lives("127.0.0.1 1") is False
    monkeypatch.setattr(socket, "socket", fail)
    assert lives("127.0.0.1 1") is None
    assert LinkCheck({3: "127.0.0.1 1"}, LIMIT_S).look() == {3}


def test_silent_hosts_are_asked_at_once():
    with socket.create_server(("", 0), backlog=0) as listener, ExitStack() as stack:
        port = listener.getsockname()[1]
        for _ in range(4):  # a full queue: the kernel drops all further calls
            (client := stack.enter_context(socket.socket())).setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        addresses = [f"127.0.0.{number} {port}" for number in range(1, 101)]
        begin_s = monotonic()
        assert probe(addresses, 0.2) == dict.fromkeys(addresses)
        assert monotonic() - begin_s < 100 * 0.2 / 2


@for_each("reaches", [True, False])
def test_a_rank_reaches_this_one_once_a_whole_large_message_has_come(reaches):
    serve = send_message if reaches else lambda client: client.send(MESSAGE[1:]) and client.close()
    with closing(Listener("127.0.0.1", serve)) as listener, closing(LinkCheck({3: listener.address}, LIMIT_S)) as links:
        assert links.look(LIMIT_S if reaches else 0.1) == (set() if reaches else {3})


def test_a_store_that_does_not_answer_is_waited_for_once():
    never = Event()
    store = TimedStore(SimpleNamespace(get=lambda _: never.wait(PATIENT_S)), 1, lambda: LIMIT_S)
    with moved_clock() as clock, ThreadPoolExecutor(1) as pool:
        first = pool.submit(store.get, "a key")
        clock.wait_for_readers(1)
        clock.advance_until(first.done)
        for request in (lambda: store.get("another"), lambda: store.read("a third")):
            with pytest.raises(DeadlineExceeded, match="the store gave no answer within 22 s"):
                request()
    never.set()


@pytest.mark.processes
def test_a_process_ends_with_its_own_exit_code_though_the_store_answers_a_request_as_it_ends():
    assert subprocess.run([sys.executable, "-c", ENDS_AS_THE_STORE_WAKES], timeout=100, check=False).returncode == 5


@pytest.mark.processes
def test_a_stopped_process_answers_and_a_killed_one_does_not_even_if_its_child_lives():
    def on_message(_, message, process):
        address, child = message
        os.kill(process.pid, signal.SIGSTOP)
        before = lives(address) is False
        process.kill()
        process.join()
        found.append((before, lives(address) is False))
        os.kill(child, signal.SIGKILL)
        return True

    found = []
    run_processes(1, failing_ranks.listening, on_message=on_message)
    assert found == [(False, True)]


@pytest.mark.parametrize("dies", [False, True], ids=["", "the first process dies before it wakes the others"])
@pytest.mark.parametrize("use_libuv", [True, False, None], ids=["libuv", "older", "one process"])
def test_the_first_value_holds_and_every_waiting_rank_gets_it(use_libuv, dies):
    if use_libuv is None:
        store = waiting = HashStore()
    else:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
        waiting = store.clone()
    heard, begun = [], Event()

    def listen():
        begun.set()
        waiting.wait(["shelf/word"], timedelta(seconds=LIMIT_S))
        heard.append(waiting.get("shelf/word"))

    listener = Thread(target=listen)
    listener.start()
    begun.wait()
    sleep(0.2)  # nobody says that it waits; too early, and this passes for no reason
    shelf = PrefixStore("shelf", store)
    if dies:
        shelf.compare_set("word", "", "first")
    assert [set_and_wake(shelf, "word", each) for each in ("second" if dies else "first", "second")] == ["first"] * 2
    listener.join(LIMIT_S / 2)
    assert heard == [b"first"]


def test_a_second_connection_to_a_store_that_is_gone_ends_in_time():
    held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", held.port, timeout=timedelta(seconds=LIMIT_S))
    del held
    begin_s = monotonic()
    with pytest.raises((DeadlineExceeded, PeerLost), match="the process that holds the store"):
        clone_connection(store, 0.1)
    assert monotonic() - begin_s < LIMIT_S - ANSWER_S


@pytest.mark.parametrize(
    "other", [{0: "a"}, "ab", None, [1], [1, 2], ["a", "a"], [-1, "a"], [True, "a"], [1 << 63, "a"]]
)
def test_a_record_reads_as_it_was_written_and_one_of_another_kind_is_refused(other):
    assert typed([1, "a", None, True], int, str, int | None, bool) == [1, "a", None, True]
    with pytest.raises(ValueError, match=r"not as expected|zip\(\)"):
        typed(other, int, str)


@pytest.fixture
def store():
    return HashStore()


def test_ranks_of_two_hosts_gather_each_among_themselves_and_leave_nothing(store):
    hosts = {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}
    for _ in range(20):
        found = on_threads(4, lambda rank: gather(store, rank, hosts[rank], rank, PATIENT_S, json.loads))
        assert found == [dict(zip(hosts[rank], hosts[rank], strict=True)) for rank in hosts]
        assert not store.list_keys()


def test_the_first_rank_leaves_after_all_others_have_read(store, monkeypatch):
    monkeypatch.setattr(records, "LINGER_S", PATIENT_S)  # a busy machine holds up a thread for seconds
    order = []

    def leave(rank):
        gather(store, rank, range(3), rank, PATIENT_S, json.loads, stays=True)
        if rank == 2:
            store.wait(["early"])
        if rank > 0:
            order.append(rank)  # before it says so, as rank 0 may be faster than what comes after that
        wait_until_read(store, rank, range(3))
        if rank == 0:
            order.append(rank)
        if rank == 1:
            store.set("early", "")

    assert on_threads(3, leave) == [None] * 3
    assert sorted(order[:2]) == [1, 2]
    assert order[2] == 0


@pytest.mark.parametrize(
    ("seen", "towards"),
    [(("127.0.1.1", "10.0.0.1"), "10.0.0.1"), (("127.0.0.1",) * 2, "127.0.0.1"), ((None,) * 2, None)],
)
def test_ranks_of_two_hosts_find_their_network_by_the_store(monkeypatch, store, seen, towards):
    """The store's host may find its own name on the loopback only."""
    hosts, addresses = iter("ab"), iter(seen)
    monkeypatch.setattr(connection, "host_identity", lambda: next(hosts))
    monkeypatch.setattr(connection, "network_address", lambda _: next(addresses))
    compared = partial(connection.compare_starts, store, members=range(2), timeout_s=PATIENT_S)
    assert [start.towards for start in on_threads(2, lambda rank: compared(rank=rank))] == [towards] * 2


def test_without_an_address_in_the_network_a_start_asks_for_the_card(monkeypatch):
    start = connection.Start({0: "a", 1: "b"}, None)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(UsageError, match="set GLOO_SOCKET_IFNAME"):
        connection.listening_address(start)


@on_ranks(4)
def test_a_claim_of_any_length_is_compared_and_the_difference_is_shown(world):
    world.agree("colours", long="red " * 1000)
    words = "rank 2 disagrees with rank 0 about long: '...red.*red blue' against '"
    with pytest.raises(DisagreementError, match=words) as caught:
        world.agree("colours", long="red " * 1000 + ("blue" if world.rank == 2 else "red"))
    world.agree("colours", long="red")
    assert caught.value.about == "long"


@pytest.mark.parametrize(
    ("failure", "reports", "limit_s"),
    [
        (PeerLost, {}, BROKEN_GRACE_S),
        (DeadlineExceeded, {}, GRACE_S),
        (PeerLost, {1: [2, "DeadlineExceeded: no answer", "", "", ""]}, GRACE_S),
        (PeerLost, {1: [2, "PeerLost: the connection broke", "", "", ""]}, BROKEN_GRACE_S),
    ],
    ids=["broken", "late", "broken by a late one", "broken by a broken one"],
)
def test_only_a_rank_that_waits_for_a_deadline_may_report_much_later(store, failure, reports, limit_s):
    for rank, report in reports.items():
        store.set(f"report/{rank}", json.dumps(report))
    error = failure("it is over", Place(0, 1))
    with moved_clock() as clock, ThreadPoolExecutor(1) as pool:
        begin_s, diagnosed = clock.now_s(), pool.submit(diagnose, store, 0, 3, error)
        clock.wait_for_readers(1)
        clock.advance_until(diagnosed.done, limit_s / 40)
        assert limit_s <= clock.now_s() - begin_s < 8 * limit_s
    assert str(error).endswith(f"Rank {2 if reports else 1} reported nothing: look there first")


def test_a_rank_of_this_host_that_broke_a_connection_is_not_waited_for(store):
    with moved_clock():  # which does not move
        diagnose(store, 0, 3, error := PeerLost("it broke", Place(0, 1)), one_host=True)
    assert str(error).endswith("Rank 1 reported nothing: look there first")


def test_a_question_s_own_timeout_is_passed_on():
    def question():
        raise TimeoutError("of the question")

    with pytest.raises(TimeoutError, match="of the question") as raised:
        call_store(question, PATIENT_S)
    assert not isinstance(raised.value, DeadlineExceeded)
