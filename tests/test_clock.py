# SPDX-License-Identifier: Apache-2.0
"""All deadlines of a process read one clock, and a test that moves it waits for none of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from math import inf
from time import monotonic

import nccl_stand_in as nccl
import pytest
import torch
from moved_clock import moved_clock
from torch.distributed import HashStore

from commrt.errors import DeadlineExceeded
from commrt.threads.deadline import Deadline, clock
from commrt.threads.future import Future
from commrt.transport.local import Fabric
from commrt.transport.nccl import NcclTransport
from commrt.transport.protocol import CPU, P2PGroup, P2PMessage, Tag
from commrt.transport.shared import SharedTransport

HOUR_S = 3600.0


def local(_, ranks):
    fabric = Fabric(ranks, HOUR_S)
    return [fabric.transport(rank) for rank in range(ranks)]


def connected(kind, store, ranks):
    arguments = {SharedTransport: (), NcclTransport: (CPU, nccl)}[kind]
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: kind(store, rank, range(ranks), HOUR_S, *arguments), range(ranks)))


TRANSPORTS = {
    "local": local,
    "shared memory": lambda store, ranks: connected(SharedTransport, store, ranks),
    "NCCL": lambda store, ranks: connected(NcclTransport, store, ranks),
}


@pytest.mark.parametrize("connect", TRANSPORTS.values(), ids=TRANSPORTS)
def test_a_transfer_that_nobody_answers_ends_when_the_clock_says_so(connect):
    first, second = connect(HashStore(), 2)
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


def test_a_deadline_ends_when_the_clock_says_so():
    with moved_clock() as moved:
        deadline, begin_s, step_s = Deadline(HOUR_S), moved.now_s(), HOUR_S / 9.5
        moved.advance_until(lambda: deadline.left_s <= 0, step_s)
        assert HOUR_S <= moved.now_s() - begin_s < HOUR_S + step_s


def test_a_deadline_that_began_before_the_block_ends_in_it():
    deadline = Deadline(HOUR_S)
    with moved_clock() as moved:
        moved.advance_until(lambda: deadline.left_s <= 0, HOUR_S / 10)
        assert deadline.waited_s == pytest.approx(HOUR_S, rel=0.2)


def test_what_a_wait_is_for_may_come_while_the_clock_stands_still():
    with moved_clock(), ThreadPoolExecutor(1) as pool:
        future = Future()
        waiting = pool.submit(future.result, HOUR_S)
        future.set_result("here")
        assert waiting.result() == "here"


def test_after_the_block_deadlines_read_the_machine_s_clock_again():
    with moved_clock():
        pass
    assert clock.now_s() == pytest.approx(monotonic(), abs=5.0)
    assert clock.slice_s == inf
