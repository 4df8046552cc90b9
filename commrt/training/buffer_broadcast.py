# SPDX-License-Identifier: Apache-2.0
"""Overwrite the buffers of a model with rank 0's at the end of each step, or in `join` with those
of the first rank that has data.

It reads and writes the model's buffers on the thread that ends the step: that of the backward pass,
or the one that trains in a step without a pass. The communication thread sends a copy; on CPUs the
caller may do that itself, and `submit` then waits.
"""

from __future__ import annotations

from operator import attrgetter

from torch import Tensor, nn

from commrt.buckets.averaging import AveragingEngine
from commrt.buckets.span import Span
from commrt.errors import UsageError
from commrt.runtime.generation import Members
from commrt.threads.future import Future
from commrt.training.comparable_text import describe_buffers
from commrt.training.flat_buffer import FlatBuffer
from commrt.training.unread_buffers import unread_buffers

_kind = attrgetter("dtype", "shape")


class BufferBroadcast:
    """The buffers of one model on their way: `submit` in each step, and `install` once it is done.

    Made by all ranks together. Between the two calls the communication thread overwrites the copy
    that is sent, and nobody may touch that.
    """

    def __init__(self, model: nn.Module, engine: AveragingEngine) -> None:
        self._model = model
        self._engine = engine
        buffers = [*model.buffers()]
        self._kinds = [*map(_kind, buffers)]
        self.is_empty = not buffers
        """True if the model has none, so that nothing is sent."""
        self._copy: FlatBuffer | None = None
        if buffers:
            self._copy = FlatBuffer(buffers, engine.world.transport.allocate_shared)
            if self._copy.flat.numel():
                engine.let_peers_read(self._copy.flat)
        self._sent: list[Tensor] = []  # the buffers that `submit` has copied

    def submit(self, step: int, vote: Future[Members] | None) -> list[Future[Span]]:
        """Send the buffers as they are now, to the members of a `vote` on its way, or to all ranks.

        Returns what to wait for. Raises `UsageError` if they are of other kinds than before.
        """
        buffers = [*self._model.buffers()]
        if [*map(_kind, buffers)] != self._kinds:
            raise UsageError(
                "the buffers' dtypes or shapes have changed since attach(), now"
                f" {describe_buffers(self._model)}: keep them as they are, or attach with"
                " broadcast_buffers=False"
            )
        if self._copy is None:
            return []
        self._sent = buffers
        self._copy.fill(buffers)
        return [self._engine.submit_broadcast(self._copy.flat, step, vote)]

    def install(self) -> None:
        """Overwrite the buffers that differ from what came."""
        if self._copy is not None:
            self._copy.write_back(self._sent, unread_buffers(self._model))
