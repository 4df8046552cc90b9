# SPDX-License-Identifier: Apache-2.0
"""Runs the collectives of one process group, in order, on the communication thread; and the works that they return.

A *wire* is a row of *slots*. A slot holds a piece that moves as a whole: a rank's share in an all-gather, say, or the
whole buffer in a broadcast. A call of any size travels through one wire of fixed size, in slices, one after the other;
a slot may be empty in the last ones. So schedules are bound to memory once per size, whatever tensors come, and on a
CPU the wire fits the cache. All ranks have the same slots at the same places, of the same sizes, whatever the layout of
their tensors: multiples of 16 elements, or bytes of what only moves. But only the two ends of a transfer know its size
in an all-to-all. There a slot has exactly that size, so two ends that differ notice it, and is empty at other ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from commrt.algorithms.catalogue import ROOTED
from commrt.errors import CommrtError, DeadlineExceeded, TransportClosed, TransportError
from commrt.importing import untraced
from commrt.kernels.dispatch import combining
from commrt.kernels.layout import GRANULE, padded
from commrt.pricing.selection import WIRE_NBYTES, Selection, slice_nbytes
from commrt.program import chunk_bounds, member_program
from commrt.runtime.executor import BoundProgram, Scratch, bind
from commrt.runtime.work import Work, new_future
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.threads.future import Future
from commrt.threads.recording import Recorder
from commrt.transport.channel import SMALL_NBYTES
from commrt.transport.protocol import Tag, point

LANDING_NUMEL = 1 << 15
"""Elements of a slice from which receiving into the caller's memory takes less than a copy."""
SPREAD = 0x9E3779B1
"""Makes sequence numbers differ in many bits, so that a call of one number is taken for no call of another."""
KEPT = 256
"""Plans that are kept, and programs: those used last."""
NO_TIMEOUT = timedelta(0)
"""What torch passes where the caller gives none."""

Error = TypeVar("Error", bound=CommrtError)


class Piece(NamedTuple):
    """Where the piece of a slot lies: in a row of the call, from element `begin` on."""

    slot: int
    row: int
    begin: int


class Kind(NamedTuple):
    """A call without its memory: calls of one kind run the same programs on the same wire.

    All but the device, and where pieces lie in rows, must be equal on all ranks; but see `sizes`.
    """

    collective: str
    dtype: torch.dtype
    operation: str | None
    """What ADD stands for; None if nothing is combined."""
    root: int
    sizes: tuple[int, ...]
    """[slots] elements of each piece, in elements of the wire's dtype. In an `all_to_all` they differ, and are 0 for a
    slot that this rank does not use."""
    put: tuple[Piece, ...]
    """What this rank contributes."""
    take: tuple[Piece, ...]
    """Where this rank wants the result."""
    device: torch.device
    divisor: int = 1
    """What the result is divided by; integers are rounded towards zero, as by NCCL."""
    is_scaled: bool = False
    """True if each rank's contribution is multiplied by a factor of its own."""

    def __str__(self) -> str:
        """Name the call as in errors, such as ``all_reduce (sum) of float32[100]``; equal on all ranks."""
        if self.collective == "barrier":
            return self.collective
        how = f" ({self.operation})" if self.operation else ""
        from_root = f", root {self.root}" if self.collective in ROOTED else ""
        slots, numel = len(self.sizes), self.piece_nbytes // self.dtype.itemsize
        size = f"[{numel if slots == 1 else (slots, numel)}]" if self.is_even else ""
        return f"{self.collective}{how} of {str(self.dtype)[6:]}{size}{from_root}"

    @property
    def is_even(self) -> bool:
        """True if all pieces have one size."""
        return self.collective != "all_to_all"

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype of the wire: that of the tensors if they are combined, bytes otherwise."""
        return torch.uint8 if self.operation is None else self.dtype

    @property
    def piece_nbytes(self) -> int:
        """Bytes of each piece; 0 where pieces differ."""
        return self.sizes[0] * self.wire_dtype.itemsize if self.is_even else 0


@dataclass(slots=True, eq=False)
class Call:
    """One collective as a rank asks for it, checked. Rows share memory with tensors, or are copies of what has gaps."""

    kind: Kind
    put: Sequence[Tensor]
    take: Sequence[Tensor]
    result: Sequence[Tensor]
    factor: Tensor | float | None = None
    """What this rank's contribution is multiplied by."""
    copies: Sequence[tuple[Tensor, Tensor]] = ()
    """(target, row) pairs to copy at the end: tensors with gaps, and the rows that are taken for them."""


class _Copy(NamedTuple):
    """A part of the wire, and the elements of a row of a call that are copied from or to it."""

    wire: Tensor
    row: int
    elements: slice


class _Part(NamedTuple):
    """What a slice of a kind of call needs."""

    program: BoundProgram
    put: Sequence[_Copy]
    take: Sequence[_Copy]
    land: Sequence[tuple[Tensor, _Copy]]
    """Receives that go into the caller's rows, where that saves a copy, and the part of the wire they go to else."""


