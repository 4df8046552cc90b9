# SPDX-License-Identifier: Apache-2.0
"""Make one step with backup workers, from the first gradient to the report.

On the thread of the backward pass, for which the training thread waits. `backup_exchange` is the
part of a step on the communication thread, which uses gradients of all members or of none.
"""

from __future__ import annotations

from functools import partial
from math import inf
from time import perf_counter
from typing import cast

import torch

from commrt.backup_workers.backup_exchange import BackupExchange, Pass
from commrt.backup_workers.policy import BackupWorkers
from commrt.backup_workers.quorum import Announcement, StepOutcome
from commrt.backup_workers.skipping_guard import SkippingGuard
from commrt.backup_workers.standing import Standing
from commrt.buckets.engine import Engine
from commrt.elastic.elastic_membership import CALL_LOOK_S, ElasticMembership
from commrt.errors import UsageError
from commrt.threads.future import Future
from commrt.threads.streams import StreamEvent
from commrt.training.request import Request
from commrt.training.riding import Riding
from commrt.training.step_report import StepReport
from commrt.training.unread_buffers import unread_buffers

NOBODY = (Announcement(0, 0, ready_s=inf),)


class BackupStep:
    """Make the steps of one model: `begin` a backward pass, `mark` each gradient, and `finish`.

    `finish` submits the exchange, and waits. With `early` the first full bucket submits it, and a
    bucket whose `Pass.ready` is set is the exchange's until the outcome is there: `mark` touches
    only later ones. A step without a backward pass is made on the training thread. `abandon` runs
    on the thread that closes the world.

    Written here of others: ``param.grad``, the model's buffers where the first member's are used,
    the engine's weight and order, what the guard allows, the version, order and `tried` of
    `standing`, and in `riding` the numbers that left and came.
    """

    def __init__(
        self,
        request: Request,
        membership: ElasticMembership,
        engine: Engine,
        guard: SkippingGuard,
        standing: Standing,
        exchange: BackupExchange,
        riding: Riding,
    ) -> None:
        self._world = request.world
        self._model = request.model
        self._early = cast("BackupWorkers", request.algorithm).early
        self._membership = membership
        self._engine = engine
        self._guard = guard
        self._standing = standing
        self._exchange = exchange
        self._riding = riding
        self._params = [param for bucket in engine.buckets for _, param in bucket.params]
        self._pass: Pass | None = None  # the one that has begun, and not ended
        self._late_s = 0.0  # since the gradients of this rank counted last

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
        version = self._standing.version
        steps, settings = self._guard.close(version)
        step, tried = self._standing.tried
        says = {"optimizer_steps": steps, "step": version, "settings": settings}
        ready = (
            [Future[StreamEvent]() for _ in range(1 + len(self._engine.buckets))]
            if self._early
            else []
        )
        attempt = tried if step == version else 0
        self._pass = Pass(
            step=version,
            attempt=attempt,
            late_s=self._late_s,
            says=says,
            samples=samples,
            ready=ready,
            number=number,
        )

    def mark(self, name: str | None = None) -> Pass:
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
                    partial(self._exchange.run, running)
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
        result = running.outcome or comm_thread.submit(partial(self._exchange.run, running))
        step = running.step
        with comm_thread.within_range("wait", step=step):
            outcome = self._outcome(result)
        self._pass = None
        if outcome.counts:
            for bucket in self._engine.buckets:
                bucket.assign_missing()
            self._riding.arrive(self._engine.buckets[0].riders)
            if (flat_buffer := self._exchange.flat_buffer) is not None:
                flat_buffer.write_back([*self._model.buffers()], unread_buffers(self._model))
            self._standing.version += 1
            if running.order is not None:
                self._standing.order = running.order
                self._exchange.use_standing()
            self._guard.open()
        else:
            self.drop()
            self._standing.tried = (step, 0 if outcome.is_over else outcome.attempt)
        report = self._report(running, outcome, perf_counter() - begin_s)
        self._late_s = 0.0 if outcome.counts else self._late_s + report.late_s
        return report, outcome

    def _outcome(self, result: Future[StepOutcome]) -> StepOutcome:
        """Wait for `result`; call all ranks if the reduction may wait for one that stopped."""
        while True:
            try:
                return result.result(CALL_LOOK_S)
            except TimeoutError:
                if result.done():  # the step itself ended with this error, or just now
                    return result.result()
            self._exchange.stalls.call_if_stalled()

    def drop(self) -> None:
        """Set all gradients to zero, and use nothing of them."""
        self._riding.drop_gradients()
        for bucket in self._engine.buckets:
            bucket.release()
        with torch.no_grad():
            for param in self._params:
                if param.grad is not None:
                    param.grad.zero_()
        self._guard.drop()

    def _report(self, running: Pass, outcome: StepOutcome, exposed_s: float) -> StepReport:
        *_, samples, ready_s, late_s = zip(*outcome.announcements or NOBODY, strict=True)
        there = {*range(self._world.founders), *self._membership.ranks}
        return StepReport(
            running.step,
            outcome.members,
            exposed_s,
            tuple(running.spans),
            counted=outcome.counts,
            ended=not outcome.is_over,
            late_s=max(running.ready_s - max(ready_s), 0.0),
            samples=None if None in samples else sum(samples),
            dropped=tuple(sorted(there.difference(outcome.members))) if outcome.members else (),
            saved_s=max(late_s),
        )
