# SPDX-License-Identifier: Apache-2.0
"""Weights that leave and come back mixed: parts of a model, who wrote them meanwhile, and the
messages of gossip.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from commrt.buckets.digest import Digest
from commrt.buckets.engine import Span
from commrt.buckets.header import Header, encode
from commrt.buckets.layout import (
    MODEL_CHANGED,
    REPLACED,
    TensorKind,
    TensorSlot,
    bucket_description,
    wire_dtype,
)
from commrt.buckets.riders import SLOT, Riders, riding_numel
from commrt.errors import UsageError
from commrt.kernels.dispatch import packing
from commrt.kernels.layout import layout_of
from commrt.kernels.packing import Packing
from commrt.threads.future import Future
from commrt.transport.protocol import Allocate, Window

SOON_S = 0.05
"""An exchange that takes longer may wait for a rank that will not come."""
MOST_LOOKED_AT = 256  # values of each tensor, evenly spaced
_version = attrgetter("_version")


def _spaced(tensor: Tensor) -> Tensor:
    """Return a view of at most `MOST_LOOKED_AT` elements; of none where memory has gaps or
    overlaps.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.detach().permute(order)
    if not dense.is_contiguous():
        return tensor.detach().new_empty(0)
    return dense.view(-1)[:: max(-(-tensor.numel() // MOST_LOOKED_AT), 1)]


def _differ(now: Tensor, before: Tensor) -> bool:
    """Return True unless both have the same values, where NaN equals NaN."""
    return now.shape != before.shape or not torch.allclose(
        now.to(before.dtype), before, rtol=0, atol=0, equal_nan=True
    )


class WeightPart:
    """Tensors of a model that leave together, and come back mixed. All calls belong to the thread
    that trains.

    While they are relied on, only optimizers that commrt knows, and commrt itself, may write the
    parameters; forward passes may write the buffers. Other writes are found by what autograd
    counts, and on a CPU by the values, some of which are compared: ``.data`` is not counted. On a
    GPU the host would have to wait for values.
    """

    IN_FLIGHT: ClassVar[str]
    """The error about a parameter ``{name}`` that somebody else wrote while it was in flight."""
    WRITTEN: ClassVar[str]
    """The same while nothing was in flight."""
    in_flight: object = None
    """What has left and was not mixed; false if there is nothing."""
    is_relied_on = False
    """True if what the weights change by always counts, and not only while they are in flight."""

    def __init__(self, index: int, held: Sequence[TensorSlot], *, watches: bool = True) -> None:
        self.index = index
        self.held = held
        self._watched = [slot for slot in held if watches and not slot.is_buffer]
        self._places = [(slot.place, slot.key) for slot in self._watched]
        self._attached = [place[key] for place, key in self._places]
        self._attached_kinds = [TensorKind.of(slot.tensor()) for slot in self._watched]
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._views: list[Tensor] = []  # of the values that are compared
        self._values: Tensor | None = None

    def tensors(self) -> list[Tensor | None]:
        """Return what lies in the slots now."""
        return [slot.place.get(slot.key) for slot in self.held]

    def note(self, *, anyway: bool = False) -> None:
        """Take the weights as they are now, if they are relied on: an optimizer or commrt has
        written them.
        """
        if self._watched and (anyway or self.in_flight or self.is_relied_on):
            tensors, self._versions, addresses = self._look()
            if addresses != self._addresses:
                self._addresses = addresses
                self._views = [*map(_spaced, tensors)]
            self._values = torch.cat(self._views)

    def written(self, *, anyway: bool = False) -> str | None:
        """Return the name of a parameter that is relied on and was written since `note`; None if
        there is none.

        While nothing is in flight a parameter that has its values again counts as unchanged.
        """
        if self._values is None or not (anyway or self.in_flight or self.is_relied_on):
            return None
        tensors, versions, addresses = self._look()
        stays = addresses == self._addresses
        is_untouched = versions == self._versions
        if self.in_flight and not (stays and is_untouched):
            now = zip(versions, addresses, strict=True)
            before = zip(self._versions, self._addresses, strict=True)
            return self._name_of([one != other for one, other in zip(now, before, strict=True)])
        if self._values.is_cuda and stays and is_untouched:
            return None
        views = self._views if stays else [*map(_spaced, tensors)]
        if torch.equal(torch.cat(views), self._values):
            return None
        noted = torch.split(self._values, [len(view) for view in self._views])
        return self._name_of(
            [_differ(now, before) for now, before in zip(views, noted, strict=True)]
        )

    def require_unwritten(self, *, anyway: bool = False) -> None:
        """Raise `UsageError` if somebody else has written a parameter; see `written`."""
        if name := self.written(anyway=anyway):
            self.require_attached()
            raise UsageError((self.IN_FLIGHT if self.in_flight else self.WRITTEN).format(name=name))

    def require_attached(self) -> None:
        """Raise `UsageError` if a parameter is not the one that was attached, or of another kind
        now.
        """
        for slot, attached, kind in zip(
            self._watched, self._attached, self._attached_kinds, strict=True
        ):
            if slot.place.get(slot.key) is not attached:
                raise UsageError(REPLACED.format(name=slot.name))
            if (now := TensorKind.of(slot.tensor())) != kind:
                raise UsageError(
                    MODEL_CHANGED.format(change=f"{slot.name} was {kind} and is {now}")
                )

    def _look(self) -> tuple[list[Tensor], list[int], list[int]]:
        """Return the parameters, how often autograd saw each written, and where each lies."""
        try:
            tensors: list[Tensor] = [place[key] for place, key in self._places]  # type: ignore[misc]
            return tensors, [*map(_version, tensors)], [*map(Tensor.data_ptr, tensors)]
        except (KeyError, AttributeError):  # it was deleted, or is None
            self.require_attached()
            raise

    def _name_of(self, changed: Sequence[bool]) -> str | None:
        return next(
            (slot.name for slot, is_so in zip(self._watched, changed, strict=True) if is_so), None
        )


class Received(NamedTuple):
    """What an exchange has brought, and what it cost."""

    span: Span
    share: float = 0.0
    """The weight of what was received; 0 if nothing came."""
    sources: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class Message:
    """Memory for one exchange of a bucket: `sent` and `received` are [layout.numel] in the dtype
    that travels.
    """

    sent: Tensor
    received: Tensor
    packing: Packing
    """Packs to and from `sent`."""
    windows: Sequence[Window] = ()  # of `sent` and `received`, where peers can read them
    said: Riders | None = None
    """What rides with `sent`; one slot, as messages of gossip are not added up."""
    heard: Riders | None = None
    """What came with `received`."""
    digests: tuple[Digest, Digest] | None = None
    """Of the weights in `sent` and `received`, if they are watched."""
    memory_epoch: int = 0  # see `WeightBucket.packed`
    step: int = 0
    answer: Future[Received] | None = None


class WeightBucket(WeightPart):
    """Weights that gossip sends together, with memory for so many `messages` at once.

    In each step the thread that trains calls `packed`, the communication thread exchanges the
    message, and the thread that trains calls `mix`. Whoever sends moves the message from `free` to
    `in_flight`, where the oldest comes first.
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
        allocate: Allocate,
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
        self.rounds = self._wire != self._kinds[0].dtype  # the wire is narrower than the weights
        self.free = deque(self._message(allocate) for _ in range(messages))
        self.in_flight: deque[Message] = deque()

    def _message(self, allocate: Allocate, memory_epoch: int = 0) -> Message:
        like = self._tensors()
        sent, received = (
            allocate(self._layout.numel, self._wire, like[0].device) for _ in range(2)
        )
        message = Message(
            sent, received, packing(sent, self._layout, like), memory_epoch=memory_epoch
        )
        if self._layout.riding:
            areas = (self._layout.riders(wire)[: SLOT.itemsize] for wire in (sent, received))
            message.said, message.heard = (Riders(area, 0) for area in areas)
        if self._has_digests:
            message.digests = (
                Digest([sent[self._layout.head_numel :]]),
                Digest([received[self._layout.head_numel :]]),
            )
        return message

    def description(self) -> str:
        """Return everything that must agree between ranks, as text."""
        return bucket_description(
            self.index, self._wire, (slot.name for slot in self.held), self._kinds
        )

    def packed(self, header: Header, memory_epoch: int, allocate: Allocate) -> Message:
        """Write the weights to a free message, and return it; on a GPU in stream order.

        A partner may still read one of an earlier `memory_epoch`, so this allocates another in its
        place.
        """
        if self.free[0].memory_epoch != memory_epoch:
            self.free[0] = self._message(allocate, memory_epoch)
        self.free[0].packing.pack(self._tensors(), 1.0, encode(header))
        return self.free[0]

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
        self.free.append(self.in_flight.popleft())
        if found.share:
            with torch.no_grad():
                message.packing.mix(self._tensors(), message.received, message.sent, found.share)
        return found

    def _tensors(self) -> list[Tensor]:
        """Return the tensors as they are now, to be read and written; raises `UsageError` if they
        are others.
        """
        tensors = [slot.tensor() for slot in self.held]
        for slot, tensor, kind in zip(self.held, tensors, self._kinds, strict=True):
            if (tensor.dtype, tensor.shape, tensor.stride()) != kind:
                now = TensorKind.of(tensor)
                raise UsageError(
                    f"{slot.name} is {now} now, and was {kind} when the model was attached:"
                    " detach() and attach() again after changing the model"
                )
        return tensors