class _Plan(NamedTuple):
    schedule: str
    number: int
    """32 bits that tell this kind of call from others, on all ranks."""
    numel: int
    parts: Sequence[_Part]


class CallEngine:
    """The collectives of one group. All methods but `begin` run on the communication thread."""

    def __init__(self, world: World, selection: Selection, name: str) -> None:
        self._world, self._selection, self._name = world, selection, name
        self.timeout_s = world.timeout_s
        """Of calls that have none of their own."""
        self.begun = 0
        """Calls that have run, or begun to: the sequence number of the next one."""
        self._memory = Scratch(self._allocate)
        self._plan = lru_cache(KEPT)(self._new_plan)
        self._bound = lru_cache(KEPT)(self._bind)  # its schedules were proven when they were chosen

    def begin(self, call: Call, timeout_s: float | None = None, *, waits: bool = False) -> Future[None] | None:
        """Run `call` after all earlier ones; return at once, or if the caller `waits` anyway None, when it is done."""
        device, comm_thread = call.kind.device, self._world.comm_thread
        if device.type == "cuda":
            self._world.connect(device)
            waits = False
        task = partial(self._run, call, timeout_s)
        return comm_thread.call(task) if waits else comm_thread.submit(task)

    def _run(self, call: Call, timeout_s: float | None) -> None:
        number, transport, comm_thread = self.begun, self._world.transport, self._world.comm_thread
        self.begun += 1
        if timeout_s is not None:
            transport.timeout_s = timeout_s
        try:
            # The caller's tensors may be made under it. torch.inference_mode() takes four times as long.
            with torch._C._InferenceMode(True):  # noqa: SLF001
                plan, collective = self._plan(call.kind), call.kind.collective
                tag = Tag(number, collective, plan.number ^ (number * SPREAD & 0xFFFFFFFF))
                with comm_thread.within_range(collective, step=number, numel=plan.numel, schedule=plan.schedule):
                    for part in plan.parts:
                        _carry(part, call, tag, comm_thread.listener)
                    for target, row in call.copies:
                        target.copy_(row.view(target.dtype).view(target.shape))
            if call.kind.device.type == "cuda":
                for row in (*call.put, *call.take):  # they may be freed on another stream
                    row.record_stream(torch.cuda.current_stream(row.device))
        except TransportError as error:
            limit = f", with a timeout of {transport.timeout_s:g} s" if isinstance(error, DeadlineExceeded) else ""
            ended = comm_thread.failure if isinstance(error, TransportClosed) else None  # why it was closed
            why = f", as {ended.what}" if isinstance(ended, TransportClosed) else ""
            error.what = f"{call.kind}, sequence number {number} of group {self._name}{limit}: {error.what}{why}"
            raise
        finally:
            if timeout_s is not None:
                transport.timeout_s = self.timeout_s

    def _new_plan(self, kind: Kind) -> _Plan:
        slot_nbytes = slice_nbytes(kind.collective, self._world.size, kind.device.type)
        schedule = self._selection.choose(kind.collective, kind.root, min(kind.piece_nbytes, slot_nbytes))
        number = zlib.crc32(f"{kind} {schedule.name} {kind.divisor} {kind.is_scaled}".encode())
        slot_numel = slot_nbytes // kind.wire_dtype.itemsize
        begins = range(0, max(kind.sizes, default=0), slot_numel)
        parts = [self._part(schedule, kind, lo, slot_numel) for lo in begins]
        return _Plan(schedule.name, number, sum(kind.sizes), parts)

    def _part(self, schedule: Schedule, kind: Kind, lo: int, slot_numel: int) -> _Part:
        """Return what the slice needs that has at most `slot_numel` elements of each piece, from `lo` on."""
        sizes = tuple([min(max(size - lo, 0), slot_numel) for size in kind.sizes])
        shape = tuple(map(padded, sizes)) if kind.is_even else sizes
        places = [*accumulate(shape, initial=0)]
        program, wire = self._bound(schedule, shape, kind.operation, kind.wire_dtype, kind.device)
        lands = kind.divisor == 1 and shape == sizes and places[-1] >= LANDING_NUMEL and kind.device.type == "cpu"
        lands = lands and self._world.transport.can_move_receives
        landings = sorted(program.landings, key=lambda each: each.begin) if lands else []
        put = [_copy(wire, row, places[at], places[at] + sizes[at], first + lo) for at, row, first in kind.put]
        take, land = [], []
        for slot, row, first in kind.take:
            begin, stop, ahead = places[slot], places[slot] + sizes[slot], first + lo - places[slot]
            for target, low, high in landings:
                if begin <= low < high <= stop:
                    take.append(_copy(wire, row, begin, low, begin + ahead))
                    land.append((target, _copy(wire, row, low, high, low + ahead)))
                    begin = high
            take.append(_copy(wire, row, begin, stop, begin + ahead))
        return _Part(program, put, [each for each in take if each.wire.numel()], land)

    def _bind(
        self, schedule: Schedule, shape: Sequence[int], operation: str | None, dtype: torch.dtype, device: torch.device
    ) -> tuple[BoundProgram, Tensor]:
        """Return a program for slots of the sizes `shape`, and the wire [sum of shape] that it runs on."""
        world, ranks = self._world, self._world.size
        mine = member_program(schedule, range(ranks), world.rank, ranks)  # which remembers schedules
        bounds, chunks_per_slot = [0], schedule.chunks // len(shape)
        for size in shape:
            bounds += [bounds[-1] + bound for bound in chunk_bounds(size, chunks_per_slot, GRANULE)[1:]]
        wire, scratch = self._memory.row(bounds[-1], dtype, device, "wire"), self._memory
        add = None if operation is None else combining(operation)
        return bind(mine, wire, world.transport, scratch, world.comm_thread.streams, bounds=bounds, add=add), wire

    def _allocate(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return so much that it seldom has to grow, since programs bound to what was too small keep that.

        A group of small calls alone opens no file for its memory.
        """
        enough = SMALL_NBYTES if nbytes <= SMALL_NBYTES else 2 * max(nbytes, WIRE_NBYTES[device.type])
        return self._world.transport.allocate(enough, dtype, device)


def _carry(part: _Part, call: Call, tag: Tag, recorder: Recorder | None) -> None:
    """Write this rank's contribution to the wire, run the schedule, and read the result."""
    for wire, row, elements in part.put:
        wire.copy_(call.put[row][elements])
        if call.factor is not None:
            wire.mul_(call.factor)
    for target, copy in part.land:
        point(target, call.take[copy.row][copy.elements])
    try:
        part.program.run(tag, recorder)
    finally:
        for target, copy in part.land:
            point(target, copy.wire)
    for wire, row, elements in part.take:
        if (divisor := call.kind.divisor) > 1:
            is_exact = wire.is_floating_point() or wire.is_complex()
            # of the device, as a GPU multiplies by the reciprocal of a number of the host
            number = torch.full((), divisor, device=wire.device)
            wire.div_(number, rounding_mode=None if is_exact else "trunc")
        call.take[row][elements].copy_(wire)


def _copy(wire: Tensor, row: int, begin: int, end: int, first: int) -> _Copy:
    """Return the copy of elements [begin, end) of the wire, from or to element `first` of a row on."""
    return _Copy(wire[begin:end], row, slice(first, first + end - begin))


def as_dist_error(error: Error) -> Error:
    """Return `error`, which is a ``torch.distributed.DistBackendError`` too from now on."""
    if not isinstance(error, dist.DistBackendError):
        kind: Any = type(error)
        error.__class__ = _with_base(kind)
    return error


@cache
def _with_base(kind: Any) -> Any:
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": _reduced}
    return type(kind.__name__, (kind, dist.DistBackendError), names)


def _reduced(error: CommrtError) -> tuple[Any, ...]:
    """Return how to pickle `error`, as one of commrt: pickle cannot find a class that is made here by its name."""
    kind: Any = type(error).__base__
    plain = kind.__new__(kind)
    plain.args, plain.__dict__ = error.args, {**error.__dict__}
    return as_dist_error, (plain,)


def seconds_of(timeout: timedelta | None) -> float | None:
    """Return a timeout of torch in seconds; None if it stands for the group's own."""
    return None if timeout is None or timeout <= NO_TIMEOUT else timeout.total_seconds()


@untraced
class GroupWork(Work, dist.Work):
    """A `Work` that is one of ``torch.distributed`` too."""

    def __init__(self, future: Future[Any] | None, result: Sequence[Tensor], call: object = "the collective") -> None:
        dist.Work.__init__(self)
        Work.__init__(self, result, 0, future, call)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:  # type: ignore[override]  # torch's
        """Return True when the result is there, or raise, as `Work.wait`."""
        try:
            self._wait(seconds_of(timeout))
        except CommrtError as error:
            as_dist_error(error)
            raise
        return True

    synchronize = wait  # type: ignore[assignment]  # which returns True

    def is_success(self) -> bool:
        """Return True if the collective is done without an error."""
        return self._task().done() and self._task().exception() is None

    def exception(self) -> BaseException | None:
        """Return the error that ended the collective, None while there is none. Never waits."""
        error = self._task().exception() if self._task().done() else None
        return as_dist_error(error) if isinstance(error, CommrtError) else error

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result; call `wait` before."""
        return list(self._result)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Do as `Work.get_future`. In a backward pass ``backward()`` raises the error too, which DDP would replace."""
        self._is_observed = True
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  # -1: no backward pass runs
            callback: Any = self.wait
            torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001
        done = new_future(self._result)
        self._task().after_all().add_done_callback(lambda _: done.set_result(None))
        return done.then(self._value)  # what a callback raises is an error for torch's C++ code too

    def _value(self, _: torch.futures.Future[None]) -> list[Tensor]:
        self.wait()
        return self.result()
