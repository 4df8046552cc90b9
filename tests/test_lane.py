# SPDX-License-Identifier: Apache-2.0
"""Every task of a lane is answered, whatever happens to the lane meanwhile."""

from __future__ import annotations

from itertools import count

import pytest
from opcodes import interposed

from commrt.errors import DeadlineExceeded, Place, TransportClosed
from commrt.threads.lane import Lane

LIMIT_S = 20.0


def ignore(failure):
    pass


def test_a_task_is_answered_or_refused_wherever_in_its_submission_the_lane_closes():
    refused = 0
    for at in count():
        lane, answers = Lane(ignore), []

        def submit(lane=lane, answers=answers):
            answers.append(lane.submit(lambda: "done"))

        try:
            closed = interposed(submit, at, lane.close)
        except TransportClosed:
            closed = True
        lane.close()
        for answer in answers:
            error = answer.error(LIMIT_S)
            assert error is None or isinstance(error, TransportClosed)
            refused += error is not None
        if not closed:
            break
    assert at > 10
    assert refused > 10
    assert answers[0].result() == "done"


def test_what_follows_a_failure_says_what_that_was_and_where():
    place = Place(rank=0, peer=1, step=7, bucket=2, hop=3, nbytes=40)

    def fail():
        raise DeadlineExceeded("no answer from ranks [1]", place)

    def learn(failure):
        failure.elsewhere = "Rank 1 saw OSError: the data set is gone"

    lane = Lane(learn)
    first, second = lane.submit(fail), lane.submit(int)
    error = second.error(LIMIT_S)
    assert isinstance(error, TransportClosed)
    assert error.place == place
    assert error.__cause__ is first.error(LIMIT_S)
    assert str(error) == (
        "an earlier transfer failed, so this one was not started: call init() for a new world. "
        "It was DeadlineExceeded: no answer from ranks [1] [rank 0, peer 1, step 7, bucket 2, hop 3, nbytes 40]. "
        "Rank 1 saw OSError: the data set is gone"
    )
    with pytest.raises(TransportClosed, match=r"It was DeadlineExceeded: no answer from ranks \[1\] \[rank 0, peer 1"):
        lane.require_unbroken()
    lane.close()


def test_a_lane_that_was_given_up_starts_nothing_more_and_says_why():
    lane = Lane(ignore)
    assert lane.give_up(KeyboardInterrupt())
    assert not lane.give_up(OSError("later"))
    error = lane.submit(int).error(LIMIT_S)
    assert str(error) == "this world was given up: call init() for a new one. It was KeyboardInterrupt"
    lane.close()
    assert not lane.give_up(OSError("later"))
