# SPDX-License-Identifier: Apache-2.0
"""The exchange of one step with backup workers: gradients are announced, reduced, and unpacked.

On the communication thread. The rules are those of `commrt.backup_workers.quorum`. Members of an
attempt (the ranks whose gradients count) reduce on the wire buffers, and leave ``param.grad`` alone
until it is done. If a member is lost, all announce their gradients again, for another attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from time import time
from typing import cast

import torch
from torch.distributed import PrefixStore, Store

from commrt.algorithms import tree
from commrt.backup_workers.quorum import Announcement, QuorumVote, StepOutcome
from commrt.backup_workers.stall import StallWatch
from commrt.backup_workers.standing import Standing
from commrt.buckets.digest import Digest
from commrt.buckets.engine import Engine
from commrt.buckets.riders import Riders
from commrt.buckets.span import Span
from commrt.buckets.weight_watch import WeightWatch
from commrt.elastic.elastic_membership import ElasticMembership
from commrt.runtime.generation import Members
from commrt.runtime.membership import LOST
from commrt.threads.calls import start_call
from commrt.threads.deadline import clock
from commrt.threads.future import Future
from commrt.threads.streams import StreamEvent
from commrt.training.flat_buffer import FlatBuffer
from commrt.training.request import Request
from commrt.transport.protocol import Tag

LOOK_S = 1.0
"""Between two looks whether ranks whose gradients do not count have died; each costs a probe."""


@dataclass(slots=True)
class Pass:
    """A backward pass: what the training thread tells the communication thread, and gets back.

    The communication thread writes `ready_s`, `spans` and `order`, which are read once `outcome` is
    there; all else is the training thread's.
    """

    step: int
    attempt: int
    """How often it was tried before."""
    late_s: float
    """How late this rank was in the steps before, in which its gradients did not count."""
    says: dict[str, int]
    """What the headers of all buckets say."""
    samples: int | None  # that the gradients are made of; None if this rank cannot say
    ready: list[Future[StreamEvent]]
    """With `early`, for each bucket, and last for the pass: when its gradients were there, as a
    place on the stream. Else empty.
    """
    number: int | None
    """As autograd counts; None without a backward pass."""
    outcome: Future[StepOutcome] | None = None
    """Of the exchange, once it was submitted."""
    ready_s: float = 0.0
    """When it was announced, in seconds of `time.time`."""
    spans: list[Span] = field(default_factory=list)
    """Of the latest attempt."""
    order: list[int] | None = None
    """The first member's order of gradients, in the first step."""


