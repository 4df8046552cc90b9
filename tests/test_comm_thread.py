# SPDX-License-Identifier: Apache-2.0
"""Tasks of a communication thread are answered whatever interrupts it; callbacks have one place in their order."""

import _thread
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from threading import Event, Thread, Timer
from time import monotonic

import pytest
import torch
from cases import on_ranks

import commrt
from commrt.errors import DeadlineExceeded, Place, TransportClosed, TransportError, UsageError
from commrt.testing.faults import delay_at, with_faults
from commrt.testing.ranks import run_ranks
from commrt.threads.calls import outwait_calls, start_call
from commrt.threads.comm_thread import CommThread
from commrt.threads.future import Future
from commrt.threads.starting import start_thread

LIMIT_S = 20.0


def interposed(task, at, act):
    """Run `task`, with `act` before its bytecode number `at`, as a signal would; False if it ended before that."""
    reached, acted = count(), []

    def trace(frame, event, argument):
        frame.f_trace_opcodes = True
        if event == "call":
            sys.settrace(trace)  # or Python 3.12 does not notice the line before
        if event == "opcode" and next(reached) == at:
            acted.append(at)
            act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        task()
    finally:
        sys.settrace(before)
    return bool(acted)


def interrupt():
    raise KeyboardInterrupt


def test_a_value_reaches_all_threads_that_wait_for_it():
    future = Future()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(future.result, 30) for _ in range(2)]
        future.set_result("yes")
    assert [future.result() for future in waiting] == ["yes", "yes"]
    assert future.done()


@pytest.mark.parametrize("is_set", [False, True])
def test_an_interrupt_at_any_point_of_a_wait_loses_no_result_and_never_blocks_the_thread_that_sets_it(is_set):
    for at in count():
        future = Future()
        with ThreadPoolExecutor(1) as pool:
            if is_set:
                future.set_result(1)
            try:
                was_interrupted = interposed(lambda future=future: future.result(0), at, interrupt)
            except KeyboardInterrupt:
                was_interrupted = True
            except TimeoutError:
                was_interrupted = False
            if not is_set:
                pool.submit(future.set_result, 1).result(30)
        assert future.result(0) == 1
        if not was_interrupted:
            break
    assert at > 5


def test_an_interrupt_that_did_not_wake_the_waiting_thread_is_noticed_soon():
    """As one that comes just before the wait begins."""
    waiting, begin_s = Future(), monotonic()
    Timer(0.1, _thread.interrupt_main).start()  # a flag, and no signal that ends a system call
    with pytest.raises(KeyboardInterrupt):
        waiting.exception(20)
    assert monotonic() - begin_s < 15


