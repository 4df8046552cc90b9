# SPDX-License-Identifier: Apache-2.0
"""One synchronous step: gradients leave as they become ready, and are settled when all have come back."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import torch
from torch import Tensor, nn

from commrt.errors import UsageError
from commrt.model.admission import describe_buffers
from commrt.model.autograd import INTERRUPTED, current_pass
from commrt.model.gate import Gate
from commrt.model.state import unread_buffers
from commrt.recording import within_range
from commrt.replicas.engine import Cut, Engine
from commrt.replicas.report import Span, StepReport
from commrt.threads.answer import Answer, Pending
from commrt.wire.ready import LaunchOrder
from commrt.wire.roster import Roster
from commrt.wire.row import Row
from commrt.wire.stamp import WIDTHS, Claim

__all__ = ["BY_HAND", "LATE", "Averaging"]

LATE, BY_HAND = -2, -3  # autograd says -1 outside of a pass
"""In place of a backward pass's number: averaging in the optimizer's step, and by `Replica.average`."""


class Averaging:
    """`begin` at the first gradient of a backward pass, `mark` for each, `finish` at its end.

    After an error in between the step never ends: this rank has sent only a part of what the others wait for.
    """

    def __init__(self, model: nn.Module, engine: Engine, gate: Gate, cut: Cut, *, broadcast_buffers: bool) -> None:
        self.step = 0
        """Synchronous steps so far."""
        self.joining = False
        """True if ranks may have left; then each step begins with a roll call."""
        self.params = [named for bucket in engine.buckets for named in bucket.params]
        self._model = model
        self._engine = engine
        self._gate = gate
        self._cut = cut
        self._alone = engine.world.size == 1
        self._broadcast_buffers = broadcast_buffers and not self._alone
        self._buffer_kinds = _kinds(model.buffers())
        carries = self._broadcast_buffers and self._buffer_kinds
        self._row = Row([*model.buffers()], engine.world.transport.allocate) if carries else None
        self._roster = Roster(model)
        self._order = LaunchOrder([bucket.names for bucket in engine.buckets])
        self._order_is_observed = False
        self._number: int | None = None  # of the backward pass whose gradients are on their way
        self._settings = 0  # of the optimizers, as ranks compare them
        self._roll_call: Answer[None] | None = None
        self._in_flight: list[Pending[Span]] = []

    def is_new(self, what: str) -> bool:
        """True if `what`, which comes from the running backward pass, is the first of a step.

        Raises `UsageError` if another pass has not ended.
        """
        if self._number == current_pass():
            return False
        if self._number is not None and not self._alone and not self._engine.world.closed:
            raise UsageError(INTERRUPTED.format(what=what))
        return True  # alone, nobody waits for the rest of what was interrupted

    def begin(self, number: int) -> None:
        """Start the step of backward pass `number`; raises `UsageError` if the model is not what was attached."""
        if change := self._roster.difference():
            raise UsageError(f"the model has changed since attach(), {change}: detach() and attach() again")
        self._number, self._in_flight = number, []
        self._order.arm()
        if not self._alone:
            self._gate.close()
            self._settings = self._gate.settings(self.step % (1 << WIDTHS.step))
        self._roll_call = self._engine.submit_roll_call(True, self.step) if self.joining else None

    def mark(self, name: str) -> None:
        """The gradient `name` is ready."""
        self._submit(self._order.mark(name))

    def _submit(self, indices: Iterable[int]) -> None:
        late = int(self._number == LATE)
        for bucket in (self._engine.buckets[i] for i in indices):
            if not self._alone:
                claim = Claim(late, bucket.model, self._gate.steps, self.step, bucket.index, self._settings)
                bucket.take(claim, self._order.is_ready)
            self._in_flight.append(self._engine.submit(bucket, self.step))

    def finish(self) -> StepReport:
        """Send what is left, wait for all, and give the averages to the parameters."""
        begin_s = perf_counter()
        self._submit(self._order.rest())
        buffers = self._unchanged_buffers() if self._broadcast_buffers else []
        self._submit_buffers(buffers)
        if self._roll_call:
            self._roll_call.result()  # first: if it failed, the others only know that something did
        with within_range(self._engine.world.recorder, "wait", step=self.step):
            spans = tuple(answer.result() for answer in self._in_flight)
        self._settle()
        if buffers and self._row is not None:
            self._row.empty(buffers, unread_buffers(self._model))
        report = StepReport(self.step, self._engine.members, perf_counter() - begin_s, spans)
        self._number = None
        self.step += 1
        if not (self._order_is_observed or self.joining):
            self._observe_order()
        self._engine.remember(self.step)
        self._gate.open()
        return report

    def _settle(self) -> None:
        if not self._alone:
            for bucket in self._engine.buckets:
                bucket.settle()

    def _unchanged_buffers(self) -> list[Tensor]:
        buffers = list(self._model.buffers())
        if _kinds(buffers) != self._buffer_kinds:
            raise UsageError(
                f"the buffers' dtypes or shapes have changed since attach(), now {describe_buffers(self._model)}: "
                "keep them as they are, or attach with broadcast_buffers=False"
            )
        return buffers

    def _submit_buffers(self, buffers: list[Tensor]) -> None:
        """Behind the gradients: buffers may change until the backward pass has ended."""
        if buffers and self._row is not None:
            self._row.fill(buffers)
            self._in_flight.append(self._engine.submit_broadcast(self._row.flat, self.step))

    def _observe_order(self) -> None:
        """Cut the buckets anew, in the order in which rank 0's gradients became ready in this pass."""
        self._order_is_observed = True
        place = {name: i for i, (name, _) in enumerate(self.params)}
        seen = [place[name] for name in self._order.seen]
        order = torch.tensor([*seen, *sorted(set(place.values()) - set(seen))], device="cpu")
        self._engine.submit_broadcast(order, self.step).result()
        if order.tolist() != sorted(order.tolist()):
            self.params = [self.params[i] for i in order.tolist()]
            self._engine.replace_buckets(self._cut(self.params))
            self._engine.submit_preparation(self.step).result()
            self._order = LaunchOrder([bucket.names for bucket in self._engine.buckets])


def _kinds(tensors: Iterable[Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(tensor.dtype, tensor.shape) for tensor in tensors]
