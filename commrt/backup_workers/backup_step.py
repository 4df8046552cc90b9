# SPDX-License-Identifier: Apache-2.0
"""Run one step with backup workers: its gradients are announced, reduced, and used by all or none.

The rules are those of `commrt.backup_workers.quorum`. Members of an attempt reduce their gradients
on the wire buffers, and leave ``param.grad`` alone until the attempt is done. If a member is lost,
all announce their gradients again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import perf_counter, time
from typing import cast

import torch
from torch.distributed import PrefixStore, Store

from commrt.algorithms import tree
from commrt.backup_workers.policy import BackupWorkers
from commrt.backup_workers.quorum import Announcement, QuorumVote, StepOutcome
from commrt.backup_workers.replica_state import Snapshot
from commrt.backup_workers.skipping_guard import SkippingGuard
from commrt.backup_workers.stall import StallWatch
from commrt.buckets.digest import Digest
from commrt.buckets.engine import Engine
from commrt.buckets.riders import Riders
from commrt.buckets.span import Span
from commrt.buckets.weight_watch import WeightWatch
from commrt.elastic.elastic_membership import CALL_LOOK_S, ElasticMembership
from commrt.errors import UsageError
from commrt.runtime.generation import Members
from commrt.runtime.membership import LOST
from commrt.threads.future import Future
from commrt.threads.streams import StreamEvent
from commrt.training.flat_buffer import FlatBuffer
from commrt.training.request import Request
from commrt.training.riding import Riding
from commrt.training.step_report import StepReport
from commrt.training.unread_buffers import unread_buffers
from commrt.transport.protocol import Tag

NOBODY = (Announcement(0, 0, ready_s=inf),)


@dataclass(slots=True)
class _Pass:
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
    samples: int | None
    ready: list[Future[StreamEvent]]
    """With `early`, for each bucket, and last for the pass: when its gradients were there, as a
    place on the stream.
    """
    number: int | None
    """As autograd counts; None without a backward pass."""
    outcome: Future[StepOutcome] | None = None
    ready_s: float = 0.0
    """When it was announced, in seconds of `time.time`."""
    spans: list[Span] = field(default_factory=list)
    """Of the latest attempt."""
    order: list[int] | None = None
    """The first member's order of gradients, in the first step."""


