# SPDX-License-Identifier: Apache-2.0
"""A future hands a result to the threads that wait for it, whatever interrupts them."""

import _thread
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from time import monotonic

import pytest
from interrupts import interrupted

from commrt.threads.future import Future


def test_a_value_reaches_all_threads_that_wait_for_it():
    future = Future()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(future.result, 30) for _ in range(2)]
        future.set_result("yes")
    assert [future.result() for future in waiting] == ["yes", "yes"]
    assert future.done()


def test_an_error_is_raised_each_time_that_the_result_is_taken():
    future = Future()
    future.set_exception(OSError("no"))
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            future.result()
    assert isinstance(future.exception(), OSError)


def test_a_wait_ends_at_its_timeout():
    future = Future()
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        future.result(0.01)
    assert not future.done()


@pytest.mark.parametrize("is_set", [False, True])
def test_an_interrupt_at_any_point_of_a_wait_loses_no_result_and_never_blocks_the_thread_that_sets_it(is_set):
    for at in count():
        future = Future()
        with ThreadPoolExecutor(1) as pool:
            if is_set:
                future.set_result(1)
            was_interrupted = interrupted(lambda future=future: future.result(0), at)
            if not is_set:
                pool.submit(future.set_result, 1).result(30)
        assert future.result(0) == 1
        if not was_interrupted:
            break
    assert at > 5


def test_an_interrupt_that_did_not_wake_the_waiting_thread_is_noticed_soon():
    """As one that comes just before the wait begins."""
    waiting, begin_s = Future(), monotonic()
    threading.Timer(0.1, _thread.interrupt_main).start()  # a flag, and no signal that ends a system call
    with pytest.raises(KeyboardInterrupt):
        waiting.exception(20)
    assert monotonic() - begin_s < 15


def test_a_callback_runs_once_whether_it_comes_before_the_result_or_after_it():
    future, heard = Future(), []
    future.add_done_callback(heard.append)
    assert heard == []
    future.set_result(1)
    future.add_done_callback(heard.append)
    assert heard == [future, future]


def test_a_callback_that_fails_is_logged_and_the_others_run(caplog):
    future, heard = Future(), []
    future.add_done_callback(heard.append)
    future.add_done_callback(lambda _: 1 // 0)
    future.set_result(1)
    assert heard == [future]
    assert "a callback of a future failed" in caplog.text
