# SPDX-License-Identifier: Apache-2.0
"""Sockets and shared memory between the ranks of one host: how ranks connect, and what they tell each other.

To connect, each rank listens for higher ranks and calls lower ones. Addresses are random names in Linux's abstract
namespace, so no file is left behind. They are on the store together with a password, because everybody on the host
can read the names from ``/proc/net/unix``.

Packets, which arrive whole and in order::

    S number                          map my segment of this number (its descriptor comes along)
    O call number, offset, nbytes     I offer these bytes, for the call of this number
    M call bytes                      a small message itself, which needs no answer
    T count                           I have copied this many of your offers, in order
    R nbytes                          your next offer is refused: I expect this many bytes
    F number                          unmap my segment of this number

A socket that ends means that its process ended or gave up.
"""

from __future__ import annotations

import array
import mmap
import os
import secrets
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from math import ceil
from threading import Lock
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Store

from commrt.errors import DeadlineExceeded, PeerLost, Place
from commrt.store.agreement import gather
from commrt.store.client import parse_list, require
from commrt.threads.deadline import clock

RANK = struct.Struct("<I")
PASSWORD_NBYTES = 16
NUMBER = struct.Struct("<cQ")
OFFER = struct.Struct("<QQQ")
CALL = struct.Struct("<cI")
SMALL_NBYTES = 16 << 10
"""Messages up to this size travel in packets: below, an offer and its answer take longer than two copies more."""
PACKET_NBYTES = CALL.size + SMALL_NBYTES
DESCRIPTOR_NBYTES = socket.CMSG_SPACE(array.array("i").itemsize)


def connect(store: Store, rank: int, members: Sequence[int], timeout_s: float) -> dict[int, socket.socket]:
    """Return a socket to each other member; raises `DeadlineExceeded`, and `PeerLost` for a rank that came and left."""
    deadline = clock.now_s() + timeout_s
    higher = [peer for peer in members if peer > rank]
    sockets: dict[int, socket.socket] = {}
    name, password = secrets.token_hex(16), secrets.token_bytes(PASSWORD_NBYTES)
    try:
        with _socket() as listener:
            listener.bind(_address(name))
            listener.listen(socket.SOMAXCONN)  # other programs may call too
            calls = gather(store, rank, members, [name, password.hex()], timeout_s, _parse_call)
            for peer in (peer for peer in members if peer < rank):
                sockets[peer] = _call(rank, peer, *calls[peer])
            sockets.update(_callers(listener, password, higher, deadline))
        if missing := [peer for peer in higher if peer not in sockets]:
            what = f"ranks {missing} came and did not connect within {timeout_s:g} s: look at their output"
            raise DeadlineExceeded(what, Place(rank, missing[0]))  # noqa: TRY301  # all sockets are closed below
    except BaseException:
        for end in sockets.values():
            end.close()
        raise
    return sockets


def _call(rank: int, peer: int, name: str, password: bytes) -> socket.socket:
    """Connect to a rank that listens; the kernel accepts the call even if that process is busy."""
    end = _socket()
    try:
        end.setblocking(False)  # the listener's queue has room for all ranks
        end.connect(_address(name))
        end.send(RANK.pack(rank) + password)
    except OSError as error:
        end.close()
        what = "the peer listens no more: it failed while the world was starting; look at its own output"
        raise PeerLost(what, Place(rank, peer)) from error
    return end


def _parse_call(data: bytes) -> tuple[str, bytes]:
    name, password = parse_list(data, 2)
    require(len(name) == 2 * PASSWORD_NBYTES and bytes.fromhex(name))
    return name, bytes.fromhex(password)


def _callers(
    listener: socket.socket, password: bytes, expected: Collection[int], deadline: float
) -> Iterator[tuple[int, socket.socket]]:
    """Yield peers as they call, until all have or the deadline is over; hang up on callers without the password."""
    unidentified: dict[int, socket.socket] = {}
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    come = 0
    while come < len(expected) and (left_s := deadline - clock.now_s()) > 0:
        for fd, _ in poller.poll(ceil(min(left_s, clock.slice_s) * 1000)):
            if fd == listener.fileno():
                end = listener.accept()[0]
                end.setblocking(False)
                unidentified[end.fileno()] = end
                poller.register(end, select.POLLIN)
                continue
            end = unidentified.pop(fd)
            poller.unregister(fd)
            if (caller := _identify(end, password)) in expected and caller is not None:
                come += 1
                yield caller, end
            else:
                end.close()
    for end in unidentified.values():
        end.close()


def _identify(end: socket.socket, password: bytes) -> int | None:
    try:
        data = end.recv(RANK.size + len(password))
    except OSError:
        return None
    known = secrets.compare_digest(data[RANK.size :], password)
    return int(RANK.unpack_from(data)[0]) if known else None


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(name: str) -> str:
    return f"\0commrt-{name}"


class Offer(NamedTuple):
    """What a peer sends: bytes in a segment of its, or a small message itself."""

    call: int
    nbytes: int
    segment: int = 0
    offset: int = 0
    message: memoryview | None = None


Packet = tuple[Literal[b"O", b"M"], bytes | memoryview]
"""An offer or a small message, without the number of its call."""


