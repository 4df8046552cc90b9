# SPDX-License-Identifier: Apache-2.0
"""What one thread tells another, whatever interrupts who waits for it."""

import _thread
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from time import monotonic

import pytest
from opcodes import interrupted

from commrt.threads.answer import Answer


def test_a_value_reaches_who_waits_for_it():
    answer = Answer()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(answer.result, 30) for _ in range(2)]
        answer.give("yes")
    assert [future.result() for future in waiting] == ["yes", "yes"]
    assert answer.given


def test_an_error_is_raised_where_the_answer_is_awaited_every_time():
    answer = Answer()
    answer.fail(OSError("no"))
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            answer.result()
    assert isinstance(answer.error(), OSError)


def test_who_waits_too_long_is_told():
    answer = Answer()
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        answer.result(0.01)
    assert not answer.given


def test_an_interrupt_at_any_point_of_a_wait_never_holds_up_who_gives_the_answer():
    for at in count():
        answer = Answer()
        was_interrupted = interrupted(lambda answer=answer: answer.result(0), at)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(answer.give, 1).result(30)
        assert answer.result(0) == 1
        if not was_interrupted:
            break
    assert at > 10


def test_an_interrupt_at_any_point_loses_no_answer_that_was_given():
    for at in count():
        answer = Answer()
        answer.give(1)
        was_interrupted = interrupted(lambda answer=answer: answer.result(0), at)
        assert answer.result(0) == 1
        if not was_interrupted:
            break
    assert at > 5


def test_an_interrupt_that_did_not_wake_who_waits_is_noticed_soon():
    """As one that comes just before the wait begins."""
    waiting, begin_s = Answer(), monotonic()
    threading.Timer(0.1, _thread.interrupt_main).start()  # a flag, and no signal that ends a system call
    with pytest.raises(KeyboardInterrupt):
        waiting.error(20)
    assert monotonic() - begin_s < 15
