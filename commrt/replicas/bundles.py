# SPDX-License-Identifier: Apache-2.0
"""Parameters and buffers whose values are exchanged, as they are: what a rank sent, what it received, the two mixed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from commrt.errors import UsageError
from commrt.kernels.dispatch import packing
from commrt.kernels.layout import Layout, layout_of
from commrt.kernels.packing import Packing
from commrt.replicas.report import Span
from commrt.threads.answer import Answer
from commrt.transport.protocol import Allocate
from commrt.wire.buckets import MIB, Unit, plan_buckets
from commrt.wire.stamp import Claim, stamp

__all__ = ["Bundle", "Held", "Message", "build_bundles", "held_by"]


class Held(NamedTuple):
    """A tensor of a model, by the place where the model keeps it: what lies there may be replaced."""

    name: str
    module: nn.Module
    key: str
    is_buffer: bool

    def tensor(self) -> Tensor:
        """What lies there now, to be read and written without autograd."""
        places = self.module._buffers if self.is_buffer else self.module._parameters  # noqa: SLF001
        tensor = places[self.key]
        if tensor is None:
            raise UsageError(f"{self.name} is gone: detach() and attach() again after changing the model")
        return tensor.data if self._is_unread() else tensor.detach()

    def _is_unread(self) -> bool:
        """A graph saves what BatchNorm counts while it trains, and does not read it."""
        return self.is_buffer and isinstance(self.module, _BatchNorm) and self.module.training


def held_by(model: nn.Module) -> list[Held]:
    """Trainable parameters and floating point buffers, each once, in the order in which modules come."""
    found, seen = [], set()
    for prefix, module in model.named_modules():
        trainable = ((key, param, False) for key, param in module._parameters.items())  # noqa: SLF001
        buffers = ((key, buffer, True) for key, buffer in module._buffers.items())  # noqa: SLF001
        for key, tensor, is_buffer in (*trainable, *buffers):
            if tensor is None or id(tensor) in seen or not _is_exchanged(tensor, is_buffer):
                continue
            seen.add(id(tensor))
            found.append(Held(f"{prefix}.{key}" if prefix else key, module, key, is_buffer))
    return found


def _is_exchanged(tensor: Tensor, is_buffer: bool) -> bool:
    return tensor.is_floating_point() if is_buffer else tensor.requires_grad


@dataclass(slots=True, eq=False)
class Message:
    """Room for one exchange of a bundle."""

    sent: Tensor
    received: Tensor
    """Both [layout.numel], in the dtype that travels."""
    packing: Packing
    """Of `sent`."""
    answer: Answer[Span] | None = None
    """That of the exchange; None if there is nothing to be mixed."""
    share: float = 0.0
    """With which it counts; 0 where nothing came."""
    heard: tuple[int, ...] = ()
    """The ranks that it came from."""
    room: int = 0
    """See `Bundle.send`."""


@dataclass(slots=True, eq=False)
class Bundle:
    """A step of a bundle is `send`, on the thread that trains; the exchange, on the lane; `mix`, on the first again."""

    index: int
    held: Sequence[Held]
    layout: Layout
    wire: torch.dtype
    """The dtype that travels."""
    free: deque[Message]
    under_way: deque[Message] = field(default_factory=deque)
    """Oldest first."""
    _kinds: list[tuple[torch.dtype, torch.Size, tuple[int, ...]]] = field(init=False)

    def __post_init__(self) -> None:
        self._kinds = [_kind(held.tensor()) for held in self.held]

    @property
    def rounds(self) -> bool:
        """True if the wire is narrower than the values."""
        return self.wire != self._kinds[0][0]

    def description(self) -> str:
        """All that must agree between ranks, as text."""
        wire = str(self.wire)[6:]
        parts = (f"{held.name} {kind[0]}{list(kind[1])}" for held, kind in zip(self.held, self._kinds, strict=True))
        return f"bundle {self.index} ({wire}): {', '.join(parts)}"

    def send(self, claim: Claim, room: int, allocate: Allocate) -> Message:
        """The values as they are now, on the wire; on a GPU in stream order.

        A message of another `room` than this one is left alone: where an exchange was broken off, a partner may read
        what was sent at any time.
        """
        message = self.free.popleft()
        if message.room != room:
            message = _message(self.layout, self.wire, self._tensors(), allocate)
            message.room = room
        message.packing.pack(self._tensors(), 1.0, stamp(claim))
        self.under_way.append(message)
        return message

    def mix(self) -> tuple[Span | None, tuple[int, ...]]:
        """Wait for the oldest exchange under way, and mix what it brought into the values; what it cost, who was heard.

        Values may have changed since they were sent: what is added is the difference between the two messages.
        """
        message = self.under_way[0]
        span = None if message.answer is None else message.answer.result()
        self.under_way.popleft()
        if message.share:
            with torch.no_grad():
                message.packing.mix(self._tensors(), message.received, message.sent, message.share)
        heard, message.heard = message.heard, ()
        message.answer, message.share = None, 0.0
        self.free.append(message)
        return span, heard

    def _tensors(self) -> list[Tensor]:
        tensors = [held.tensor() for held in self.held]
        for held, tensor, kind in zip(self.held, tensors, self._kinds, strict=True):
            if _kind(tensor) != kind:
                raise UsageError(
                    f"{held.name} is {tensor.dtype}{list(tensor.shape)} now, and was {kind[0]}{list(kind[1])} when the "
                    "model was attached: detach() and attach() again after changing the model"
                )
        return tensors


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    return tensor.dtype, tensor.shape, tensor.stride()


def build_bundles(
    held: Sequence[Held], wire: torch.dtype | None, cap_nbytes: int, messages: int, allocate: Allocate
) -> list[Bundle]:
    """Bundles of about `cap_nbytes`, each with room for as many `messages` at once; the first is small."""
    units = [Unit(one.name, one.tensor().nbytes, one.tensor().dtype) for one in held]
    plan = plan_buckets(units, cap_nbytes, min(MIB, cap_nbytes))
    parts = ([held[i] for i in members] for members in plan)
    return [_bundle(index, part, wire, messages, allocate) for index, part in enumerate(parts)]


def _bundle(index: int, part: Sequence[Held], wire: torch.dtype | None, messages: int, allocate: Allocate) -> Bundle:
    tensors = [one.tensor() for one in part]
    layout, own = layout_of([tensor.numel() for tensor in tensors]), tensors[0].dtype
    dtype = wire if wire is not None and wire.itemsize < own.itemsize else own
    free = deque(_message(layout, dtype, tensors, allocate) for _ in range(messages))
    return Bundle(index, part, layout, dtype, free)


def _message(layout: Layout, dtype: torch.dtype, like: Sequence[Tensor], allocate: Allocate) -> Message:
    sent, received = (allocate(layout.numel, dtype, like[0].device) for _ in range(2))
    return Message(sent, received, packing(sent, layout, like))
