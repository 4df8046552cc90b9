# SPDX-License-Identifier: Apache-2.0
"""What two ranks of one host tell each other: one end, for the thread that exchanges; never waits.

Packets, which arrive whole and in order::

    O call number, offset, nbytes     I offer these bytes of a segment
    M call bytes                      a small message itself, which needs no answer
    T count                           I have copied this many of your offers, in order
    R nbytes                          your next offer is refused: I expect this many bytes
    F number                          unmap my segment of this number

They lie in memory that both map (`commrt.transport.packet_queue`), or on a machine that may reorder
stores travel on the socket. Always on the socket are::

    S number                          my segment of this number, with its descriptor; before
                                      anything in it is offered
    Q 0                               my packets lie in this memory, with its descriptor
    W 0                               wake up

A socket that ends means that its process ended or gave up. Only `shut_down` is for any thread;
`release` is for the thread that closes, and for a forked child.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.transport.arena import KEEP_NO_FILE, Segment
from commrt.transport.packet_queue import (
    AWAKE,
    IS_ORDERED,
    QUEUE_NBYTES,
    WAITS_FOR_PACKETS,
    WAITS_FOR_ROOM,
    PacketQueue,
    fence,
)

NUMBER = struct.Struct("<cQ")
OFFER = struct.Struct("<QQQ")
CALL = struct.Struct("<cI")
SMALL_NBYTES = 16 << 10
"""Messages up to this size travel in packets: two more copies are faster than an answer."""
PACKET_NBYTES = CALL.size + SMALL_NBYTES
DESCRIPTOR_NBYTES = socket.CMSG_SPACE(array.array("i").itemsize)


class Offer(NamedTuple):
    """What a peer sends: bytes in a segment of its, or a small message itself."""

    call: int
    nbytes: int
    segment: int = 0
    offset: int = 0
    message: memoryview | None = None


class Packet(NamedTuple):
    """A small message, or an offer of bytes in a segment; without the number of its call."""

    content: bytes | memoryview
    segment: Segment | None = None
    nbytes: int = 0
    """How many bytes are offered."""


class Channel:
    """This rank's end of the socket to one peer, with the state of both ends. No call waits.

    The public fields are for the transport and its `PeerExchange`, which takes out of `offers` and
    only reads the others.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        weakref.finalize(self, end.close)
        self._socket = end
        self.fd = end.fileno()
        self.is_open = True
        """False once the peer sends no more."""
        self.unacknowledged: deque[int] = deque()
        """Bytes of each of our offers that the peer has yet to copy."""
        self.offers: deque[Offer] = deque()
        """What the peer sent and we have yet to receive."""
        self.expected_nbytes: int | None = None
        """Size that the peer expects instead of our oldest offer, if it refused that."""
        self.unsent: deque[tuple[bytes, Sequence[int]]] = deque()
        """Packets with descriptors, which wait for room."""
        self._announced: set[int] = set()  # numbers of our segments that the peer maps
        self._mapped: dict[int, mmap.mmap] = {}  # the peer's segments
        self._written: PacketQueue | None = None
        """Our packets, once there are any; None on a machine where they travel on the socket."""
        self._read: PacketQueue | None = None
        """The peer's packets, once it has told where they lie."""
        self._uses_memory = IS_ORDERED
        """False where packets must travel on the socket."""

    def post(self, packets: Iterable[Packet], call: int) -> None:
        """Send `packets` for `call`; the peer comes to map segments in which bytes are offered."""
        for content, segment, nbytes in packets:
            if segment is not None:
                self.unacknowledged.append(nbytes)
                if segment.number not in self._announced:
                    self._announced.add(segment.number)
                    self._send(NUMBER.pack(b"S", segment.number), [segment.fd])
            self._send(b"".join((CALL.pack(b"M" if segment is None else b"O", call), content)))

    def unmap(self, number: int) -> None:
        """Let the peer unmap our freed segment `number`."""
        if number in self._announced:
            self._announced.remove(number)
            self._send(NUMBER.pack(b"F", number))

    def source(self, offer: Offer, dtype: torch.dtype) -> Tensor:
        """Return the offered bytes in the peer's memory as a `dtype` tensor, maybe unaligned."""
        memory = self._mapped[offer.segment]
        return torch.frombuffer(
            memory, dtype=dtype, count=offer.nbytes // dtype.itemsize, offset=offer.offset
        )

    def acknowledge(self, count: int) -> None:
        """Tell the peer that `count` more of its offers were copied."""
        self._send(NUMBER.pack(b"T", count))

    def refuse(self, nbytes: int) -> None:
        """Tell the peer that `nbytes` were expected."""
        self._send(NUMBER.pack(b"R", nbytes))

    def _send(self, packet: bytes, fds: Sequence[int] = ()) -> None:
        goes_first = not (self.unsent or fds)
        if goes_first and self._written is not None and self._written.put(packet):
            self._wake_peer(WAITS_FOR_PACKETS)
            return
        self.unsent.append((packet, fds))
        if len(self.unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Send as many packets as there is room for."""
        if self._uses_memory and self._written is None:
            self._open_memory()
        while self.unsent:
            packet, fds = self.unsent[0]
            if fds or self._written is None:
                if not self._send_to_socket(packet, fds):
                    return
            elif not self._written.put(packet):
                return
            else:
                self._wake_peer(WAITS_FOR_PACKETS)
            self.unsent.popleft()

    def _open_memory(self) -> None:
        """Tell the peer where our packets will lie; without memory they travel on the socket."""
        try:
            fd = os.memfd_create("commrt-packets")
            try:
                os.ftruncate(fd, QUEUE_NBYTES)
                memory = _memory_of_queue(fd)
                if not self._send_to_socket(NUMBER.pack(b"Q", 0), [fd]):
                    return  # the next flush tries again
            finally:
                os.close(fd)
        except OSError:
            self._uses_memory = False
        else:
            self._written = PacketQueue(memory)

    def _send_to_socket(self, packet: bytes, fds: Sequence[int] = ()) -> bool:
        """Send `packet` on the socket, with descriptors; return False if it takes no more now."""
        try:
            if fds:
                socket.send_fds(self._socket, [packet], fds)
            else:
                self._socket.send(packet)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            pass  # the peer has left; its last packets can still be read, and then the end
        return True

    def _wake_peer(self, least: int) -> None:
        """Wake the peer if it sleeps in a state from `least` on, so waits for what this end did.

        If its state is not known, it sleeps. If the socket takes nothing, the peer will wake up
        anyway.
        """
        fence()
        if self._read is None or self._read.state >= least:
            self._send_to_socket(NUMBER.pack(b"W", 0))

    @property
    def needs_socket(self) -> bool:
        """True if the next packet waits until the socket can be written to."""
        return bool(self.unsent) and (self._written is None or bool(self.unsent[0][1]))

    @property
    def can_progress(self) -> bool:
        """True if memory has a packet, or room for one that waits; costs 0.2 us."""
        if self._read is not None and self._read.has_packet:
            return True
        return bool(self.unsent) and self._written is not None and self._written.has_more_room

    def begin_sleep(self) -> bool:
        """Tell the peer that this end falls asleep; return `can_progress`: if so, it must not."""
        if self._written is not None:
            self._written.set_state(WAITS_FOR_ROOM if self.unsent else WAITS_FOR_PACKETS)
            fence()
        return self.can_progress

    def end_sleep(self) -> None:
        """Tell the peer that this end is awake."""
        if self._written is not None:
            self._written.set_state(AWAKE)

    def read_socket(self) -> None:
        """Read what came on the socket."""
        while self._receive_from_socket():
            pass

    def _receive_from_socket(self) -> bool:
        """Read one packet from the socket, return False if there is none."""
        try:
            packet, extra, _, _ = self._socket.recvmsg(
                PACKET_NBYTES, DESCRIPTOR_NBYTES, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, ConnectionResetError):
            return False  # a reset is reported once, before what can still be read
        letter = packet[:1]
        fds = [fd for *_, found in extra for fd in array.array("i", found)]
        if letter == b"S":
            self._mapped[NUMBER.unpack(packet)[1]] = _mapped(*fds)
        elif letter == b"Q":
            (fd,) = fds
            try:
                self._read = PacketQueue(_memory_of_queue(fd))
            finally:
                os.close(fd)
        elif letter == b"W":
            pass
        elif packet:
            self._handle(packet)
        else:
            self.is_open = False
        return bool(packet)

    def receive(self) -> bool:
        """Read one packet, False if there is none; on the socket only if packets travel there."""
        if self._read is None:
            return self._receive_from_socket()
        packet = self._read.get()
        if packet is None:
            return False
        self._wake_peer(WAITS_FOR_ROOM)
        self._handle(packet)
        return True

    def _handle(self, packet: bytes) -> None:
        letter = packet[:1]
        if letter == b"M":
            message = memoryview(packet)[CALL.size :]
            self.offers.append(Offer(CALL.unpack_from(packet)[1], len(message), message=message))
        elif letter == b"O":
            number, offset, nbytes = OFFER.unpack_from(packet, CALL.size)
            if number not in self._mapped:
                self.read_socket()
            self.offers.append(Offer(CALL.unpack_from(packet)[1], nbytes, number, offset))
        else:
            self._apply(*NUMBER.unpack(packet))

    def _apply(self, letter: bytes, number: int) -> None:
        if letter == b"T":
            for _ in range(number):
                self.unacknowledged.popleft()
        elif letter == b"F":
            del self._mapped[number]
        elif letter == b"R":
            self.expected_nbytes = number

    def shut_down(self) -> None:
        """End the connection, from any thread, even a forked child's too; what is used stays."""
        with suppress(OSError):  # the peer was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Release socket and mappings without an end of the connection, as a forked child must."""
        self._socket.close()
        self._mapped.clear()
        for queue in (self._written, self._read):
            if queue is not None:
                queue.release()
        self._written = self._read = None
        self._uses_memory = False


def _mapped(fd: int) -> mmap.mmap:
    """Return the file `fd`, mapped, and close it."""
    try:
        return mmap.mmap(fd, 0, **KEEP_NO_FILE)
    finally:
        os.close(fd)


def _memory_of_queue(fd: int) -> memoryview:
    """Return the memory of a queue, which keeps no descriptor: a rank has two for each peer."""
    try:
        packets = torch.from_file(
            f"/proc/self/fd/{fd}", shared=True, size=QUEUE_NBYTES, dtype=torch.uint8
        )
    except RuntimeError as error:  # torch's, of the system
        raise OSError(str(error).partition("\n")[0]) from error
    return packets.numpy().data
