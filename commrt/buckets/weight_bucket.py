# SPDX-License-Identifier: Apache-2.0
"""Buckets of weights, for gossip: what a rank sent, what it received, and how the two are mixed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from commrt.buckets.engine import Span
from commrt.buckets.layout import MIB, Header, TensorKind, Unit, bucket_description, encode, plan_buckets, wire_dtype
from commrt.buckets.weight_watch import WeightWatch
from commrt.errors import UsageError
from commrt.kernels.dispatch import packing
from commrt.kernels.layout import layout_of
from commrt.kernels.packing import Packing
from commrt.threads.future import Future
from commrt.transport.protocol import Allocate, Window

__all__ = ["Message", "TensorSlot", "WeightBucket", "build_weight_buckets", "exchanged_tensors", "watch_of"]

AVERAGED_BUFFERS = ("running_mean", "running_var")
"""Names of the buffers of which replicas take the mean: the statistics of torch's norms."""


class TensorSlot(NamedTuple):
    """The place where a model keeps a tensor; what lies there may be replaced."""

    name: str
    module: nn.Module
    key: str
    is_buffer: bool

    def held(self) -> Tensor:
        """Return what lies there now."""
        places = self.module._buffers if self.is_buffer else self.module._parameters  # noqa: SLF001
        tensor = places.get(self.key)
        if tensor is None:
            raise UsageError(f"{self.name} is gone: detach() and attach() again after changing the model")
        return tensor

    def tensor(self) -> Tensor:
        """Return what lies there now, to be read and written without autograd."""
        tensor = self.held()
        # A graph saves what BatchNorm counts while it trains, and does not read it: autograd need not notice the write.
        is_unread = self.is_buffer and isinstance(self.module, _BatchNorm) and self.module.training
        return tensor.data if is_unread else tensor.detach()


def exchanged_tensors(model: nn.Module) -> list[TensorSlot]:
    """Return the trainable parameters and `AVERAGED_BUFFERS`, each once, in the order of the modules.

    Other buffers (masks, counters, the vectors of a spectral norm, codebooks) have no meaningful mean.
    """
    found: dict[int, TensorSlot] = {}
    for prefix, module in model.named_modules():
        for key, tensor, is_buffer in _tensors_of(module):
            if key in AVERAGED_BUFFERS and tensor.is_floating_point() if is_buffer else tensor.requires_grad:
                name = f"{prefix}.{key}" if prefix else key
                found.setdefault(id(tensor), TensorSlot(name, module, key, is_buffer))
    return [*found.values()]


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    for places, is_buffer in ((module._parameters, False), (module._buffers, True)):  # noqa: SLF001
        yield from ((key, tensor, is_buffer) for key, tensor in places.items() if tensor is not None)


def watch_of(held: Sequence[TensorSlot]) -> WeightWatch:
    """Return a watch on the parameters of `held`; forward passes write to buffers."""
    places = ((slot.name, slot.module._parameters, slot.key) for slot in held if not slot.is_buffer)  # noqa: SLF001
    return WeightWatch([*places])


@dataclass(slots=True, eq=False)
class Message:
    """Memory for one exchange of a bucket: `sent` and `received` are [layout.numel] in the dtype that travels."""

    sent: Tensor
    received: Tensor
    packing: Packing
    """Packs to and from `sent`."""
    windows: Sequence[Window] = ()
    """Of `sent` and `received`, where peers can read them."""
    memory_epoch: int = 0
    """See `WeightBucket.send`."""
    answer: Future[Span] | None = None
    """The exchange's; None if there is nothing to mix."""
    share: float = 0.0
    """The weight of what was received; 0 if nothing came."""
    received_from: tuple[int, ...] = ()
    """The ranks that it came from."""


class WeightBucket:
    """Weights that travel together.

    In each step the thread that trains calls `send`, the communication thread exchanges the message, and the thread
    that trains calls `mix`. `in_flight` holds the messages in between, oldest first.
    """

    def __init__(
        self, index: int, held: Sequence[TensorSlot], wire: torch.dtype | None, messages: int, allocate: Allocate
    ) -> None:
        self.index, self.held = index, held
        tensors = [slot.tensor() for slot in held]
        self._kinds = [TensorKind.of(tensor) for tensor in tensors]
        self._wire = wire_dtype(tensors[0].dtype, wire)
        self._layout = layout_of([tensor.numel() for tensor in tensors])
        self._free = deque(self._message(tensors, allocate) for _ in range(messages))
        self.in_flight: deque[Message] = deque()
        self.watch = watch_of(held)
        """Tells whether somebody has written the parameters, while they are in flight."""

    def _message(self, like: Sequence[Tensor], allocate: Allocate, memory_epoch: int = 0) -> Message:
        sent, received = (allocate(self._layout.numel, self._wire, like[0].device) for _ in range(2))
        return Message(sent, received, packing(sent, self._layout, like), memory_epoch=memory_epoch)

    @property
    def rounds(self) -> bool:
        """True if the wire is narrower than the weights."""
        return self._wire != self._kinds[0].dtype

    def messages(self) -> Sequence[Message]:
        """Return all messages, before the first of them is sent."""
        return tuple(self._free)

    def description(self) -> str:
        """Return everything that must agree between ranks, as text."""
        return bucket_description(self.index, self._wire, (slot.name for slot in self.held), self._kinds)

    def send(self, header: Header, memory_epoch: int, allocate: Allocate) -> Message:
        """Write the weights to a free message, and return it; on a GPU in stream order.

        `memory_epoch` numbers the memory that may be reused. If an exchange was broken off, a partner may still read a
        message of an earlier number, so this allocates a new one.
        """
        message, tensors = self._free.popleft(), self._tensors()
        if message.memory_epoch != memory_epoch:
            message = self._message(tensors, allocate, memory_epoch)
        message.packing.pack(tensors, 1.0, encode(header))
        self.in_flight.append(message)
        return message

    def mix(self) -> tuple[Span | None, tuple[int, ...]]:
        """Wait for the oldest exchange and mix what it brought into the weights; return its cost and its source ranks.

        Weights may have changed since they were sent, so this adds the difference between the two messages.
        """
        message = self.in_flight[0]
        span = None if message.answer is None else message.answer.result()
        self.in_flight.popleft()
        if message.share:
            with torch.no_grad():
                message.packing.mix(self._tensors(), message.received, message.sent, message.share)
        received_from = message.received_from
        message.answer, message.share, message.received_from = None, 0.0, ()
        self._free.append(message)
        return span, received_from

    def _tensors(self) -> list[Tensor]:
        tensors = [slot.tensor() for slot in self.held]
        for slot, tensor, kind in zip(self.held, tensors, self._kinds, strict=True):
            if (now := TensorKind.of(tensor)) != kind:
                raise UsageError(
                    f"{slot.name} is {now} now, and was {kind} when the model was attached: detach() and attach() "
                    "again after changing the model"
                )
        return tensors


def build_weight_buckets(
    held: Sequence[TensorSlot], wire: torch.dtype | None, cap_nbytes: int, messages: int, allocate: Allocate
) -> list[WeightBucket]:
    """Return buckets of about `cap_nbytes`, each with memory for `messages` at once; the first bucket is small."""
    tensors = [slot.tensor() for slot in held]
    units = [Unit(slot.name, tensor.nbytes, tensor.dtype) for slot, tensor in zip(held, tensors, strict=True)]
    plan = plan_buckets(units, cap_nbytes, min(MIB, cap_nbytes))
    return [
        WeightBucket(index, [held[i] for i in places], wire, messages, allocate) for index, places in enumerate(plan)
    ]
