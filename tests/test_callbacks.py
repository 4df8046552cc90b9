# SPDX-License-Identifier: Apache-2.0
"""Callbacks of futures: what they begin has one place in the order of all ranks, and their waits end."""

from __future__ import annotations

from threading import Event

import pytest
import torch

import commrt
from commrt.errors import UsageError
from commrt.testing.faults import delay_at, with_faults
from commrt.testing.ranks import run_ranks
from commrt.threads.comm_thread import CommThread

LIMIT_S = 20.0
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


def test_callbacks_added_after_the_next_transfer_was_begun_come_after_it_on_all_ranks():
    def body(world):
        works = [begin(world, n + 1.0) for n in range(4)]
        if world.rank:
            world.comm_thread.submit(lambda: None).result()  # all are done there, and on rank 0 they may not be
        futures = [work.get_future().then(lambda f: summed(world, f.value()[0])) for work in works]
        return [future.wait()[0].item() for future in futures]

    assert run_ranks(2, body, **LATE) == [[4.0, 8.0, 12.0, 16.0]] * 2


FAILING = {
    "disagrees with rank 0 about numel": lambda world: summed(world, torch.ones(1000 + 1000 * world.rank)),
    "ZeroDivisionError": lambda world: 1 // 0,
}


@pytest.mark.parametrize("error", FAILING)
def test_what_a_callback_raises_is_its_own_error_and_harms_no_later_transfer(error):
    def body(world):
        begin(world).wait()
        after = begin(world).get_future().then(lambda _: FAILING[error](world))
        with pytest.raises(RuntimeError, match=error):
            after.wait()
        return summed(world, torch.ones(4)).tolist()

    assert run_ranks(2, body, **LATE) == [[2.0] * 4] * 2


def test_a_callback_cannot_close_the_world():
    def body(world):
        after = begin(world).get_future().then(lambda _: world.close())
        with pytest.raises(RuntimeError, match="a callback of a future runs on the thread that communicates"):
            after.wait()

    run_ranks(2, body, **LATE)


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
