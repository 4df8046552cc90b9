# SPDX-License-Identifier: Apache-2.0
"""A bucket's whole step remembered by its device, and repeated by one call; where that cannot be, the reason."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from commrt.buckets import Bucket
from commrt.executor import BoundProgram
from commrt.transport.protocol import Exchange, Moment, Transport

__all__ = ["Repetition"]

KEPT = 16
"""Programs of which what was remembered is kept; as many as the engine keeps bound."""
FIRST = "its first step with this schedule is carried call by call"
NOT_HERE = "gradients are on a CPU, or some are missing"
NOTHING_QUEUED = "the transport waits for its transfers, so there is nothing to repeat"


@dataclass(slots=True, eq=False)
class _Memory:
    program: BoundProgram
    depends_on: object = None
    """What aiming returned."""
    exchange: Exchange | None = None


class Repetition:
    """One bucket's. The first step with a program is not remembered: its peers meet, and its kernels are compiled."""

    def __init__(self, bucket: Bucket, transport: Transport) -> None:
        self._bucket, self._transport = bucket, transport
        self._memories: OrderedDict[int, _Memory] = OrderedDict()  # by the identity of programs, which they keep
        self._refusal: str | None = None
        self.reason: str | None = FIRST
        """Why the latest step was carried call by call; None if it was repeated."""

    def carry(self, program: BoundProgram, scale: float, moment: Moment) -> bool:
        """Pack, exchange and unpack by one call, and return True; False if the caller must do it."""
        exchange = None
        self.reason = self._refusal or self._unprepared(program)
        if self.reason is None:
            exchange = self._remembered(self._memories[id(program)], self._bucket.aim(scale))
        if exchange is None:
            return False
        exchange(moment)
        self._bucket.repeated()
        return True

    def _unprepared(self, program: BoundProgram) -> str | None:
        """The reason if this is the first step with `program`."""
        if id(program) in self._memories:
            self._memories.move_to_end(id(program))
            return None
        self._memories[id(program)] = _Memory(program)
        if len(self._memories) > KEPT:
            self._memories.popitem(last=False)
        return FIRST

    def _remembered(self, memory: _Memory, depends_on: object | None) -> Exchange | None:
        """What repeats the step; sets the reason if there is nothing."""
        if depends_on is None:
            self.reason = NOT_HERE
            return None
        if memory.exchange is None or memory.depends_on != depends_on:
            memory.exchange, memory.depends_on = self._seen_by_device(memory.program), depends_on
        return memory.exchange

    def _seen_by_device(self, program: BoundProgram) -> Exchange | None:
        """Let the device see what the step queues."""

        def work() -> None:
            self._bucket.pack_aimed()
            program.run(Moment(-1, self._bucket.index))
            self._bucket.unpack_aimed()

        try:
            exchange = self._transport.capture(work, program.group)
        except RuntimeError as error:
            self._refusal = self.reason = f"the device refused: {error}"
            return None
        if exchange is None:
            self._refusal = self.reason = NOTHING_QUEUED
        return exchange
