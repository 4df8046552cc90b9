# SPDX-License-Identifier: Apache-2.0
"""Run one step with backup workers: the first gradients that are ready count, and none is used before all have the sum.

The rules are those of `commrt.backup_workers.quorum`. Members of an attempt reduce their gradients on the wire
buffers, and leave ``param.grad`` alone until the attempt is done. If a member is lost, all announce their gradients
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from time import perf_counter, time

import torch
from torch import nn
from torch.distributed import PrefixStore, Store

from commrt.algorithms import tree
from commrt.algorithms.backup import BackupWorkers
from commrt.backup_workers.quorum import Reduce, StepOutcome, quorum_step
from commrt.backup_workers.quorum_vote import QuorumVote, RankOperation, VoteSettings
from commrt.backup_workers.replica_state import Snapshot
from commrt.buckets.engine import BuildBuckets, Engine, Span
from commrt.buckets.flat_buffer import FlatBuffer
from commrt.buckets.gradient_bucket import GradientBucket, ReadyOrder
from commrt.buckets.layout import Header, Named
from commrt.elastic.elastic_membership import make_elastic
from commrt.errors import UsageError
from commrt.runtime.membership import LOST
from commrt.runtime.recording import within_range
from commrt.store.client import parse, require
from commrt.threads.future import Future
from commrt.threads.streams import StreamEvent
from commrt.training.model_state import unread_buffers
from commrt.training.replica import StepReport
from commrt.training.step_guard import ParameterList, StepGuard
from commrt.transport.protocol import Tag

__all__ = ["BackupStep"]

LOOK_S = 1.0
"""How often the communication thread looks whether the world was given up, while it waits for a backward pass."""


@dataclass(slots=True)
class _Pass:
    """What the training thread tells the communication thread of a backward pass, and gets back."""

    settings: int
    ready: list[Future[StreamEvent]]
    """For each bucket: when its gradients were there, as a place on the GPU's stream."""
    ended: Future[StreamEvent]
    samples: int | None
    outcome: Future[StepOutcome] | None = None
    spans: list[Span] | None = None
    """Of the latest attempt."""
    order: list[int] | None = None
    """The first member's order of gradients, in the first step."""