def test_a_callback_that_fails_is_logged_and_the_others_run(caplog):
    future, heard = Future(), []
    future.add_done_callback(heard.append)
    future.add_done_callback(lambda _: 1 // 0)
    future.add_done_callback(lambda _: heard.append("in order"))
    future.set_result(1)
    assert heard == [future, "in order"]
    assert "a callback of a future failed" in caplog.text


def test_a_task_is_answered_or_refused_wherever_in_its_submission_the_thread_closes():
    refused = 0
    for at in count():
        thread, futures = CommThread(print), []

        def submit(thread=thread, futures=futures):
            futures.append(thread.submit(lambda: "done"))

        try:
            closed = interposed(submit, at, thread.close)
        except TransportClosed:
            closed = True
        thread.close()
        for future in futures:
            error = future.exception(LIMIT_S)
            assert error is None or isinstance(error, TransportClosed)
            refused += error is not None
        if not closed:
            break
    assert at > 10
    assert refused > 10
    assert futures[0].result() == "done"


def test_what_follows_a_failure_says_what_that_was_and_where():
    place = Place(rank=0, peer=1, step=7, bucket=2, hop=3, nbytes=40)

    def fail():
        raise DeadlineExceeded("no future from ranks [1]", place)

    def learn(failure):
        failure.elsewhere = "Rank 1 saw OSError: the data set is gone"

    thread = CommThread(learn)
    first, second = thread.submit(fail), thread.submit(int)
    error = second.exception(LIMIT_S)
    assert isinstance(error, TransportClosed)
    assert error.place == place
    assert error.__cause__ is first.exception(LIMIT_S)
    assert str(error) == (
        "an earlier transfer failed, so this one was not started: open a new world or group. "
        "It was DeadlineExceeded: no future from ranks [1] [rank 0, peer 1, step 7, bucket 2, hop 3, nbytes 40]. "
        "Rank 1 saw OSError: the data set is gone"
    )
    thread.close()


def test_a_thread_that_was_given_up_starts_no_more_tasks_and_says_why():
    thread = CommThread(print)
    assert thread.give_up(KeyboardInterrupt())
    error = thread.submit(int).exception(LIMIT_S)
    assert str(error) == "this world was given up: open a new world or group. It was KeyboardInterrupt"
    thread.close()
    assert not thread.give_up(OSError("later"))


def test_an_error_and_a_reason_to_give_up_never_both_come_first():
    for at in count():
        told, given = [], []
        thread = CommThread(told.append)
        give_up = partial(thread.give_up, OSError())
        if not interposed(partial(thread._fail, OSError()), at, lambda act=give_up, to=given: to.append(act())):
            break
        assert len(told) + sum(given) == 1
    assert at > 10


def test_an_error_that_cannot_be_told_to_the_other_ranks_says_so():
    def tell(failure):
        raise OSError("no store")

    thread = CommThread(tell)
    first, second = thread.submit(lambda: 1 // 0), thread.submit(int)
    error = first.exception(LIMIT_S)
    assert isinstance(error, ZeroDivisionError)
    assert error.__notes__ == ["telling the other ranks failed as well: OSError: no store"]
    assert isinstance(second.exception(LIMIT_S), TransportClosed)
    thread.close()


@pytest.mark.parametrize("start", [CommThread.submit, lambda *given: Thread(target=CommThread.run, args=given).start()])
def test_a_close_with_a_limit_does_not_wait_for_a_task_that_is_stuck(start):
    thread, begun, go_on = CommThread(print), Event(), Event()
    start(thread, lambda: begun.set() or go_on.wait())
    begun.wait()
    with pytest.raises(TimeoutError):
        thread.close(0.05)
    go_on.set()
    thread.close(LIMIT_S)


SHORT_S = 0.3
LATE = {"wrap": with_faults(delay_at(step=0, seconds=0.3))}
"""The first transfer ends after its callbacks were added."""
FIRST = commrt.Tag(0, "first")


def begin(world, value=1.0, tag=FIRST):
    return world.all_reduce(torch.full((4,), value), "sum", async_op=True, tag=tag)


def summed(world, tensor, **options):
    world.all_reduce(tensor, "sum", **options)
    return tensor


def run_twice(world, tensor):
    for _ in range(2):
        world.run(commrt.Ring().schedule(0, world.size), tensor)
    return tensor


NESTED = {
    "a sum": lambda world, tensor: summed(world, tensor).tolist(),
    "a work": lambda world, tensor: world.all_reduce(tensor, "sum", async_op=True).wait() or tensor.tolist(),
    "a future": lambda world, tensor: begin(world, tensor[0].item()).get_future().wait()[0].tolist(),
    "a schedule": lambda world, tensor: run_twice(world, tensor).div_(world.size).tolist(),
    "callbacks of callbacks": lambda world, tensor: (
        begin(world).get_future().then(lambda f: summed(world, f.value()[0])).wait().tolist()
    ),
}


@pytest.mark.parametrize("faults", [LATE, {}], ids=["late", "done"])
@pytest.mark.parametrize("nested", NESTED.values(), ids=NESTED)
def test_a_callback_begins_transfers_and_waits_for_them(nested, faults):
    def body(world):
        after = begin(world).get_future().then(lambda future: nested(world, future.value()[0]))
        assert summed(world, torch.ones(4), tag=commrt.Tag(1, "next")).tolist() == [3.0] * 4
        return after.wait()

    assert run_ranks(3, body, **faults) == [[9.0] * 4] * 3


@on_ranks(2, **LATE)
def test_callbacks_added_after_the_next_transfer_was_begun_come_after_it_on_all_ranks(world):
    works = [begin(world, n + 1.0) for n in range(4)]
    if world.rank:
        world.comm_thread.submit(lambda: None).result()  # all are done there, and on rank 0 they may not be
    futures = [work.get_future().then(lambda f: summed(world, f.value()[0])) for work in works]
    assert [future.wait()[0].item() for future in futures] == [4.0, 8.0, 12.0, 16.0]


FAILING = {
    "disagrees with rank 0 about numel": lambda world: summed(world, torch.ones(1000 + 1000 * world.rank)),
    "ZeroDivisionError": lambda world: 1 // 0,
}


@pytest.mark.parametrize("error", FAILING)
@on_ranks(2, **LATE)
def test_what_a_callback_raises_is_its_own_error_and_harms_no_later_transfer(world, error):
    begin(world).wait()
    after = begin(world).get_future().then(lambda _: FAILING[error](world))
    with pytest.raises(RuntimeError, match=error):
        after.wait()
    assert summed(world, torch.ones(4)).tolist() == [2.0] * 4


@on_ranks(2, **LATE)
def test_a_callback_cannot_close_the_world(world):
    after = begin(world).get_future().then(lambda _: world.close())
    with pytest.raises(RuntimeError, match="a callback of a future runs on the thread that communicates"):
        after.wait()


def test_a_world_that_closes_ends_the_transfers_of_callbacks_first():
    results = {}

    def body(world):
        begin(world).get_future().then(lambda f: results.update({world.rank: summed(world, f.value()[0]).tolist()}))

    run_ranks(2, body, **LATE)
    assert results == {0: [4.0] * 4, 1: [4.0] * 4}


def test_neither_a_task_nor_its_callback_may_wait_for_a_later_task():
    thread, go_on, refusals = CommThread(lambda _: None), Event(), []

    def wait(*_):
        with pytest.raises(UsageError, match="neither wait for a transfer that comes later") as refused:
            later.result()
        refusals.append(refused)

    first = thread.submit(lambda: go_on.wait() and wait())
    later = thread.submit(int)
    first.add_done_callback(wait)
    go_on.set()
    assert later.result(LIMIT_S) == 0
    assert len(refusals) == 2
    thread.close()


def test_transfers_of_a_callback_may_take_longer_than_the_limit_together():
    thread, go_on, numbers = CommThread(lambda _: None, limit_s=lambda: SHORT_S), Event(), []
    first = thread.submit(go_on.wait)
    first.add_done_callback(
        lambda _: numbers.extend(thread.submit(lambda: Event().wait(SHORT_S / 2) or 1).result() for _ in range(6))
    )
    go_on.set()
    assert thread.submit(lambda: sum(numbers)).result(LIMIT_S) == 6
    assert thread.failure is None
    thread.close()


def test_a_wait_of_torch_in_a_callback_for_a_later_transfer_ends_the_world_at_the_timeout(caplog):
    def body(world):
        first, later = begin(world), []
        after = first.get_future().then(lambda _: later[0].wait())
        later.append(begin(world, tag=commrt.Tag(1, "later")).get_future())
        with pytest.raises(RuntimeError, match="a callback of a future kept the communication thread"):
            after.wait()
        assert world.closed

    run_ranks(2, body, timeout_s=1.0, **LATE)
    assert "a callback of a future kept the communication thread waiting for longer than 1 s" in caplog.text


def test_the_end_of_a_process_waits_for_calls_that_nobody_needs_up_to_a_limit():
    gate = Event()
    ended = start_call(gate.wait)
    outwait_calls(0.01)
    assert not ended.done()
    Timer(0.05, gate.set).start()
    outwait_calls(LIMIT_S)
    assert ended.done()


def test_a_limit_on_threads_is_named(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", refuse)
    with pytest.raises(TransportError, match=r"thread commrt-x cannot be started .*`ulimit -u`"):
        start_thread(print, "commrt-x")
