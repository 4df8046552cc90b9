# SPDX-License-Identifier: Apache-2.0
"""All deadlines of a process read one clock, and a test that moves it waits for none of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from math import inf
from time import monotonic

import pytest
import torch
from moved_clock import moved_clock
from transports import local, nccl, shared

from commrt.errors import DeadlineExceeded
from commrt.threads.deadline import Deadline, clock
from commrt.threads.future import Future
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag

HOUR_S = 3600.0


@pytest.mark.parametrize("connect", [local, shared, nccl], ids=lambda connect: connect.__name__)
def test_a_transfer_that_nobody_answers_ends_when_the_clock_says_so(connect):
    first, second = connect(2, HOUR_S)
    with closing(first), closing(second), moved_clock() as moved, ThreadPoolExecutor(1) as pool:

        def receive():
            first.bind(P2PGroup((), (P2PMessage(1, torch.zeros(4)),), 0))(Tag(0, "it"))
            if hasattr(first, "wait"):
                first.wait()

        receiving = pool.submit(receive)
        moved.wait_for_readers(1)
        moved.advance(HOUR_S - 1.0)
        assert not receiving.done()
        moved.advance_until(receiving.done)
        with pytest.raises(DeadlineExceeded, match="within 3600 s"):
            receiving.result()


def test_a_future_is_waited_for_until_the_clock_says_so():
    with moved_clock() as moved, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Future().result, HOUR_S)
        moved.wait_for_readers(1)
        moved.advance(HOUR_S)
        with pytest.raises(TimeoutError, match="no result within 3600 s"):
            waiting.result()


def test_a_deadline_that_began_before_the_block_ends_in_it_when_the_clock_says_so():
    deadline = Deadline(HOUR_S)
    with moved_clock() as moved:
        begin_s, step_s = moved.now_s(), HOUR_S / 9.5
        moved.advance_until(lambda: deadline.left_s <= 0, step_s)
        assert HOUR_S - step_s < moved.now_s() - begin_s < HOUR_S + step_s


def test_after_the_block_deadlines_read_the_machine_s_clock_again():
    with moved_clock():
        pass
    assert clock.now_s() == pytest.approx(monotonic(), abs=5.0)
    assert clock.slice_s == inf