class BackupStep:
    """Make the steps of one model: `begin` a backward pass, `mark` each gradient, and `finish`.

    Call these on the training thread. From the first bucket that is announced to the end of `finish`, all else is the
    communication thread's.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        guard: StepGuard,
        cut: BuildBuckets,
        algorithm: BackupWorkers,
        store: Store,
        *,
        with_buffers: bool,
    ) -> None:
        self.version = 0
        """The number of updates that this rank has applied."""
        self.order: list[int] | None = None
        """The places of the parameters in the order in which gradients become ready; None before the first step."""
        self.votes: QuorumVote
        """The votes on whose gradients count, of this session."""
        self._model, self._engine, self._guard, self._cut, self._store = model, engine, guard, cut, store
        self._world, self._early = engine.world, algorithm.early
        self._membership = make_elastic(engine.world)
        self._needed = algorithm.needed(engine.world.size)
        self._with_buffers = with_buffers and any(True for _ in model.buffers())
        self._params = [named for bucket in engine.buckets for named in bucket.params]
        self._parameters = ParameterList(model)
        self._attempts = (0, 0)  # a step that is not over, and how often it was tried
        self._pass: _Pass | None = None
        self._ready_s = self._late_s = 0.0
        self._use_buckets(engine.buckets)
        self._begin_session(1)

    def _begin_session(self, session: int) -> None:
        """Vote with keys of their own, as the numbers of steps may come again after a checkpoint was loaded."""
        world, membership = self._world, self._membership
        self._session = session
        terms = VoteSettings(
            world.rank, self._needed, lambda: world.timeout_s,
            membership.require_open, lambda: membership.is_called, membership.on_store,
        )  # fmt: skip
        self.votes = QuorumVote(PrefixStore(f"session {session}", self._store), terms)

    def _change_session(self, session: int) -> None:
        if session != self._session:
            self.votes.close()
            self._begin_session(session)

    def _use_buckets(self, buckets: Sequence[GradientBucket]) -> None:
        if buckets is not self._engine.buckets:
            self._engine.replace_buckets(buckets)
        self._ready_order = ReadyOrder([bucket.names for bucket in buckets])
        allocate = self._world.transport.allocate
        self._flat_buffer = FlatBuffer([*self._model.buffers()], allocate) if self._with_buffers else None
        self._memory_epoch = self._membership.memory_epoch

    def _new_buckets(self) -> list[GradientBucket]:
        params: Sequence[Named] = self._params
        return self._cut(params if self.order is None else [params[i] for i in self.order])

    def snapshot(self, *, in_pass: bool) -> Snapshot:
        """Return where this rank stands."""
        is_due = self._guard.is_due and not in_pass  # a pass begins: its gradients replace those
        return Snapshot(self.version, self._guard.steps, self.order, self._session, in_pass, is_due)

    def follow(self, snapshot: Snapshot) -> None:
        """Go on where another rank stands, whose state this one has taken; between steps."""
        self.version, self._guard.steps = snapshot.version - snapshot.is_due, snapshot.optimizer_steps
        self._use_order(snapshot.order)
        self._change_session(snapshot.session)

    def _use_order(self, order: Sequence[int] | None) -> None:
        if order is not None and list(order) != self.order:
            self.order = list(order)
            self._use_buckets(self._new_buckets())

    def restart_at_step(self, version: int) -> None:
        """Go on at `version`: a checkpoint was loaded."""
        self.version, self._attempts, self._guard.steps = version, (0, 0), 0
        self._change_session(self._session + 1)

    def abandon(self, why: str) -> None:
        """End the running pass with a `UsageError`, so that the communication thread does not wait for its end."""
        running, self._pass = self._pass, None
        for future in [] if running is None else [*running.ready, running.ended]:
            if not future.done():
                future.set_exception(UsageError(why))

    def forget_pass(self) -> bool:
        """Drop a pass that an error has interrupted; False if this rank has announced its gradient already."""
        if self._pass is not None and self._pass.outcome is None:
            self._pass = None
            for bucket in self._engine.buckets:
                bucket.release()
            self._guard.drop()
        return self._pass is None

    def begin(self, samples: int | None) -> None:
        """Begin a pass at its first gradient; raises `UsageError` if the model has changed since it was attached."""
        self._parameters.require_unchanged()
        self._ready_order.arm()
        _, settings = self._guard.close(self.version)
        self._pass = _Pass(settings, [Future() for _ in self._engine.buckets], Future(), samples)

    def mark(self, name: str) -> None:
        """Note that the gradient of `name` is ready."""
        self._announce(self._running(), self._ready_order.mark(name))

    def _running(self) -> _Pass:
        if self._pass is None:
            raise UsageError("a gradient outside of a backward pass: detach() and attach() again")
        return self._pass

    def _announce(self, running: _Pass, indices: Iterable[int]) -> None:
        for index in indices:
            self._engine.buckets[index].take(self._header(running, index), self._ready_order.is_ready)
            running.ready[index].set_result(self._world.comm_thread.streams.record_event())
            if self._early and running.outcome is None:
                running.outcome = self._world.comm_thread.submit(lambda: self._run(running))

    def _header(self, running: _Pass, index: int) -> Header:
        model = self._engine.buckets[index].model
        return Header(0, model, self._guard.steps, self.version, index, running.settings)

    def finish(self) -> tuple[StepReport, StepOutcome]:
        """Wait for the end of the step; gradients are then the mean, or zeros if this rank's came too late."""
        begin_s, running = perf_counter(), self._running()
        self._announce(running, self._ready_order.rest())
        running.ended.set_result(self._world.comm_thread.streams.record_event())
        result = running.outcome or self._world.comm_thread.submit(lambda: self._run(running))
        with within_range(self._world.recorder, "wait", step=self.version):
            outcome = result.result()
        self._pass, step = None, self.version
        if outcome.counts:
            self._apply(running)
        else:
            self.drop()
            self._attempts = (step, 0 if outcome.is_over else outcome.attempt)
        return self._report(running, outcome, step, perf_counter() - begin_s), outcome

    def _apply(self, running: _Pass) -> None:
        for bucket in self._engine.buckets:
            bucket.assign_gradients()
        if self._flat_buffer is not None:
            self._flat_buffer.empty([*self._model.buffers()], unread_buffers(self._model))
        self.version += 1
        self._use_order(running.order)
        self._guard.open()

    def drop(self) -> None:
        """Set all gradients to zero, and use nothing of them."""
        for bucket in self._engine.buckets:
            bucket.release()
        with torch.no_grad():
            for _, param in self._params:
                if param.grad is not None:
                    param.grad.zero_()
        self._guard.drop()

    def _report(self, running: _Pass, outcome: StepOutcome, step: int, exposed_s: float) -> StepReport:
        notes = [parse("note on a gradient", note, _parse_note) for note in outcome.notes]
        samples = [count for count, _, _ in notes if count is not None]
        last_s = max((ready_s for _, ready_s, _ in notes), default=0.0)
        late_s = max(self._ready_s - last_s, 0.0) if last_s and not outcome.counts else 0.0
        self._late_s = 0.0 if outcome.counts else self._late_s + late_s
        return StepReport(
            step,
            outcome.members,
            exposed_s,
            tuple(running.spans or ()),
            counted=outcome.counts,
            ended=not outcome.is_over,
            late_s=late_s,
            samples=sum(samples) if len(samples) == len(notes) > 0 else None,
            dropped=tuple(rank for rank in range(self._world.size) if outcome.members and rank not in outcome.members),
            saved_s=max((late for _, _, late in notes), default=0.0),
        )

    def _run(self, running: _Pass) -> StepOutcome:
        """Announce, reduce, and wait for the outcome; on the communication thread, as all that follows."""
        membership, step = self._membership, self.version
        membership.next_step, self._ready_s = step, time()
        generation = membership.ensure_generation(0)
        attempt = self._attempts[1] if self._attempts[0] == step else 0
        note = f"{'' if running.samples is None else running.samples}:{self._ready_s:.4f}:{self._late_s:.4f}"
        protocol = quorum_step(self._world.rank, generation, self._needed, step, attempt, note)
        try:
            outcome = self.votes.run(protocol, generation, lambda operation: self._execute(operation, running))
        finally:
            self._engine.members = tuple(self._world.members)
        if outcome.counts:
            with within_range(self._world.recorder, "unpack"):
                for bucket in self._engine.buckets:
                    bucket.unpack()
            self.votes.delete_old_steps(step, outcome.attempt + 1, is_first=outcome.members[0] == self._world.rank)
            membership.progress()
        return outcome

    def _execute(self, operation: RankOperation, running: _Pass) -> bool | int | None:
        if isinstance(operation, Reduce):
            return self._reduce(operation, running)
        generation = self._membership.ensure_generation(operation.generation)
        return None if self.votes.is_over else generation

    def _reduce(self, attempt: Reduce, running: _Pass) -> bool:
        """Return True if this rank has the sum; on the first member, if all members have it."""
        self._engine.members = attempt.members
        if self._memory_epoch != self._membership.memory_epoch:
            self._replace_buckets(running)
        try:
            running.spans = [self._gather(running, index, attempt.step) for index in range(len(running.ready))]
            self._wait_for(running.ended)
            running.spans += self._broadcast(running, attempt.step)
            self._world.transport.wait()
            done = torch.ones(1, device="cpu")  # arrives at the first member when it was sent by all others
            tag = Tag(attempt.step, "through")
            self._world.run_now(tree.reduce(len(attempt.members)), done, tag, attempt.members)
        except LOST as failure:
            self._membership.break_connections(failure)
            return False
        return True

    def _replace_buckets(self, running: _Pass) -> None:
        """Use new memory: a rank of an earlier generation may still read the old."""
        for ready in running.ready:
            self._wait_for(ready)
        ready_order = self._ready_order
        self._use_buckets(self._new_buckets())
        self._ready_order = ready_order
        for bucket in self._engine.buckets:
            bucket.take(self._header(running, bucket.index), ready_order.is_ready)

    def _gather(self, running: _Pass, index: int, step: int) -> Span:
        self._wait_for(running.ready[index])
        return self._engine.reduce_now(self._engine.buckets[index], step)

    def _wait_for(self, future: Future[StreamEvent]) -> None:
        """Wait until the training thread has come to `future`; raises if the world was given up."""
        while not future.done():
            with suppress(TimeoutError):
                future.exception(LOOK_S)
            self._membership.require_open()
        self._world.comm_thread.streams.wait_event(future.result())

    def _broadcast(self, running: _Pass, step: int) -> Iterable[Span]:
        """Send the first member's buffers, and in the first step its order of gradients."""
        if self._flat_buffer is not None:
            self._flat_buffer.fill([*self._model.buffers()])
            yield self._engine.broadcast_now(self._flat_buffer.flat, step)
        if self.order is None:
            places = {name: i for i, (name, _) in enumerate(self._params)}
            seen = [places[name] for name in self._ready_order.seen]
            order = torch.tensor([*seen, *sorted({*places.values()} - {*seen})], device="cpu")
            yield self._engine.broadcast_now(order, step)
            running.order = order.tolist()


def _parse_note(note: bytes) -> tuple[int | None, float, float]:
    """Return how many samples a gradient was made of, when it was ready, and how late its rank was before."""
    count, ready_s, late_s = note.decode().split(":")
    require(isfinite(float(ready_s)) and isfinite(float(late_s)))
    return int(count) if count else None, float(ready_s), float(late_s)