class Channel:
    """This rank's end of the socket to one peer, with the state of both ends. No call waits."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self.fd = end.fileno()
        self.is_open = True
        """False once the peer sends no more."""
        self.untaken = 0
        """Number of our offers that the peer has yet to copy."""
        self.offers: deque[Offer] = deque()
        """What the peer sent and we have yet to receive."""
        self.expected_nbytes: int | None = None
        """Size that the peer expects instead of our oldest offer, if it refused that."""
        self.unsent: deque[tuple[bytes, list[int]]] = deque()
        """Packets with descriptors, which wait until the socket can be written to."""
        self._announced: set[int] = set()  # numbers of our segments that the peer maps
        self._mapped: dict[int, mmap.mmap] = {}  # the peer's segments

    def post(self, segments: Iterable[Segment], packets: Iterable[Packet], offers: int, call: int) -> None:
        """Send `packets`, of which so many are `offers` of bytes in `segments`, which the peer comes to map."""
        for segment in segments:
            if segment.number not in self._announced:
                self._announced.add(segment.number)
                self._send(NUMBER.pack(b"S", segment.number), [segment.fd])
        self.untaken += offers
        for kind, content in packets:
            self._send(b"".join((CALL.pack(kind, call), content)))

    def forget(self, number: int) -> None:
        """Let the peer unmap our freed segment `number`."""
        if number in self._announced:
            self._announced.remove(number)
            self._send(NUMBER.pack(b"F", number))

    def source(self, offer: Offer, dtype: torch.dtype) -> Tensor:
        """Return the offered bytes, in the peer's memory, as a tensor of `dtype` that may be unaligned."""
        memory = self._mapped[offer.segment]
        return torch.frombuffer(memory, dtype=dtype, count=offer.nbytes // dtype.itemsize, offset=offer.offset)

    def acknowledge(self, count: int) -> None:
        """Tell the peer that `count` more of its offers were copied."""
        self._send(NUMBER.pack(b"T", count))

    def refuse(self, nbytes: int) -> None:
        """Tell the peer that `nbytes` were expected."""
        self._send(NUMBER.pack(b"R", nbytes))

    def _send(self, packet: bytes, fds: Sequence[int] = ()) -> None:
        self.unsent.append((packet, list(fds)))
        if len(self.unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Send as many packets as the socket takes."""
        while self.unsent:
            packet, fds = self.unsent[0]
            try:
                if fds:
                    socket.send_fds(self._socket, [packet], fds)
                else:
                    self._socket.send(packet)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                pass  # the peer has left; its last packets can still be read, and then the end
            self.unsent.popleft()

    def receive(self) -> None:
        """Read one packet if there is one."""
        try:
            packet, extra, _, _ = self._socket.recvmsg(PACKET_NBYTES, DESCRIPTOR_NBYTES, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, ConnectionResetError):  # a reset is reported once, before what can still be read
            return
        if packet[:1] == b"M":
            message = memoryview(packet)[CALL.size :]
            self.offers.append(Offer(CALL.unpack_from(packet)[1], len(message), message=message))
        elif packet[:1] == b"O":
            number, offset, nbytes = OFFER.unpack_from(packet, CALL.size)
            self.offers.append(Offer(CALL.unpack_from(packet)[1], nbytes, number, offset))
        elif packet:
            kind, number = NUMBER.unpack(packet)
            self._apply(kind, number, [fd for _, _, data in extra for fd in array.array("i", data)])
        else:
            self.is_open = False

    def _apply(self, kind: bytes, number: int, fds: Sequence[int]) -> None:
        if kind == b"T":
            self.untaken -= number
        elif kind == b"S":
            try:
                self._mapped[number] = mmap.mmap(fds[0], 0)
            finally:
                os.close(fds[0])
        elif kind == b"F":
            del self._mapped[number]
        elif kind == b"R":
            self.expected_nbytes = number

    def shut_down(self) -> None:
        """End the connection, from any thread, even if a forked child holds it too; what others may be using stays."""
        with suppress(OSError):  # the peer was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and release the socket and the mappings."""
        self.shut_down()
        self.release()

    def release(self) -> None:
        """Release the socket and the mappings without ending the connection, as a forked child must."""
        self._socket.close()
        self._mapped.clear()


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
    """Allocates tensors from the segments of one rank; a segment is freed with the last tensor in it. Thread-safe."""

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
                self._memory, self._used = self._new_segment(nbytes), 0
            start, self._used = self._used, aligned(self._used + nbytes)
            return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=start)

    def find(self, data: Tensor) -> tuple[Segment, int] | None:
        """Return the segment that holds `data` and the offset in it in bytes, or None for other memory."""
        address = data.data_ptr()
        segment = next((each for each in tuple(self._segments.values()) if address in each.addresses), None)
        return None if segment is None else (segment, address - segment.addresses.start)

    def _new_segment(self, nbytes: int) -> mmap.mmap:
        number = next(self._numbers)
        fd = os.memfd_create(f"commrt-{number}")
        try:
            os.ftruncate(fd, max(nbytes, SEGMENT_NBYTES))
            memory = mmap.mmap(fd, 0)
        except BaseException:
            os.close(fd)
            raise
        start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._segments[number] = Segment(number, fd, range(start, start + len(memory)))
        # Each tensor references the mapping, so this runs when the last tensor is gone, on any thread.
        weakref.finalize(memory, _free, number, self._segments, self.freed).atexit = False
        return memory


def _free(number: int, segments: dict[int, Segment], freed: deque[int]) -> None:
    os.close(segments.pop(number).fd)
    freed.append(number)


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of `ALIGNMENT_NBYTES`."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
