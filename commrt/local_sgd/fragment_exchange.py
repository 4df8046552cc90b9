# SPDX-License-Identifier: Apache-2.0
"""The exchange of fragments: their differences travel in buckets, on the communication thread.

Fragments are averaged in the background, and no rank uses an average that another one can never
get. Where the world goes on without lost ranks, each rank votes in the background when it has an
average, and a merge reads the outcome. If a rank was lost meanwhile, the others average what they
have sent again, together, in the order in which they merge. Until they have done so once, what
leaves is held back: ranks learn of a loss at different times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import cast

from torch import Tensor

from commrt.buckets.digest import Digest
from commrt.buckets.engine import Engine
from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.header import Header
from commrt.buckets.span import Span
from commrt.buckets.weight_watch import WeightWatch
from commrt.elastic.barrier import Barrier
from commrt.elastic.elastic_membership import ElasticMembership
from commrt.errors import PeerLost, Place
from commrt.local_sgd.fragment import Fragment
from commrt.local_sgd.fragment_buckets import fragment_buckets
from commrt.local_sgd.in_flight import InFlight, Submitted
from commrt.local_sgd.policy import LocalSGD
from commrt.runtime.generation import Generation
from commrt.runtime.membership import LOST
from commrt.threads.comm_thread import RecoveredError
from commrt.threads.future import Future
from commrt.training.request import Request

MERGING = "merging what left after step"
"""What ranks come to where they merge together; the number of the step follows."""


def is_merge(what: str) -> bool:
    """Return True if the collective `what`, as ranks name it to each other, is one of `receive`."""
    return what.startswith(MERGING)


class FragmentExchange:
    """Carries fragments over the communication thread, in the order in which they leave.

    That thread runs `_average`, which changes nothing here; all else, and each field, is the
    training thread's. Written here of others: `InFlight.submitted` and `residuals`; of buckets what
    they carry (`take`), weigh and have as residuals (what quantization has rounded away so far);
    after a loss the engine's algorithm and buckets; and the membership learns in `_average` which
    steps have begun.
    """

    def __init__(self, request: Request, fragments: Sequence[Fragment]) -> None:
        self._world = request.world
        self.fragments = fragments
        self._request = request
        self.algorithm = cast("LocalSGD", request.algorithm)
        self._model_number = request.number
        self.votes = Counter[int]()
        """How often each fragment was to be sent, which numbers its votes; written here only."""
        # the generation of the latest average that all ranks have
        self._agreed = self._world.membership.number
        self._buckets = fragment_buckets(self._request, self.fragments)
        buckets = [*chain.from_iterable(self._buckets)]
        self.engine = Engine(self._world, self.algorithm.inner, buckets)
        """`attach` lets it prepare, the replica restores its residuals and releases it."""

    @property
    def _barrier(self) -> Barrier | None:
        """What the ranks vote with; None where a lost rank ends the world."""
        membership = self._world.membership
        return membership.barrier if isinstance(membership, ElasticMembership) else None

    def go_on_after(self, votes: int) -> None:
        """Go on where the only fragment was sent `votes` times; for a rank that comes."""
        self.votes[0] = votes

    def send(self, fragment: Fragment, in_flight: InFlight) -> None:
        """Count a vote, and send the differences of `fragment`.

        If a rank was lost since all had an average, nothing is sent before `receive`.
        """
        barrier = self._barrier
        generation = self._world.membership.generation
        self.votes[fragment.index] += 1
        if generation.number != self._agreed:
            return
        topic = f"merge/{self._model_number}.{generation.number}.{fragment.index}"
        count = self.votes[fragment.index]
        vote = "" if barrier is None else f"{topic}.{count}"
        if barrier is not None and count > 2 and generation.ranks[0] == self._world.rank:
            # All ranks have merged since the vote before the last, or they would not send again.
            barrier.forget(f"{topic}.{count - 2}")
        with self._world.comm_thread.within_range("submit", number=fragment.index):
            self._submit(fragment, in_flight, generation, vote)

    def _submit(
        self, fragment: Fragment, in_flight: InFlight, generation: Generation, vote: str
    ) -> Future[tuple[Span, ...]]:
        """Begin an attempt to average what `fragment` holds among the ranks of `generation`.

        The first one keeps the residuals in `in_flight`, each other one begins from those.
        """
        buckets = self._buckets[fragment.index]
        exchange = fragment.exchanges - 1
        for bucket in buckets:
            header = Header(
                late=0,
                model=self._model_number,
                optimizer_steps=0,
                step=in_flight.step,
                bucket=bucket.index,
                settings=in_flight.settings,
            )
            bucket.take(header, bucket.names, in_flight.leaving)
            bucket.own_weight = in_flight.weight
        if self.engine.quantizer is not None:
            own = {name: part for bucket in buckets for name, part in bucket.residuals().items()}
            if in_flight.residuals is None:
                in_flight.residuals = {name: part.clone() for name, part in own.items()}
            else:
                for name, part in own.items():
                    part.copy_(in_flight.residuals[name])
        watched = fragment.digest if self._request.watch else None
        average = partial(
            self._average,
            buckets=buckets,
            step=in_flight.step,
            generation=generation,
            exchange=exchange,
            watched=watched,
            vote=vote,
        )
        answer = self._world.membership.submit(average)
        in_flight.submitted = Submitted(generation, vote, buckets, answer)
        return answer

    def _average(
        self,
        *,
        buckets: Sequence[GradientBucket],
        step: int,
        generation: Generation,
        exchange: int,
        watched: Digest | None,
        vote: str,
    ) -> tuple[Span, ...]:
        """Average a fragment in its `exchange`, and vote if asked. On the communication thread."""
        if self._world.membership.number != generation.number:
            raise RecoveredError(PeerLost("a rank was lost meanwhile", Place(self._world.rank)))
        self._world.membership.start_no_earlier(step)
        if watched is not None:
            cast("WeightWatch", buckets[0].watch).begin(watched)
        members = generation.ranks
        spans = [self.engine.reduce_now(bucket, exchange, members) for bucket in buckets]
        barrier = self._barrier
        if vote and barrier is not None:
            self._world.transport.wait()
            barrier.promise(vote, generation)
        return tuple(spans)

    def residuals(self) -> dict[str, Tensor]:
        """Return this rank's residuals to the averages still to leave, and to those in flight."""
        residuals = self.engine.residuals()
        for fragment in self.fragments:
            residuals |= (
                (fragment.in_flight.residuals or {}) if fragment.in_flight is not None else {}
            )
        return residuals

    def receive(self, fragment: Fragment, in_flight: InFlight) -> Submitted:
        """Wait until all ranks have the average on the buckets' wires; return those.

        It is the background's, if all ranks have that one: without votes each rank knows by itself,
        with votes by their outcome. Else, also if nothing was sent, the ranks that are left average
        together here, all of them for the same fragment (`_attempt`).
        """
        if not self._all_have(in_flight):
            with self._world.membership.collective(f"{MERGING} {in_flight.step}", in_flight.step):
                self._agreed = self._world.membership.together(
                    lambda: self._attempt(fragment, in_flight)
                )
        return cast("Submitted", in_flight.submitted)

    def _all_have(self, in_flight: InFlight) -> bool:
        """Return True if all ranks have the background's average; they get one answer."""
        submitted = in_flight.submitted
        if submitted is None:
            return False
        membership = self._world.membership
        barrier = self._barrier
        try:
            membership.outwait(submitted.answer, in_flight.step)
        except LOST:
            if barrier is None:
                raise
            barrier.decline(submitted.vote)
        if barrier is None:
            return True
        look = partial(membership.require_none_behind, in_flight.step)
        return barrier.outcome(submitted.vote, submitted.generation, look)

    def _attempt(self, fragment: Fragment, in_flight: InFlight) -> int:
        """Average again over the ranks left; return the number of the generation that did so."""
        generation = self._world.membership.generation
        self.engine.use_algorithm(self.algorithm.among(len(generation.ranks)))
        if not self.engine.is_current:
            residuals = self.engine.residuals()
            self._buckets = fragment_buckets(self._request, self.fragments)
            self.engine.replace_buckets([*chain.from_iterable(self._buckets)])
            self.engine.restore_residuals(residuals)
        # no vote of its own: the ranks vote on the whole attempt
        self._submit(fragment, in_flight, generation, "").result()
        return generation.number
