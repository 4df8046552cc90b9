# SPDX-License-Identifier: Apache-2.0
"""Every task of a lane is answered, whatever happens to the lane meanwhile."""

from __future__ import annotations

from itertools import count

from opcodes import interposed

from commrt.errors import TransportClosed
from commrt.lane import Lane

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