class BackupExchange:
    """The exchanges of one model; `run` makes one.

    `run`, and what it calls, is for the communication thread. `use_standing` is for the thread that
    ends a step or trains, while no exchange runs. Written here of others: the engine's buckets,
    ``param.grad`` where the step counts, the digest that rides in the first bucket (`Riders`), the
    votes on the store, and of the membership the step, the generation and the count of failures.

    During `run` the training thread only waits for the outcome. But with `early` it goes on with
    its backward pass, and gives the buckets one by one (`Pass.ready`): a bucket that it gave is not
    its own until the outcome is there. Buckets are replaced only when it has given all.
    """

    def __init__(
        self,
        request: Request,
        membership: ElasticMembership,
        engine: Engine,
        standing: Standing,
        store: Store,
    ) -> None:
        self.stalls = StallWatch(membership)
        """To look whether a reduction waits for a rank that stopped, while it runs."""
        self._world = request.world
        self._model = request.model
        self._membership = membership
        self._engine = engine
        self._standing = standing
        self._store = store
        self._cut = request.build_buckets
        self._params = [named for bucket in engine.buckets for named in bucket.params]
        self._digest = Digest([*self._model.parameters()]) if request.watch else None
        self._done = torch.ones(1, device="cpu")
        self._running: Pass | None = None  # the pass that `run` has begun last
        self._session = standing.session
        self._votes = self._votes_of_session()
        self._looked_s = clock.now_s()  # whether ranks that do not count have died
        self._order = standing.order  # in which the buckets were cut
        self._sends_buffers = request.broadcast_buffers and any(True for _ in self._model.buffers())
        self.flat_buffer = self._allocate_flat_buffer()
        """The first member's buffers, once the outcome is there, for `BackupStep` to use; None if
        ranks keep their own, or have none. Replaced together with the buckets.
        """

    def _votes_of_session(self) -> QuorumVote:
        """Return votes with keys of their own. Each checkpoint that is loaded begins a session, in
        which the numbers of steps may come again.
        """
        store = PrefixStore(f"session {self._session}", self._store)
        return QuorumVote(store, self._membership, self._reduce)

    def _allocate_flat_buffer(self) -> FlatBuffer | None:
        allocate = self._world.transport.allocate
        return FlatBuffer([*self._model.buffers()], allocate) if self._sends_buffers else None

    def use_standing(self) -> None:
        """Vote in the session in which this rank stands, and cut buckets in its order of gradients;
        does nothing where neither has changed.
        """
        if self._session != self._standing.session:
            self._session = self._standing.session
            self._votes = self._votes_of_session()
        if self._order != self._standing.order:
            self._renew_buckets()

    def _renew_buckets(self) -> None:
        """Use other memory, and the order of gradients once that is known. `run` does so too."""
        self._order = order = self._standing.order
        params = self._params if order is None else [self._params[i] for i in order]
        self._engine.replace_buckets(self._cut(params))
        self.flat_buffer = self._allocate_flat_buffer()

    def run(self, running: Pass) -> StepOutcome:
        """Announce, reduce, and wait for the outcome; where it counts, sums are then unpacked."""
        membership = self._membership
        step = running.step
        self._running = running
        membership.start_no_earlier(step)
        running.ready_s = round(time(), 4)
        if membership.wanted > membership.number:
            membership.ensure_generation()
        if self._digest is not None:
            cast("WeightWatch", self._engine.buckets[0].watch).begin(self._digest)
        mine = Announcement(
            self._world.rank,
            generation=membership.number,
            samples=running.samples,
            ready_s=running.ready_s,
            late_s=round(running.late_s, 4),
        )
        try:
            outcome = self._votes.run(mine, step, running.attempt)
        finally:
            self.stalls.end()
        if outcome.counts:
            with self._world.comm_thread.within_range("unpack"):
                for bucket in self._engine.buckets:
                    bucket.unpack()
            if outcome.members[0] == self._world.rank:
                self._votes.delete_old_steps(step)
                self._look_for_lost(outcome.members)
        if outcome.members:
            membership.failures = 0
        return outcome

    def _look_for_lost(self, members: Members) -> None:
        """Look now and then, on another thread, whether a rank died that no step needs: the others
        would not notice.
        """
        absent = {*self._membership.generation.ranks}.difference(members)
        if absent and clock.now_s() - self._looked_s > LOOK_S:
            self._looked_s = clock.now_s()
            start_call(partial(self._membership.member.call_if_gone, absent))

    def _reduce(self, step: int, attempt: int, members: Members) -> bool:
        """Return True if this rank has the sum; on the first member, if all members have it.

        Called by `_votes`, within `run`.
        """
        running = cast("Pass", self._running)
        is_first_step = self._standing.order is None
        # the first step makes connections, and one that begins early waits for backward passes
        if not (is_first_step or running.ready):
            self.stalls.begin()
        try:
            if not self._engine.is_current:
                self._replace_buckets(running)
            running.spans = []
            for bucket in self._engine.buckets:
                if running.ready:
                    self._wait_for(running.ready[bucket.index])
                running.spans.append(self._engine.reduce_now(bucket, step, members))
            if running.ready:
                self._wait_for(running.ready[-1])
            if self.flat_buffer is not None:
                self.flat_buffer.fill([*self._model.buffers()])
                flat = self.flat_buffer.flat
                running.spans.append(self._engine.tensors.broadcast_now(flat, step, members))
            if is_first_step:
                order = torch.tensor(self._engine.order.places(), device="cpu")
                running.spans.append(self._engine.tensors.broadcast_now(order, step, members))
                running.order = order.tolist()
            if self._world.comm_thread.streams.queues:
                self._world.transport.wait()
            self._done.fill_(1)  # arrives at the first member when it was sent by all others
            schedule = tree.reduce(len(members))
            self._engine.tensors.run_now(schedule, self._done, members, Tag(step, "through"))
        except LOST as failure:
            self._membership.break_connections(failure)
            return False
        return True

    def _replace_buckets(self, running: Pass) -> None:
        """Use new memory: a rank of an earlier generation may still read the old."""
        for ready in running.ready[:-1]:
            self._wait_for(ready)
        before = cast("Riders", self._engine.buckets[0].riders)
        self._renew_buckets()
        after = cast("Riders", self._engine.buckets[0].riders)
        after.digest = before.digest
        for bucket in self._engine.buckets:
            header = bucket.header._replace(**running.says)
            bucket.take(header, self._engine.order.not_awaited, before.leaving)

    def _wait_for(self, ready: Future[StreamEvent]) -> None:
        """Wait until the training thread has come to `ready`; raises if the world was given up, or
        others call.
        """
        self._world.comm_thread.streams.wait_event(self._membership.wait_for(ready))
