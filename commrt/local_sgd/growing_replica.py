# SPDX-License-Identifier: Apache-2.0
"""A replica of local SGD in a world that ranks may come to later: what they take over, and when.

A rank that comes takes the state of one that trains, as it was when its weights left last. All on
the thread that trains; `training/arrival` hands the state out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast
from weakref import WeakMethod

from commrt.elastic.elastic_membership import ElasticMembership
from commrt.errors import DeadlineExceeded, Place, UsageError
from commrt.local_sgd.fragment_exchange import FragmentExchange, is_merge
from commrt.local_sgd.local_replica import LocalReplica
from commrt.local_sgd.policy import LocalSGD
from commrt.runtime.wire import is_quantized
from commrt.threads.deadline import Deadline
from commrt.training.arrival import StateGiver
from commrt.training.elastic_replica import call_if_alive
from commrt.training.request import Request


def require_that_grows(request: Request) -> None:
    """Raise `UsageError` for what a rank that comes cannot take over."""
    algorithm = cast("LocalSGD", request.algorithm)
    wrong = {
        "fragments=1": algorithm.fragments > 1,
        "delay=0": algorithm.delay > 0,
        "a wire that is a dtype": is_quantized(request.wire),
        "an all-reduce as inner=": algorithm.is_gossip,
    }
    if needs := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise UsageError(
            f"init(up_to=) with {algorithm}: ranks that come later need {' and '.join(needs)}"
        )


class GrowingReplica(LocalReplica):
    """A `LocalReplica` of one fragment, merged at once, which gives its state and takes another's.

    It replaces of `ElasticReplica`: `_enter`, on the rank that comes (`come`), and `_follow`, there
    and where `_retakes_state` takes the state again, both on the thread that trains; and where
    another rank asks, `_may_give` and `_record`, on the thread of a backward pass, or on the one
    that trains where it waits in a merge.

    It writes what comes to the fragment, its weights included, to `_seen` and, by `go_on_after`, to
    the exchange. Of others it sets `ElasticMembership.while_waiting`, called on the thread that
    trains.
    """

    def __init__(self, request: Request, exchange: FragmentExchange) -> None:
        super().__init__(request, exchange)
        membership = cast("ElasticMembership", self._world.membership)
        answer = WeakMethod(self._answer_in_a_merge)
        membership.while_waiting = partial(call_if_alive, answer)

    def _enter(self, membership: ElasticMembership) -> None:
        """Become a member, then take the anchor: no merge is made any more without this rank."""
        membership.join_as_replacement(lambda: True)
        limit = Deadline(self._world.timeout_s)
        while not self._fetch(membership):
            membership.require_open()
            waiting = membership.member.ranks_in_collective(membership.generation).values()
            if other := next((each.what for each in waiting if not is_merge(each.what)), None):
                raise UsageError(
                    f"the other ranks came to {other} before this one had their state: start it"
                    " again"
                )
            if limit.left_s <= 0:
                what = (
                    "the other ranks did not give their state within"
                    f" {self._world.timeout_s:g} s: look at their output, or raise timeout_s"
                )
                raise DeadlineExceeded(what, Place(self._world.rank))
        membership.start_no_earlier(self._fragments[0].left)

    def _may_give(self) -> bool:
        return self._fragments[0].in_flight is None

    def _answer_in_a_merge(self) -> None:
        """Give what this rank had before its weights left, while it waits for others to merge."""
        giver = cast("StateGiver", self._giver)
        if giver.is_asked and not self._may_give():
            giver.answer(self._packed)

    def _record(self) -> dict[str, Any]:
        (fragment,) = self._fragments
        state = fragment.state_dict()
        # what it had before its weights left, if these are under way
        ahead = 0 if self._may_give() else 1
        state |= {"in_flight": None, "exchanges": fragment.exchanges - ahead}
        return super()._record() | {
            "step": self._clock.step - ahead,
            "fragment": state,
            "votes": self._exchange.votes[0] - ahead,
        }

    def _follow(self, record: Mapping[str, Any]) -> None:
        """Begin from the anchor, so that what the giver has learned since counts once."""
        (fragment,) = self._fragments
        state = record["fragment"]
        fragment.check_state(state)
        fragment.load_state_dict({**state, "left": min(state["left"], record["step"])})
        fragment.land()
        self._exchange.go_on_after(int(record["votes"]))
        self._seen[0] = self._own_steps
        super()._follow(record)
