# SPDX-License-Identifier: Apache-2.0
"""Sockets and shared memory between the ranks of one host: how ranks connect, and what they tell
each other.

To connect, each rank listens for higher ranks and calls lower ones. Its sockets have names in
Linux's abstract namespace, so no file is left behind. A name is a hash of a secret, which is on the
store only, and of the rank that is called. So a caller is known by the name of its socket: a name
can be read from ``/proc/net/unix`` while it is in use, but nobody else can guess it before, or take
it then.

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

A socket that ends means that its process ended or gave up.
"""

from __future__ import annotations

import array
import json
import mmap
import os
import secrets
import socket
import struct
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from hashlib import sha256
from itertools import count
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Store

from commrt.errors import DeadlineExceeded, PeerLost, Place, TransportError
from commrt.store.parsing import require, typed
from commrt.store.records import gather
from commrt.threads.deadline import clock
from commrt.transport.packet_queue import (
    AWAKE,
    IS_ORDERED,
    QUEUE_NBYTES,
    WAITS_FOR_PACKETS,
    WAITS_FOR_ROOM,
    PacketQueue,
    fence,
)

SECRET_NBYTES = 16
NUMBER = struct.Struct("<cQ")
OFFER = struct.Struct("<QQQ")
CALL = struct.Struct("<cI")
SMALL_NBYTES = 16 << 10
"""Messages up to this size travel in packets: below, an offer and its answer take longer than two
copies more.
"""
PACKET_NBYTES = CALL.size + SMALL_NBYTES
KEEP_NO_FILE: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Else a mapping opens its file once more, for as long as it lives."""
DESCRIPTOR_NBYTES = socket.CMSG_SPACE(array.array("i").itemsize)


def connect(
    store: Store, rank: int, members: Sequence[int], timeout_s: float
) -> dict[int, socket.socket]:
    """Return a socket to each other member.

    Raises `DeadlineExceeded`, `PeerLost` for a rank that came and left, and `TransportError` on
    all ranks if one of them can open no sockets.
    """
    deadline = clock.now_s() + timeout_s
    own = secrets.token_bytes(SECRET_NBYTES)
    with ExitStack() as opened:
        sockets = dict[int, socket.socket]()
        problem = ""
        try:
            listener = opened.enter_context(_socket(_name(own)))
            listener.listen(socket.SOMAXCONN)  # other programs may call too
            for peer in members:
                if peer < rank:
                    sockets[peer] = opened.enter_context(_socket(_name(own, peer)))
        except OSError as error:
            problem = str(error)
        others = gather(store, rank, members, [own.hex(), problem], timeout_s, _parse_caller)
        for peer, other in others.items():
            if other.problem:
                raise TransportError(
                    f"rank {peer} can open no sockets within its host ({other.problem}): is there "
                    "a limit on open files (`ulimit -n`)",
                    Place(rank, peer),
                )
        for peer, end in sockets.items():
            _call(end, others[peer].secret, Place(rank, peer))
        callers = {_name(others[peer].secret, rank): peer for peer in members if peer > rank}
        sockets |= {
            peer: opened.enter_context(end) for peer, end in _accepted(listener, callers, deadline)
        }
        listener.close()
        if missing := [*callers.values()]:
            what = (
                f"ranks {missing} came and did not connect within {timeout_s:g} s: look at their"
                " output"
            )
            raise DeadlineExceeded(what, Place(rank, missing[0]))
        opened.pop_all()
    return sockets


def _call(end: socket.socket, secret: bytes, place: Place) -> None:
    """Connect to a rank that listens; the kernel accepts the call even if that process is busy."""
    try:
        end.setblocking(False)  # the listener's queue has room for all ranks
        end.connect(_name(secret))
    except OSError as error:
        what = (
            "the peer listens no more: it failed while the world was starting; look at its own"
            " output"
        )
        raise PeerLost(what, place) from error


class _Caller(NamedTuple):
    secret: bytes
    problem: str
    """Why the rank can open no sockets; empty if it can."""


def _parse_caller(data: bytes) -> _Caller:
    secret, problem = typed(json.loads(data), str, str)
    require(len(bytes.fromhex(secret)) == SECRET_NBYTES)
    return _Caller(bytes.fromhex(secret), problem)


def _accepted(
    listener: socket.socket, callers: dict[bytes, int], deadline: float
) -> Iterator[tuple[int, socket.socket]]:
    """Yield `callers`, by name, as they call, and remove them, until the deadline is over; hang up
    on all others.
    """
    while callers and (left_s := deadline - clock.now_s()) > 0:
        listener.settimeout(min(left_s, clock.slice_s))
        with suppress(TimeoutError):
            end, name = listener.accept()
            if name in callers:
                yield callers.pop(name), end
            else:
                end.close()


def _socket(name: bytes) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.bind(name)
    return end


def _name(secret: bytes, called: int | None = None) -> bytes:
    """Return the name of the socket with which the rank of `secret` calls the rank `called`, or
    listens.
    """
    return b"\0commrt-" + sha256(secret + str(called).encode()).hexdigest().encode()


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
    """How many are offered."""


class Channel:
    """This rank's end of the socket to one peer, with the state of both ends. No call waits."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        weakref.finalize(self, end.close)
        self._socket = end
        self.fd = end.fileno()
        self.is_open = True
        """False once the peer sends no more."""
        self.untaken: deque[int] = deque()
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

    def post(self, packets: Iterable[Packet], call: int) -> None:
        """Send `packets` for `call`;
        the peer comes to map the segments in which bytes are offered.
        """
        for content, segment, nbytes in packets:
            if segment is not None:
                self.untaken.append(nbytes)
                if segment.number not in self._announced:
                    self._announced.add(segment.number)
                    self._send(NUMBER.pack(b"S", segment.number), [segment.fd])
            self._send(b"".join((CALL.pack(b"M" if segment is None else b"O", call), content)))

    def forget(self, number: int) -> None:
        """Let the peer unmap our freed segment `number`."""
        if number in self._announced:
            self._announced.remove(number)
            self._send(NUMBER.pack(b"F", number))

    def source(self, offer: Offer, dtype: torch.dtype) -> Tensor:
        """Return the offered bytes, in the peer's memory, as a tensor of `dtype` that may be
        unaligned.
        """
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
        if not (self.unsent or fds or self._written is None) and self._written.put(packet):
            self._wake(WAITS_FOR_PACKETS)
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
                if not self._tell(packet, fds):
                    return
            elif not self._written.put(packet):
                return
            else:
                self._wake(WAITS_FOR_PACKETS)
            self.unsent.popleft()

    def _open_memory(self) -> None:
        """Tell the peer where our packets will lie; where the system gives no memory they travel on
        the socket.
        """
        try:
            fd = os.memfd_create("commrt-packets")
            try:
                os.ftruncate(fd, QUEUE_NBYTES)
                memory = _memory_of_queue(fd)
                self._tell(NUMBER.pack(b"Q", 0), [fd])
            finally:
                os.close(fd)
        except OSError:
            self._uses_memory = False
        else:
            self._written = PacketQueue(memory)

    def _tell(self, packet: bytes, fds: Sequence[int] = ()) -> bool:
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

    def _wake(self, least: int) -> None:
        """Wake the peer if it sleeps, and waits for what this end has just done: its state is
        `least`, or a later one.

        If its state is not known, it sleeps. If the socket takes nothing, the peer will wake up
        anyway.
        """
        fence()
        if self._read is None or self._read.state >= least:
            self._tell(NUMBER.pack(b"W", 0))

    @property
    def needs_socket(self) -> bool:
        """True if the next packet waits until the socket can be written to."""
        return bool(self.unsent) and (self._written is None or bool(self.unsent[0][1]))

    @property
    def has_news(self) -> bool:
        """True if a packet is there, or room for one that waits; only where they lie in memory.

        Costs 0.2 us.
        """
        if self._read is not None and self._read.has_packet:
            return True
        return bool(self.unsent) and self._written is not None and self._written.has_more_room

    def doze(self) -> bool:
        """Tell the peer that this end falls asleep; return True if there are news: then it must
        not.
        """
        if self._written is not None:
            self._written.say(WAITS_FOR_ROOM if self.unsent else WAITS_FOR_PACKETS)
            fence()
        return self.has_news

    def rouse(self) -> None:
        """Tell the peer that this end is awake."""
        if self._written is not None:
            self._written.say(AWAKE)

    def listen(self) -> None:
        """Read what came on the socket."""
        while self._hear():
            pass

    def _hear(self) -> bool:
        """Read one packet from the socket, return False if there is none."""
        try:
            packet, extra, _, _ = self._socket.recvmsg(
                PACKET_NBYTES, DESCRIPTOR_NBYTES, socket.MSG_CMSG_CLOEXEC
            )
        except (
            BlockingIOError,
            ConnectionResetError,
        ):  # a reset is reported once, before what can still be read
            return False
        kind = packet[:1]
        fds = [fd for *_, found in extra for fd in array.array("i", found)]
        if kind == b"S":
            self._mapped[NUMBER.unpack(packet)[1]] = _mapped(*fds)
        elif kind == b"Q":
            (fd,) = fds
            try:
                self._read = PacketQueue(_memory_of_queue(fd))
            finally:
                os.close(fd)
        elif kind == b"W":
            pass
        elif packet:
            self._take(packet)
        else:
            self.is_open = False
        return bool(packet)

    def receive(self) -> bool:
        """Read one packet; return False if there is none, on the socket only where packets travel
        there.
        """
        if self._read is None:
            return self._hear()
        packet = self._read.get()
        if packet is None:
            return False
        self._wake(WAITS_FOR_ROOM)
        self._take(packet)
        return True

    def _take(self, packet: bytes) -> None:
        if packet[:1] == b"M":
            message = memoryview(packet)[CALL.size :]
            self.offers.append(Offer(CALL.unpack_from(packet)[1], len(message), message=message))
        elif packet[:1] == b"O":
            number, offset, nbytes = OFFER.unpack_from(packet, CALL.size)
            if number not in self._mapped:
                self.listen()
            self.offers.append(Offer(CALL.unpack_from(packet)[1], nbytes, number, offset))
        else:
            self._apply(*NUMBER.unpack(packet))

    def _apply(self, kind: bytes, number: int) -> None:
        if kind == b"T":
            for _ in range(number):
                self.untaken.popleft()
        elif kind == b"F":
            del self._mapped[number]
        elif kind == b"R":
            self.expected_nbytes = number

    def shut_down(self) -> None:
        """End the connection, from any thread, even if a forked child holds it too; what others may
        be using stays.
        """
        with suppress(OSError):  # the peer was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Release the socket and the mappings without ending the connection, which a forked child
        must leave alone.
        """
        self._socket.close()
        self._mapped.clear()
        for queue in (self._written, self._read):
            if queue is not None:
                queue.release()
        self._written = self._read = None
        self._uses_memory = False


def _mapped(fd: int) -> mmap.mmap:
    """Return a file, mapped; close it."""
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


SEGMENT_NBYTES = 32 << 20
"""Least size of a segment: untouched pages cost nothing, and a process may open few files."""
ALIGNMENT_NBYTES = 64
"""A cache line, and the widest vector access."""


class Segment(NamedTuple):
    """One anonymous file, mapped in this process."""

    number: int
    """Identifies it in this process; never reused."""
    fd: int
    addresses: range


class Arena:
    """Allocates tensors from the segments of one rank; a segment is freed with the last tensor in
    it.

    Thread-safe.
    """

    def __init__(self) -> None:
        self.freed: deque[int] = deque()
        """Numbers of freed segments; the transport takes them out and tells the peers."""
        self._segments: dict[int, Segment] = {}
        self._numbers = count(1)
        self._lock = Lock()
        self._memory: mmap.mmap | None = None  # the segment that new tensors are cut from
        self._used = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros [numel]."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        nbytes = numel * dtype.itemsize
        with self._lock:
            if self._memory is None or self._used + nbytes > len(self._memory):
                self._memory = self._new_segment(nbytes)
                self._used = 0
            start = self._used
            self._used = aligned(self._used + nbytes)
            return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=start)

    def find(self, data: Tensor) -> tuple[Segment, int] | None:
        """Return the segment that holds `data` and the offset in it in bytes, or None for other
        memory.
        """
        address = data.data_ptr()
        segment = next(
            (each for each in tuple(self._segments.values()) if address in each.addresses), None
        )
        return None if segment is None else (segment, address - segment.addresses.start)

    def _new_segment(self, nbytes: int) -> mmap.mmap:
        number = next(self._numbers)
        fd = os.memfd_create(f"commrt-{number}")
        try:
            os.ftruncate(fd, max(nbytes, SEGMENT_NBYTES))
            memory = mmap.mmap(fd, 0, **KEEP_NO_FILE)
        except BaseException:
            os.close(fd)
            raise
        start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._segments[number] = Segment(number, fd, range(start, start + len(memory)))
        # Each tensor references the mapping, so this runs when the last tensor is gone, on any
        # thread.
        weakref.finalize(memory, _free, number, self._segments, self.freed).atexit = False
        return memory


def _free(number: int, segments: dict[int, Segment], freed: deque[int]) -> None:
    os.close(segments.pop(number).fd)
    freed.append(number)


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of `ALIGNMENT_NBYTES`."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
