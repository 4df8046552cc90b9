# SPDX-License-Identifier: Apache-2.0
"""Weights that gossip sends together, and memory for their messages.

The thread that trains packs and mixes; the communication thread carries a message in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.buckets.digest import Digest
from commrt.buckets.dtypes import wire_dtype
from commrt.buckets.header import Header, encode
from commrt.buckets.riders import SLOT, Riders, riding_numel
from commrt.buckets.span import Span
from commrt.buckets.tensor_kind import TensorKind, bucket_description
from commrt.buckets.tensors import TensorSlot
from commrt.buckets.weight_part import WeightPart
from commrt.errors import UsageError
from commrt.kernels.dispatch import packing
from commrt.kernels.layout import layout_of
from commrt.kernels.packing import Packing
from commrt.runtime.prepared import Prepared
from commrt.runtime.world import World
from commrt.threads.future import Future

SOON_S = 0.05
"""An exchange that takes longer may wait for a rank that will not come."""


class Received(NamedTuple):
    """What an exchange has brought, and what it cost."""

    span: Span
    share: float = 0.0
    """The weight of what was received; 0 if nothing came."""
    sources: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class Message:
    """Memory for one exchange: `sent` and `received` are [layout.numel] of the wire's dtype.

    `GossipExchange` sets `step` and `answer` when it sends, and fills `said`. Until the answer is
    there, `sent` and `received` are the communication thread's.
    """

    sent: Tensor
    received: Tensor
    packing: Packing
    """Packs to and from `sent`."""
    said: Riders | None = None
    """What rides with `sent`: of this rank only, as messages of gossip are not added up."""
    heard: Riders | None = None
    """What came with `received`."""
    digests: tuple[Digest, Digest] | None = None
    """Digests of the weights in `sent` and `received`, if they are watched."""
    step: int = 0
    answer: Future[Received] | None = None


class WeightBucket(WeightPart):
    """Weights that gossip sends together, with memory for so many `messages` at once.

    In each step the thread that trains calls `pack`, the communication thread exchanges the
    message, and the thread that trains calls `mix`. `GossipExchange.send` adds the message to
    `in_flight`, where the oldest comes first, and counts it in `sent`.
    """

    IN_FLIGHT = (
        "{name} was written while its exchange was in flight, and not by a step of an optimizer"
        " given to attach(): call replica.drain() before you write weights"
    )
    WRITTEN = (
        "{name} was written after a backward pass, and not by a step of an optimizer given to"
        " attach(): put a pass such as SAM's first one into replica.no_sync(), and give attach() no"
        " optimizers if you update weights by hand"
    )

    def __init__(
        self,
        index: int,
        held: Sequence[TensorSlot],
        wire: torch.dtype | None,
        messages: int,
        world: World,
        *,
        watches: bool,
        has_digests: bool = False,
    ) -> None:
        super().__init__(index, held, watches=watches)
        self._has_digests = has_digests
        self._kinds = [TensorKind.of(slot.tensor()) for slot in held]
        self._layout = layout_of(
            [kind.shape.numel() for kind in self._kinds], riding_numel(index == 0 or has_digests)
        )
        self._wire = wire_dtype(self._kinds[0].dtype, wire)
        self.rounds = self._wire != self._kinds[0].dtype
        """True if the wire is narrower than the weights."""
        self._allocate = world.transport.allocate_shared
        self._at_once = messages
        # anew in each generation: after connections broke, a peer may still read what was sent
        self._messages = Prepared[Message](world, messages)
        self.messages()  # makes them now, as a GPU may have to wait
        self.in_flight: deque[Message] = deque()
        """`mix` takes them out, `GossipReplica.detach` drops them."""
        self.sent = 0  # messages so far

    def messages(self) -> list[Message]:
        """Return the memory of all messages, of which none is in flight."""
        return [self._message(number) for number in range(self._at_once)]

    def _message(self, number: int) -> Message:
        return self._messages.known(number) or self._messages.keep(self._new_message(), number)

    def _new_message(self) -> Message:
        like = self._tensors()
        sent = self._allocate(self._layout.numel, self._wire, like[0].device)
        received = self._allocate(self._layout.numel, self._wire, like[0].device)
        message = Message(sent, received, packing(sent, self._layout, like))
        if self._layout.riding:
            areas = (self._layout.riders(wire)[: SLOT.itemsize] for wire in (sent, received))
            message.said, message.heard = (Riders(area, 0) for area in areas)
        if self._has_digests:
            message.digests = (
                Digest([sent[self._layout.head_numel :]]),
                Digest([received[self._layout.head_numel :]]),
            )
        return message

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it keeps."""
        return sum(one.sent.nbytes + one.received.nbytes for one in self.messages())

    def description(self) -> str:
        """Return everything that must agree between ranks, as text."""
        return bucket_description(
            self.index, self._wire, (slot.name for slot in self.held), self._kinds
        )

    def pack(self, header: Header) -> Message:
        """Write the weights to a message not in flight, and return it; GPUs in stream order."""
        number = self.sent % self._at_once
        message = self._messages.known(number) or self._message(number)
        message.packing.pack(self._tensors(), 1.0, encode(header))
        return message

    def mix(self, outwait: Callable[[Future[Received], int], Received]) -> Received:
        """Wait for the oldest exchange, mix what it brought into the weights, and return it.

        ``outwait(answer, made)`` waits if that takes long: for ranks that have made so many steps.
        Weights may have changed since they were sent, so this adds the difference between the two
        messages.
        """
        message = self.in_flight[0]
        assert message.answer is not None  # noqa: S101  # for mypy
        try:
            found = message.answer.result(SOON_S)
        except TimeoutError:
            found = outwait(message.answer, message.step + 1)
        self.in_flight.popleft()
        if found.share:
            with torch.no_grad():
                message.packing.mix(self._tensors(), message.received, message.sent, found.share)
        return found

    def _tensors(self) -> list[Tensor]:
        """Return the tensors as they are now; raise `UsageError` if they are others."""
        tensors = [slot.tensor() for slot in self.held]
        for slot, tensor, kind in zip(self.held, tensors, self._kinds, strict=True):
            if (tensor.dtype, tensor.shape, tensor.stride()) != kind:
                now = TensorKind.of(tensor)
                raise UsageError(
                    f"{slot.name} is {now} now, and was {kind} when the model was attached:"
                    " detach() and attach() again after changing the model"
                )
        return tensors
