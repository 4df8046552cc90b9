# SPDX-License-Identifier: Apache-2.0
"""The messages of one bound group between a rank and one peer of its host.

A sender offers its data where it lies. The receiver copies or reads it, and acknowledges that, so a
send waits for its receive, as on NCCL. For the thread that exchanges; no call waits. Takes what has
arrived out of the `offers` of its `Channel`, which all groups with this peer share, and writes to
the tensors of receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commrt.errors import OTHER_PROGRAMS, CallMismatch, Place, SizeMismatch, TransportError
from commrt.transport.channel import Channel, Packet
from commrt.transport.protocol import point

Where = Callable[..., Place]
"""(peer, nbytes) -> the place of a transfer of a group."""


@dataclass(slots=True, eq=False)
class PeerExchange:
    """All messages of a bound group with one peer, in the order agreed with it.

    From `received` on, the state of a run: written here only.
    """

    peer: int
    channel: Channel
    packets: Sequence[Packet]
    targets: Sequence[Tensor]
    originals: Sequence[Tensor] | None
    """[receives] the same memory if receives may be the peer's until `return_borrowed`, or None."""
    received: int = 0
    """How many of the receives are complete."""
    call: int = 0
    """The number that `begin` was given."""
    lent: bool = False
    """True from `begin` to `return_borrowed` if receives may be the peer's memory.

    The peer reads our sends as long.
    """
    borrowed: int = 0
    """Number of receives that are the peer's memory."""

    def begin(self, call: int) -> None:
        """Make all offers, and send all small messages."""
        self.received = 0
        self.call = call
        self.lent = self.originals is not None
        self.channel.post(self.packets, call)

    def progress(self, where: Where) -> bool:
        """Read packets and receive; return True if all is complete, in a loan all receives."""
        channel = self.channel
        if channel.unsent:
            channel.flush()
        while True:
            if channel.offers and self.received < len(self.targets):
                self._take_offers(where)
            if channel.expected_nbytes is not None:
                raise self._mismatch(where)
            if self.received == len(self.targets) and (self.lent or not channel.unacknowledged):
                return self.lent or not channel.unsent
            if not channel.receive():
                return False

    def _take_offers(self, where: Where) -> None:
        channel = self.channel
        offers = self.channel.offers
        copied = 0
        while offers and self.received < len(self.targets):
            offer = offers[0]
            target = self.targets[self.received]
            if (offer.call, offer.nbytes) != (self.call, target.nbytes):
                raise self._mismatch(where)
            if offer.message is not None:
                target.view(torch.uint8).numpy().data[:] = offer.message
            elif self.lent:
                point(target, channel.source(offer, target.dtype))
                self.borrowed += 1
            else:
                target.copy_(channel.source(offer, target.dtype))
                copied += 1
            self.received += 1
            offers.popleft()
        if copied:
            channel.acknowledge(copied)

    def _mismatch(self, where: Where) -> TransportError:
        """Return how the two ends differ; tell the peer."""
        place = self.place(where)
        expected = self.channel.expected_nbytes
        if expected is not None:
            own = [*self.channel.unacknowledged, "other"][0]
            what = f"this rank sends {own} bytes and the peer expects {expected}"
        elif self.channel.offers[0].call != self.call:
            what = (
                "the peer makes another call: make the same calls in the same order on every rank"
            )
            return CallMismatch(what, place)
        else:
            self.channel.refuse(self.targets[self.received].nbytes)
            what = (
                f"the peer sends {self.channel.offers[0].nbytes} bytes and this rank expects"
                f" {place.nbytes}"
            )
        return SizeMismatch(f"{what}: {OTHER_PROGRAMS}", place)

    def return_borrowed(self) -> None:
        """Tell the peer that its memory was read, and let go of it."""
        if self.borrowed:
            for target, original in zip(self.targets, self.originals or (), strict=True):
                point(target, original)
            self.channel.acknowledge(self.borrowed)
        self.lent = False
        self.borrowed = 0

    def place(self, where: Where) -> Place:
        """Return the place of the first transfer that is not complete, in a group at `where`."""
        sizes = [target.nbytes for target in self.targets[self.received :]]
        return where(self.peer, [*sizes, *self.channel.unacknowledged, 0][0])