class BackupStep:
    """Make the steps of one model: `begin` a backward pass, `mark` each gradient, and `finish`.

    `_run` and what it calls are the communication thread's, all else is the training thread's; they
    talk by a `_Pass`. Only the training thread writes `version`, `order`, `votes`, and what a step
    that failed leaves (`_attempts`, `_late_s`). A bucket that was taken is `_run`'s until `_run`
    ends; it may also replace all buckets. Written here of others: the engine's weight, the guard's
    count of steps, in `riding` who stops and what is unread, and, in `_run`, the digest in the
    riders and the membership's count of failures.
    """

    def __init__(
        self,
        request: Request,
        membership: ElasticMembership,
        engine: Engine,
        guard: SkippingGuard,
        store: Store,
        riding: Riding,
    ) -> None:
        self.version = 0
        """The number of updates that this rank has applied."""
        self.order: list[int] | None = None
        """The places of the parameters in the order in which gradients become ready; None before
        the first step.
        """
        self._world = request.world
        self._membership = membership
        self._model = request.model
        self._engine = engine
        self._guard = guard
        self._cut = request.build_buckets
        self._store = store
        self._riding = riding
        self._early = cast("BackupWorkers", request.algorithm).early
        self._with_buffers = request.broadcast_buffers and any(
            True for _ in request.model.buffers()
        )
        self._params = [named for bucket in engine.buckets for named in bucket.params]
        self._digest = Digest([*self._model.parameters()]) if request.watch else None
        self._attempts = (0, 0)  # a step that is not over, and how often it was tried
        self._done = torch.ones(1, device="cpu")
        self._pass: _Pass | None = None
        self._late_s = 0.0  # since the gradients of this rank counted last
        self._stalls = StallWatch(membership)
        self._use_buckets()
        self._use_session(1)

    def _use_session(self, session: int) -> None:
        """Vote with keys of their own, as the numbers of steps may come again after a checkpoint
        was loaded.
        """
        store = PrefixStore(f"session {session}", self._store)
        self._session = session
        self.votes = QuorumVote(store, self._membership, self._reduce)

    def _renew_buckets(self) -> None:
        """Use other memory, and the order of gradients once that is known."""
        params = self._params if self.order is None else [self._params[i] for i in self.order]
        self._engine.replace_buckets(self._cut(params))
        self._use_buckets()

    def _use_buckets(self) -> None:
        allocate = self._world.transport.allocate
        self._flat_buffer = (
            FlatBuffer([*self._model.buffers()], allocate) if self._with_buffers else None
        )

    def snapshot(self, *, in_pass: bool) -> Snapshot:
        """Return where this rank stands."""
        # where a pass begins, its gradients replace those
        is_due = not in_pass and self._guard.is_due
        stopping = [*self._riding.known_to_stop]
        return Snapshot(
            self.version, self._guard.steps, self.order, self._session, in_pass, is_due, stopping
        )

    def follow(self, snapshot: Snapshot) -> None:
        """Go on where another rank stands, whose state this one has taken; between steps."""
        self._guard.drop()  # gradients of before
        self.version = snapshot.version - snapshot.is_due
        self._guard.steps = snapshot.optimizer_steps
        self._riding.hear_of_stop(snapshot.stopping)
        self._use_order(snapshot.order)
        if snapshot.session != self._session:
            self._use_session(snapshot.session)

    def _use_order(self, order: Sequence[int] | None) -> None:
        if order is not None and list(order) != self.order:
            self.order = list(order)
            self._renew_buckets()

    def restart_at_step(self, version: int) -> None:
        """Go on at `version`: a checkpoint was loaded."""
        self.version = version
        self._attempts = (0, 0)
        self._guard.steps = 0
        self._use_session(self._session + 1)

    def abandon(self) -> None:
        """End the running pass with a `UsageError`, so that the communication thread does not wait
        for its end.
        """
        if self._pass is not None:
            for future in self._pass.ready:
                if not future.done():
                    future.set_exception(
                        UsageError("the world was closed in the middle of a backward pass")
                    )
            self._pass = None

    def forget_pass(self) -> bool:
        """Drop a pass that an error has interrupted; False if this rank has announced its gradient
        already.
        """
        if self._pass is not None and self._pass.outcome is None:
            self._pass = None
            for bucket in self._engine.buckets:
                bucket.release()
            self._guard.drop()
        return self._pass is None

    def begin(self, samples: int | None, number: int | None) -> None:
        """Begin backward pass `number` at its first gradient, or a step without one."""
        self._engine.order.arm()
        self._engine.own_weight = self._riding.weights.own_weight
        steps, settings = self._guard.close(self.version)
        step, tried = self._attempts
        says = {"optimizer_steps": steps, "step": self.version, "settings": settings}
        ready = (
            [Future[StreamEvent]() for _ in range(1 + len(self._engine.buckets))]
            if self._early
            else []
        )
        attempt = tried if step == self.version else 0
        self._pass = _Pass(self.version, attempt, self._late_s, says, samples, ready, number)

    def mark(self, name: str | None = None) -> _Pass:
        """Note that the gradient of `name` is ready, by default all gradients; announce full
        buckets.
        """
        order = self._engine.order
        indices = order.rest() if name is None else order.mark(name)
        if (running := self._pass) is None:
            raise UsageError("a gradient outside of a backward pass: detach() and attach() again")
        for index in indices:
            bucket = self._engine.buckets[index]
            leaving = None
            if bucket.riders is not None:
                leaving = self._riding.leave_with_gradients(running.number)
            bucket.take(bucket.header._replace(**running.says), order.not_awaited, leaving)
            if running.ready:
                running.ready[index].set_result(self._world.comm_thread.streams.record_event())
                running.outcome = running.outcome or self._world.comm_thread.submit(
                    partial(self._run, running)
                )
        return running

    def finish(self) -> tuple[StepReport, StepOutcome]:
        """Wait for the end of the step; gradients are then the mean, or zeros if this rank's came
        too late.
        """
        begin_s = perf_counter()
        comm_thread = self._world.comm_thread
        running = self.mark()
        if running.ready:
            running.ready[-1].set_result(comm_thread.streams.record_event())
        result = running.outcome or comm_thread.submit(partial(self._run, running))
        step = running.step
        with comm_thread.within_range("wait", step=step):
            try:
                outcome = self._outcome(result)
            finally:
                self._stalls.end()
        self._pass = None
        if outcome.counts:
            for bucket in self._engine.buckets:
                bucket.assign_missing()
            self._riding.arrive(self._engine.buckets[0].riders)
            if self._flat_buffer is not None:
                self._flat_buffer.write_back([*self._model.buffers()], unread_buffers(self._model))
            self.version += 1
            if running.order is not None:
                self._use_order(running.order)
            self._guard.open()
        else:
            self.drop()
            self._attempts = (step, 0 if outcome.is_over else outcome.attempt)
        return self._report(running, outcome, perf_counter() - begin_s), outcome

    def _outcome(self, result: Future[StepOutcome]) -> StepOutcome:
        """Wait for `result`; meanwhile look whether the reduction waits for a rank that stopped."""
        while True:
            try:
                return result.result(CALL_LOOK_S)
            except TimeoutError:
                if result.done():  # the step itself ended with this error, or just now
                    return result.result()
            self._stalls.look()

    def drop(self) -> None:
        """Set all gradients to zero, and use nothing of them."""
        self._riding.drop_gradients()
        for bucket in self._engine.buckets:
            bucket.release()
        with torch.no_grad():
            for _, param in self._params:
                if param.grad is not None:
                    param.grad.zero_()
        self._guard.drop()

    def _report(self, running: _Pass, outcome: StepOutcome, exposed_s: float) -> StepReport:
        *_, samples, ready_s, late_s = zip(*outcome.announcements or NOBODY, strict=True)
        there = {*range(self._world.founders), *self._membership.ranks}
        behind_s = max(running.ready_s - max(ready_s), 0.0)
        self._late_s = 0.0 if outcome.counts else self._late_s + behind_s
        return StepReport(
            running.step,
            outcome.members,
            exposed_s,
            tuple(running.spans),
            counted=outcome.counts,
            ended=not outcome.is_over,
            late_s=behind_s,
            samples=None if None in samples else sum(samples),
            dropped=tuple(sorted(there.difference(outcome.members))) if outcome.members else (),
            saved_s=max(late_s),
        )

    def _run(self, running: _Pass) -> StepOutcome:
        """Announce, reduce, and wait for the outcome; on the communication thread, as all that
        follows.
        """
        membership = self._membership
        step = running.step
        self._carried = running  # for `_reduce`, on this thread
        membership.start_no_earlier(step)
        running.ready_s = round(time(), 4)
        if membership.wanted > membership.number:
            membership.ensure_generation()
        if self._digest is not None:
            cast("WeightWatch", self._engine.buckets[0].watch).begin(self._digest)
        mine = Announcement(
            self._world.rank,
            membership.number,
            running.samples,
            running.ready_s,
            round(running.late_s, 4),
        )
        outcome = self.votes.run(mine, step, running.attempt)
        if outcome.counts:
            with self._world.comm_thread.within_range("unpack"):
                for bucket in self._engine.buckets:
                    bucket.unpack()
            if outcome.members[0] == self._world.rank:
                self.votes.delete_old_steps(step)
        if outcome.members:
            membership.failures = 0
        return outcome

    def _reduce(self, step: int, attempt: int, members: Members) -> bool:
        """Return True if this rank has the sum; on the first member, if all members have it."""
        running = self._carried
        # the first step makes connections, and one that begins early waits for backward passes
        if self.order is not None and not running.ready:
            self._stalls.begin()
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
            if self._flat_buffer is not None or self.order is None:
                running.spans += self._broadcast(running, step, members)
            if self._world.comm_thread.streams.queues:
                self._world.transport.wait()
            self._done.fill_(1)  # arrives at the first member when it was sent by all others
            schedule = tree.reduce(len(members))
            self._engine.tensors.run_now(schedule, self._done, members, Tag(step, "through"))
        except LOST as failure:
            self._membership.break_connections(failure)
            return False
        return True

    def _replace_buckets(self, running: _Pass) -> None:
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

    def _broadcast(self, running: _Pass, step: int, members: Members) -> Iterable[Span]:
        """Send the first member's buffers, and in the first step its order of gradients."""
        if self._flat_buffer is not None:
            self._flat_buffer.fill([*self._model.buffers()])
            yield self._engine.tensors.broadcast_now(self._flat_buffer.flat, step, members)
        if self.order is None:
            order = torch.tensor(self._engine.order.places(), device="cpu")
            yield self._engine.tensors.broadcast_now(order, step, members)
            running.order = order.tolist()
