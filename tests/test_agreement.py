# SPDX-License-Identifier: Apache-2.0
"""All ranks leave a question with the same answer, in time, and nothing of it stays behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import monotonic

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from commrt.errors import CommrtError, DeadlineExceeded, DisagreementError, PeerLost
from commrt.membership import agreement, store_client
from commrt.membership.agreement import agree
from commrt.membership.store_client import call_store
from commrt.testing.processes import free_port
from commrt.testing.ranks import local_worlds, run_ranks
from commrt.threads.future import Future

PATIENT_S = 30.0


def one_in_memory(ranks):
    return [HashStore()] * ranks


def one_behind_sockets(ranks):
    port, limit = free_port(), timedelta(seconds=PATIENT_S)
    return [TCPStore("127.0.0.1", port, None, rank == 0, limit, wait_for_workers=False) for rank in range(ranks)]


def one_with_prefixes(ranks):
    return [PrefixStore("outer", PrefixStore("inner", store)) for store in one_behind_sockets(ranks)]


def answers(stores, claims, timeouts_s=None):
    """What each rank that comes leaves with; a claim of None is a rank that does not come."""

    def answer(rank):
        try:
            timeout_s = timeouts_s[rank] if timeouts_s else PATIENT_S
            agree(stores[rank], rank, range(len(claims)), "colour", {"colour": claims[rank]}, timeout_s)
        except CommrtError as error:
            return error
        return None

    come = [rank for rank, claim in enumerate(claims) if claim is not None]
    with ThreadPoolExecutor(len(come)) as pool:
        return list(pool.map(answer, come))


@pytest.mark.parametrize("make", [one_in_memory, one_behind_sockets, one_with_prefixes])
@pytest.mark.parametrize("claims", [["red"] * 3, ["red", "red", "blue"]], ids=["a yes", "a no"])
def test_an_answer_leaves_nothing_on_the_store(make, claims):
    stores = make(3)
    before = stores[0].num_keys()
    for _ in range(3):
        assert {type(answer) for answer in answers(stores, claims)} == {
            type(None) if len(set(claims)) == 1 else DisagreementError
        }
    assert stores[0].num_keys() == before


def test_who_gives_up_first_answers_for_all():
    begin = monotonic()
    errors = answers(one_in_memory(3), ["red", "red", None], [PATIENT_S, 0.2, PATIENT_S])
    assert [type(error) for error in errors] == [DeadlineExceeded] * 2
    assert all("ranks [2] did not come within 0.2 s" in str(error) for error in errors)
    assert monotonic() - begin < PATIENT_S / 2


def test_who_comes_after_the_others_gave_up_is_told_so():
    stores = one_in_memory(2)
    answers(stores, ["red", None], [0.1, 0.1])
    begin = monotonic()
    (late,) = answers(stores, [None, "red"])
    assert isinstance(late, DeadlineExceeded)
    assert "ranks [1] did not come within 0.1 s" in str(late)
    assert monotonic() - begin < PATIENT_S / 2


def test_a_rank_that_does_not_come_is_an_error_and_no_inequality():
    world, _ = local_worlds(2, timeout_s=0.2)
    with pytest.raises(DeadlineExceeded, match=r"ranks \[1\] did not come"):
        world.all_equal("weights", "mark")


def test_another_question_is_an_error_and_no_inequality():
    def body(world):
        with pytest.raises(DisagreementError, match="about topic") as caught:
            world.all_equal("weights" if world.rank else "buffers", "mark")
        return caught.value.about

    assert run_ranks(2, body) == ["topic"] * 2


@pytest.fixture
def leaves(monkeypatch):
    """Let a rank be interrupted in a question as soon as another finds `key` on the store; what it left behind."""
    pool = ThreadPoolExecutor(1)

    def interrupted(store, rank, size, key, other):
        left = []

        def interrupted_ask(question, limit_s, asker=None):
            monkeypatch.undo()
            left.append(pool.submit(question))
            other.wait([key], timedelta(seconds=PATIENT_S))
            raise KeyboardInterrupt

        monkeypatch.setattr(agreement, "call_store", interrupted_ask)
        with pytest.raises(KeyboardInterrupt):
            agree(store, rank, range(size), "colour", {"colour": "red"}, PATIENT_S)
        return left[0]

    yield interrupted
    pool.shutdown()


@pytest.mark.parametrize("make", [one_in_memory, one_behind_sockets, one_with_prefixes])
def test_nobody_votes_in_the_name_of_a_rank_that_left(leaves, make):
    begin, stores = monotonic(), make(2)
    left = leaves(stores[1], 1, 2, "colour/here/1", stores[0])
    left.result()
    (error,) = answers(stores, ["red", None])
    assert isinstance(error, PeerLost)
    assert "colour: rank 1 left it by a KeyboardInterrupt" in str(error)
    assert monotonic() - begin < PATIENT_S / 2


def test_who_leaves_ends_the_question_for_those_who_wait(leaves):
    begin, stores = monotonic(), one_behind_sockets(3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(answers, stores, ["red", None, None])
        left = leaves(stores[1], 1, 3, "colour/agreeing", stores[2])
        left.result()
        assert isinstance(waiting.result()[0], PeerLost)
    assert monotonic() - begin < PATIENT_S / 2


class JustTooLate(Future):
    """Comes between the end of the wait and the next look."""

    def exception(self, timeout_s=None):
        error = super().exception(PATIENT_S)
        if timeout_s is not None:
            raise TimeoutError
        return error


def test_an_answer_that_comes_just_too_late_is_an_answer(monkeypatch):
    monkeypatch.setattr(store_client, "Future", JustTooLate)
    assert call_store(lambda: "yes", 0.1) == "yes"


def test_a_question_s_own_timeout_is_passed_on():
    def question():
        raise TimeoutError("of the question")

    with pytest.raises(TimeoutError, match="of the question") as raised:
        call_store(question, PATIENT_S)
    assert not isinstance(raised.value, DeadlineExceeded)
