# SPDX-License-Identifier: Apache-2.0
"""What two ranks of one host tell each other: one socket per pair, and the five things that are said on it.

::

    S number                     here is a segment of mine (its descriptor comes along): map it
    O (number, offset, nbytes)*  I offer what lies there
    T count                      I have taken so many of your offers, in order
    R nbytes                     your next offer is not of the nbytes I expected
    F number                     a segment of mine is no more: unmap it

Packets arrive whole and in order. A socket that ends means that its process is gone, or has given up.
"""

from __future__ import annotations

import array
import mmap
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.transport.segments import Segment, mapped

__all__ = ["Link", "Offer", "packets"]

NUMBER = struct.Struct("<cQ")
OFFER = struct.Struct("<QQQ")
OFFERS_PER_PACKET = 1024
PACKET_NBYTES = 1 + OFFERS_PER_PACKET * OFFER.size
DESCRIPTOR = socket.CMSG_SPACE(array.array("i").itemsize)


class Offer(NamedTuple):
    """Bytes that a sender has ready."""

    number: int
    """Their segment."""
    offset: int
    nbytes: int


def packets(offers: Sequence[Offer]) -> list[bytes]:
    """What to say to make `offers`."""
    parts = (offers[at : at + OFFERS_PER_PACKET] for at in range(0, len(offers), OFFERS_PER_PACKET))
    return [b"O" + b"".join(OFFER.pack(*offer) for offer in part) for part in parts]


class Link:
    """This rank's end of the socket to one peer, and what has been said on it. Nothing here waits."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self.fd = end.fileno()
        self.untaken = 0
        """How many of our offers the peer has yet to take."""
        self.offers: deque[Offer] = deque()
        """The peer's, that we have yet to take."""
        self.expected_nbytes: int | None = None
        """What the peer expected in place of our oldest untaken offer, if it refused that."""
        self._unsent: deque[tuple[bytes, list[int]]] = deque()  # packets with descriptors; the socket was full
        self._shown: set[int] = set()  # our segments that the peer maps
        self._mapped: dict[int, mmap.mmap] = {}  # the peer's segments

    @property
    def full(self) -> bool:
        """True if something waits until the socket can be written to."""
        return bool(self._unsent)

    def show(self, segments: Iterable[Segment]) -> None:
        """Make sure that the peer maps `segments`."""
        for segment in segments:
            if segment.number not in self._shown:
                self._shown.add(segment.number)
                self._say(NUMBER.pack(b"S", segment.number), [segment.fd])

    def forget(self, number: int) -> None:
        """Let the peer unmap a segment that is no more."""
        if number in self._shown:
            self._shown.remove(number)
            self._say(NUMBER.pack(b"F", number))

    def offer(self, said: Iterable[bytes], count: int) -> None:
        """Make `count` offers, given as `packets`, from segments that were shown."""
        self.untaken += count
        for packet in said:
            self._say(packet)

    def source(self, offer: Offer, dtype: torch.dtype) -> Tensor:
        """The offered bytes, where they are, as a row of `dtype`, aligned or not."""
        memory, numel = self._mapped[offer.number], offer.nbytes // dtype.itemsize
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offer.offset)

    def took(self, count: int) -> None:
        """Tell the peer that `count` more of its offers were taken."""
        self._say(NUMBER.pack(b"T", count))

    def refuse(self, nbytes: int) -> None:
        """Tell the peer that `nbytes` were expected."""
        self._say(NUMBER.pack(b"R", nbytes))

    def _say(self, packet: bytes, fds: Sequence[int] = ()) -> None:
        self._unsent.append((packet, list(fds)))
        if len(self._unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Send what the socket takes."""
        while self._unsent:
            packet, fds = self._unsent[0]
            try:
                socket.send_fds(self._socket, [packet], fds) if fds else self._socket.send(packet)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                pass  # the peer has left; what it said before can still be read, and then the end
            self._unsent.popleft()

    def listen(self) -> bool:
        """Read one packet, if there is one; False if the peer will say nothing more."""
        try:
            packet, extra, _, _ = self._socket.recvmsg(PACKET_NBYTES, DESCRIPTOR, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, ConnectionResetError):  # reset: reported once, before what can still be read
            return True
        if not packet:
            return False
        self._understand(packet, [fd for _, _, data in extra for fd in array.array("i", data)])
        return True

    def _understand(self, packet: bytes, fds: list[int]) -> None:
        if packet[:1] == b"O":
            self.offers.extend(map(Offer._make, OFFER.iter_unpack(memoryview(packet)[1:])))
            return
        kind, number = NUMBER.unpack(packet)
        if kind == b"T":
            self.untaken -= number
        elif kind == b"S":
            self._mapped[number] = mapped(fds[0])
        elif kind == b"F":
            del self._mapped[number]
        elif kind == b"R":
            self.expected_nbytes = number

    def hang_up(self) -> None:
        """End the conversation, even if a forked process holds the socket too; from any thread.

        Descriptor and mappings stay: another thread may be about to use them.
        """
        with suppress(OSError):  # the peer was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the conversation and let go of its means."""
        self.hang_up()
        self.drop()

    def drop(self) -> None:
        """Let go of socket and mappings without a word: a forked child does not speak for this rank."""
        self._socket.close()
        self._mapped.clear()
