# SPDX-License-Identifier: Apache-2.0
"""Records are gathered in time or the missing ranks are named; all ranks leave a question with the same answer."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest
from moved_clock import moved_clock
from torch.distributed import HashStore

from commrt.errors import DeadlineExceeded, DisagreementError, PeerLost, Place
from commrt.runtime import connection
from commrt.store import agreement
from commrt.store.agreement import gather, wait_until_read
from commrt.store.client import call_store
from commrt.testing.ranks import run_ranks

PATIENT_S = 30.0


@pytest.fixture
def store():
    return HashStore()


def on_threads(ranks, body):
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(body, rank) for rank in ranks]
        return [future.exception() or future.result() for future in futures]


def test_ranks_that_do_not_come_are_named(store):
    errors = on_threads([0, 2], lambda rank: gather(store, rank, range(4), rank, 0.2, json.loads))
    assert [type(error) for error in errors] == [DeadlineExceeded] * 2
    assert all("ranks [1, 3] did not come within 0.2 s" in str(error) for error in errors)


def test_the_first_rank_leaves_after_all_others_have_read(store, monkeypatch):
    monkeypatch.setattr(agreement, "LINGER_S", PATIENT_S)  # a busy machine holds up a thread for seconds
    order = []

    def leave(rank):
        gather(store, rank, range(3), rank, PATIENT_S, json.loads)
        if rank == 2:
            store.wait(["early"])
        wait_until_read(store, rank, range(3))
        order.append(rank)
        if rank == 1:
            store.set("early", "")

    assert on_threads(range(3), leave) == [None] * 3
    assert sorted(order[:2]) == [1, 2]
    assert order[2] == 0


@pytest.mark.parametrize("sizes", [(2, 3), (2, 2, 3)])
def test_ranks_that_start_with_different_worlds_need_no_deadline_to_find_it(store, sizes):
    begin_s = monotonic()
    errors = on_threads(
        range(len(sizes)), lambda rank: connection.compare_starts(store, rank, range(sizes[rank]), PATIENT_S)
    )
    assert any(isinstance(error, DisagreementError) and error.about == "world size" for error in errors)
    assert monotonic() - begin_s < PATIENT_S


def test_a_claim_of_any_length_is_compared_and_the_difference_is_shown():
    def body(world):
        world.agree("colours", long="red " * 1000)
        with pytest.raises(DisagreementError) as caught:
            world.agree("colours", long="red " * 1000 + ("blue" if world.rank == 2 else "red"))
        world.agree("colours", long="red")
        return caught.value

    for error in run_ranks(4, body):
        assert error.about == "long"
        assert "rank 2 disagrees with rank 0 about long: '...red" in str(error)
        assert "red blue' against '" in str(error)


@pytest.mark.parametrize(
    ("failure", "reports", "limit_s"),
    [
        (PeerLost, {}, agreement.BROKEN_GRACE_S),
        (DeadlineExceeded, {}, agreement.GRACE_S),
        (PeerLost, {1: [2, "DeadlineExceeded: no answer"]}, agreement.GRACE_S),
        (PeerLost, {1: [2, "PeerLost: the connection broke"]}, agreement.BROKEN_GRACE_S),
    ],
    ids=["broken", "late", "broken by a late one", "broken by a broken one"],
)
def test_only_a_rank_that_waits_for_a_deadline_may_report_much_later(store, failure, reports, limit_s):
    for rank, report in reports.items():
        store.set(f"report/{rank}", json.dumps(report))
    error = failure("it is over", Place(0, 1))
    with moved_clock() as clock, ThreadPoolExecutor(1) as pool:
        begin_s, diagnosed = clock.now_s(), pool.submit(agreement.diagnose, store, 0, 3, error)
        clock.wait_for_readers(1)
        clock.advance_until(diagnosed.done, limit_s / 40)
        assert limit_s <= clock.now_s() - begin_s < 8 * limit_s
    assert str(error).endswith(f"Rank {2 if reports else 1} reported nothing: look there first")


def test_a_question_s_own_timeout_is_passed_on():
    def question():
        raise TimeoutError("of the question")

    with pytest.raises(TimeoutError, match="of the question") as raised:
        call_store(question, PATIENT_S)
    assert not isinstance(raised.value, DeadlineExceeded)
