# SPDX-License-Identifier: Apache-2.0
"""Average the fragments of local SGD in the background; no rank uses an average that another one can never get.

Where the world goes on without lost ranks, each rank votes in the background when it has an average, and a merge reads
the outcome. If a rank was lost meanwhile, the others average what they have sent again, together, in the order in which
they merge. Until they have done so once, what leaves is held back: ranks learn of a loss at different times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import cast

import torch
from torch import Tensor

from commrt.algorithms.local import LocalSGD
from commrt.buckets.engine import Engine, Span
from commrt.buckets.gradient_bucket import GradientBucket, build_buckets
from commrt.buckets.layout import Header
from commrt.elastic.elastic_membership import make_elastic
from commrt.elastic.generations import Generation
from commrt.errors import PeerLost, Place
from commrt.local_sgd.fragment import Fragment, InFlight
from commrt.runtime.membership import LOST
from commrt.runtime.recording import within_range
from commrt.threads.comm_thread import RecoveredError
from commrt.training.attach import Request
from commrt.transport.protocol import Allocate

__all__ = ["FragmentExchange"]


def _reusing(pieces: list[Tensor], allocate: Allocate) -> Allocate:
    """Return what gives out `pieces` once more, and adds to them where none has room."""
    used: dict[int, int] = {}

    def again(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        for i, piece in enumerate(pieces):
            begin = used.get(i, 0)
            if piece.dtype == dtype and begin + numel <= len(piece):
                used[i] = begin + numel
                return piece[begin : begin + numel]
        used[len(pieces)] = numel
        pieces.append(allocate(numel, dtype, device))
        return pieces[-1]

    return again


class FragmentExchange:
    """Carries fragments over the communication thread, in the order in which they leave."""

    def __init__(self, request: Request, fragments: Sequence[Fragment]) -> None:
        self.world, self.fragments, self._request = request.world, fragments, request
        self.algorithm = cast("LocalSGD", request.algorithm)
        self._shares_memory = self.algorithm.at_once < len(fragments)
        self._number, self._votes = request.world.attached, Counter[int]()
        self._membership = make_elastic(self.world)
        self._agreed = self._membership.number  # the generation of the latest average that all ranks have
        self._buckets = self._new_buckets()
        self._memory_epoch = self._membership.memory_epoch
        self.engine = Engine(self.world, self.algorithm.inner, self._flat())

    def _new_buckets(self) -> list[list[GradientBucket]]:
        """Return the buckets of each fragment; fragments that are never in flight at the same time share memory."""
        found: list[list[GradientBucket]] = []
        pieces: list[list[Tensor]] = [[] for _ in range(self.algorithm.at_once)]
        for fragment in self.fragments:
            own = _reusing(pieces[fragment.index % len(pieces)], self.world.transport.allocate_shared)
            kind = self._request.wire, self._request.cap_nbytes, self._number
            found.append(build_buckets(fragment.outgoing, *kind, own, first=sum(map(len, found))))
        return found

    def _flat(self) -> list[GradientBucket]:
        return [bucket for buckets in self._buckets for bucket in buckets]

    def send(self, fragment: Fragment, in_flight: InFlight) -> None:
        """Let leave what `fragment` holds as its differences, unless a rank was lost since all ranks had an average."""
        membership, generation = self._membership, self._membership.generation
        self._votes[fragment.index] += 1
        if generation.number != self._agreed:
            return
        topic, number = f"merge/{self._number}.{generation.number}.{fragment.index}", self._votes[fragment.index]
        in_flight.vote = f"{topic}.{number}"
        if membership.is_elastic and number > 2 and generation.ranks[0] == self.world.rank:
            # All ranks have merged since the vote before the last, or they would not have sent again.
            membership.barrier.forget(f"{topic}.{number - 2}")
        with within_range(self.world.recorder, "submit", number=fragment.index):
            self._submit(fragment, in_flight, generation, votes=membership.is_elastic)

    def _submit(self, fragment: Fragment, in_flight: InFlight, generation: Generation, *, votes: bool) -> None:
        buckets, number = self._buckets[fragment.index], fragment.exchanges - 1
        for bucket in buckets:
            header = Header(0, self._number, 0, in_flight.step, bucket.index, in_flight.settings)
            bucket.take(header, lambda _: True)
            if self._shares_memory:
                bucket.wire.zero_()  # codes of what another fragment left between the tensors would change scales
        in_flight.generation, in_flight.buckets = generation, buckets
        if self.engine.quantizer is not None:
            self._restore_residuals(in_flight)
        in_flight.answer = self._membership.submit(partial(self._average, in_flight, generation, number, votes=votes))

    def _average(self, in_flight: InFlight, generation: Generation, number: int, *, votes: bool) -> tuple[Span, ...]:
        """Average a fragment in its exchange `number`, then vote if asked to. On the communication thread."""
        if self._membership.number != generation.number:
            raise RecoveredError(PeerLost("a rank was lost meanwhile", Place(self.world.rank)))
        self._membership.next_step = in_flight.step
        spans = tuple(map(self.engine.reduce_now, in_flight.buckets, repeat(number)))
        if votes:
            self.world.transport.wait()
            self._membership.barrier.promise(in_flight.vote, generation)
        return spans

    def _restore_residuals(self, in_flight: InFlight) -> None:
        """Remember this rank's residuals, for an exchange that is done again, or go back to that."""
        own = {name: part for bucket in in_flight.buckets for name, part in bucket.residuals().items()}
        if in_flight.residuals is None:
            in_flight.residuals = {name: part.clone() for name, part in own.items()}
        for name, part in own.items():
            part.copy_(in_flight.residuals[name])

    def residuals(self) -> dict[str, Tensor]:
        """Return this rank's residuals to the averages of what is still to leave, and of what is in flight."""
        residuals = self.engine.residuals()
        for fragment in self.fragments:
            residuals |= (fragment.in_flight.residuals or {}) if fragment.in_flight is not None else {}
        return residuals

    def receive(self, fragment: Fragment, in_flight: InFlight) -> tuple[Span, ...]:
        """Wait until all ranks have the average of `fragment`, and return what it cost.

        The average is then on the wire of the bucket's buckets.
        """
        if not self._all_have(in_flight):
            with self._membership.collective(f"merging what left after step {in_flight.step}"):
                self._agreed = self._membership.together(lambda: self._attempt(fragment, in_flight))
        return in_flight.result()

    def _all_have(self, in_flight: InFlight) -> bool:
        """Return True if the average that was made in the background is there on all ranks; they get one answer."""
        if in_flight.generation is None:
            return False
        membership = self._membership
        try:
            in_flight.result()
        except LOST:
            if not membership.is_elastic:
                raise
            membership.barrier.decline(in_flight.vote)
        return not membership.is_elastic or self._membership.barrier.outcome(in_flight.vote, in_flight.generation)

    def _attempt(self, fragment: Fragment, in_flight: InFlight) -> int:
        """Average again, and return the number of the generation in which all did so."""
        self._renew()
        generation = self._membership.generation
        self._submit(fragment, in_flight, generation, votes=False)
        in_flight.result()
        return generation.number

    def _renew(self) -> None:
        """Average over the ranks that are left, with memory that no lost rank reads."""
        members = tuple(self.world.members)
        self.engine.members = members
        self.engine.use_algorithm(self.algorithm.among(len(members)))
        if self._memory_epoch != self._membership.memory_epoch:
            self._memory_epoch = self._membership.memory_epoch
            residuals, self._buckets = self.engine.residuals(), self._new_buckets()
            self.engine.replace_buckets(self._flat())
            self.engine.restore_residuals(residuals)

    def release(self) -> None:
        """Free all memory; call it when no exchange is in flight."""
        self.engine.release()
