# SPDX-License-Identifier: Apache-2.0
"""Packets between processes of a host, in memory of both; no call waits or enters the kernel.

One process writes, the other one reads. A packet lies behind its length. The writer then counts it,
in one store of 8 bytes, so the reader finds it whole or not at all. That needs a processor that
keeps stores in order, and loads: x86.

Who waits looks here for a while, and then falls asleep: it says so, and looks once more. Who has
written a packet, or made room for one, looks whether the other one sleeps, and wakes it up. On both
sides a `fence` lies between the two, so at least one of them sees what the other has done.
"""

from __future__ import annotations

import platform
from threading import Lock

from commrt.store.parsing import require

IS_ORDERED = platform.machine().lower() in {"x86_64", "amd64"}
"""True if this machine keeps the order of stores, and of loads."""
CAPACITY_NBYTES = 64 << 10
"""Bytes of packets with their lengths. A page is touched when it is first used."""
WORD_NBYTES = 8
LINE_WORDS = 8
"""Words of a cache line. What the writer and the reader write lies in different ones."""
WRITTEN = 0
STATE = 1
"""Words of the writer: bytes that it has written so far, and what it does."""
READ = LINE_WORDS
"""The word of the reader: bytes that it has read so far."""
FIRST = 2 * LINE_WORDS
"""The word in which packets begin."""
QUEUE_NBYTES = FIRST * WORD_NBYTES + CAPACITY_NBYTES
AWAKE, WAITS_FOR_PACKETS, WAITS_FOR_ROOM = range(3)
"""States. Who waits for room waits for packets too."""
SKIP = (1 << 64) - 1
"""In place of a length: the next packet lies at the front."""

FRONT_NBYTES = CAPACITY_NBYTES // 2
"""Beyond this, once all was read, the next packet lies in front: few packets touch few pages."""

_fence = Lock()


def fence() -> None:
    """Let no later load pass an earlier store of this thread; takes 0.1 us."""
    # an atomic operation of the processor, and so a fence, even if it fails
    if _fence.acquire(blocking=False):
        _fence.release()


class PacketQueue:
    """One end of such a queue, the writer's or the reader's; for one thread at a time."""

    def __init__(self, memory: memoryview) -> None:
        self._bytes = memory
        self._words = self._bytes.cast("Q")
        self._at = 0  # bytes that this end has written or read so far
        self._read = 0  # bytes that the reader has read, as the writer has seen it last

    def put(self, packet: bytes) -> bool:
        """Write `packet`; return False if there is no room for it. For the writer."""
        words = self._words
        nbytes = len(packet)
        offset = self._at % CAPACITY_NBYTES
        need = _padded(nbytes)
        stays = offset + need <= CAPACITY_NBYTES
        if stays and offset > FRONT_NBYTES:
            stays = words[READ] != self._at
        at = self._at if stays else self._at + CAPACITY_NBYTES - offset
        if at + need - self._read > CAPACITY_NBYTES:
            self._read = words[READ]
            if at + need - self._read > CAPACITY_NBYTES:
                return False
        if at != self._at:
            words[FIRST + offset // WORD_NBYTES] = SKIP
            offset = 0
        word = FIRST + offset // WORD_NBYTES
        begin = (word + 1) * WORD_NBYTES
        self._bytes[begin : begin + nbytes] = packet
        words[word] = nbytes
        self._at = at + need
        words[WRITTEN] = self._at
        return True

    @property
    def has_more_room(self) -> bool:
        """True if the reader has read something since `put` returned False. For the writer."""
        return self._words[READ] != self._read

    def set_state(self, state: int) -> None:
        """Tell the reader that this process sleeps, and for what, or is `AWAKE`. For the writer."""
        self._words[STATE] = state

    def get(self) -> bytes | None:
        """Return the next packet, None if there is none; `ValueError` if bad. For the reader."""
        words = self._words
        at = self._at
        if words[WRITTEN] == at:
            return None
        offset = at % CAPACITY_NBYTES
        if words[FIRST + offset // WORD_NBYTES] == SKIP:
            at = at + CAPACITY_NBYTES - offset
            offset = 0
        word = FIRST + offset // WORD_NBYTES
        nbytes = words[word]
        require(offset + _padded(nbytes) <= CAPACITY_NBYTES)
        begin = (word + 1) * WORD_NBYTES
        packet = bytes(self._bytes[begin : begin + nbytes])
        self._at = at + _padded(nbytes)
        words[READ] = self._at
        return packet

    @property
    def has_packet(self) -> bool:
        """True if there is a packet to `get`. For the reader."""
        return self._words[WRITTEN] != self._at

    @property
    def state(self) -> int:
        """What the writer does. For the reader."""
        return self._words[STATE]

    def release(self) -> None:
        """Let go of the memory."""
        self._words.release()
        self._bytes.release()


def _padded(nbytes: int) -> int:
    """Return the bytes that a packet of `nbytes` takes, with its length."""
    return WORD_NBYTES + (nbytes + WORD_NBYTES - 1) // WORD_NBYTES * WORD_NBYTES
