# SPDX-License-Identifier: Apache-2.0
"""`World.all_reduce`: sums of tensors of any shape; gradients go by `buckets/engine`.

Sums travel one at a time, so all share one wire buffer, as large as the largest tensor so far.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, count, pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from commrt.algorithm import Algorithm
from commrt.algorithms.direct import MOST_IN_ONE_SHOT, one_shot
from commrt.errors import DisagreementError
from commrt.kernels.dispatch import packing
from commrt.kernels.layout import GRANULE, Layout, layout_of
from commrt.kernels.packing import Packing
from commrt.kernels.plain_torch import pack
from commrt.program import Program, chunk_bounds, member_program
from commrt.proof.replay import prove
from commrt.proof.spec import all_reduce
from commrt.proof.summing import require_short_sums
from commrt.runtime.all_reduce_call import DEFAULT, AllReduce
from commrt.runtime.executor import RunnableProgram, Scratch, bind
from commrt.runtime.prepared import (
    KEPT,
    Claim,
    HasMembership,
    Members,
    Prepared,
    schedule_of,
    traits_of,
)
from commrt.runtime.wire import (
    AnyWire,
    ValuesOnWire,
    buffer_dtype,
    carrier_of,
    is_quantized,
    wire_text,
)
from commrt.schedule import Schedule
from commrt.threads.comm_thread import CommThread
from commrt.threads.recording import Fact, Recorder, within_range
from commrt.transport.by_device import TransportByDevice
from commrt.transport.protocol import Tag

SLICE_NUMEL = 1 << 20
"""Elements of a large sum on a CPU that travel at once."""
HEADERS_KEPT = 256
UNCONFIRMED = 64
"""Latest calls on a GPU for which a mismatch may still be found."""


@lru_cache(HEADERS_KEPT)
def _header(checksum: int, tag: Tag) -> int:
    """Return 64 bits that show in the sum over ranks if calls differ."""
    both = zlib.crc32(f"{tag.step} {tag.bucket}".encode(), checksum)
    return both << 32 | ~both & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Sum:
    call: AllReduce
    algorithm: str
    program: RunnableProgram
    packing: Packing
    scale: float
    checksum: int
    """Checksum of all that must be equal on all ranks but the tag."""
    residual: Tensor | None  # memory for the caller's, which may have moved since the call before

    def run(
        self, tensor: Tensor, residual: Tensor | None, tag: Tag, recorder: Recorder | None = None
    ) -> None:
        """Overwrite `tensor` with the result, and `residual` with what rounding lost."""
        # a view that is negated when read
        is_dense = tensor.stride() == self.call.strides and not tensor.is_neg()
        dense = tensor if is_dense else self.call.empty(tensor.device).copy_(tensor)
        header = _header(self.checksum, tag)
        if self.residual is not None and residual is not None:
            self.residual.copy_(residual)
        self._carry(dense, header, tag, recorder)
        if self.residual is not None and residual is not None:
            residual.copy_(self.residual)
        if dense is not tensor:
            tensor.copy_(dense)

    def _carry(self, dense: Tensor, header: int, tag: Tag, recorder: Recorder | None) -> None:
        self.packing.pack([dense], self.scale, header)
        self.program.run(tag, recorder)
        self.packing.unpack([dense], header)
        if self.packing.mismatched:
            self.refuse(tag)

    def refuse(self, tag: Tag) -> NoReturn:
        """Raise `DisagreementError`: the ranks' calls were different ones."""
        raise DisagreementError(
            f"all_reduce() of {self.call}, at step {tag.step}, as {tag.bucket}: another rank"
            " came with another op, shape, layout in memory, dtype, wire, algorithm or tag;"
            " make the same calls in the same order on every rank"
        )


class _Slice(NamedTuple):
    program: RunnableProgram
    places: list[Tensor]
    """Where the tensor's elements lie on the wire."""
    spans: Sequence[slice]
    """Their places in the tensor."""


@dataclass(frozen=True, slots=True)
class _SlicedSum(_Sum):
    """A large sum on a CPU, a part of each chunk at a time, so that what travels stays in cache.

    Each element is added in the same order as if all were added at once.
    """

    slices: Sequence[_Slice]

    def _carry(self, dense: Tensor, header: int, tag: Tag, recorder: Recorder | None) -> None:
        row = dense.as_strided((dense.numel(),), (1,))
        for number, (program, places, spans) in enumerate(self.slices):
            parts = [*map(row.__getitem__, spans)]
            pack(parts, places, self.scale)
            if number == 0:
                self.packing.pack([row[:0]], 1.0, header)
            program.run(tag, recorder)
            if number == 0:  # and nothing was written
                self.packing.unpack([row[:0]], header)
                if self.packing.mismatched:
                    self.refuse(tag)
            torch._foreach_copy_(parts, places)


class Sums:
    """The all-reduces of one world."""

    def __init__(
        self,
        transport: TransportByDevice,
        comm_thread: CommThread,
        world: HasMembership,
        compare: Callable[[Claim], object],
    ) -> None:
        self._transport = transport
        self._comm_thread = comm_thread
        self._world = world
        self._compare = compare
        # each by what it was bound to, and by the kinds of calls that may repeat it
        self._prepared = Prepared[_Sum](world, 2 * KEPT)
        self._calls = count(1)  # so that random numbers of untagged calls differ
        self._memory = Scratch(self._allocate)
        self._unconfirmed: deque[tuple[_Sum, Tag]] = deque(maxlen=UNCONFIRMED)

    def schedule(self, algorithm: Algorithm | None, call: AllReduce) -> Schedule:
        """Return the members' proven schedule; raises `UsageError` or `ScheduleError` if none.

        Without an `algorithm` few bytes among few ranks take one step: a message costs more than
        its bytes.
        """
        members = self._world.membership.ranks
        schedule = _chosen(algorithm, call, len(members))
        if self._prepared.known(schedule, members, call) is None:
            _prove(schedule)
            if is_quantized(call.wire):
                require_short_sums(schedule, call.wire)
        return schedule

    def known(
        self, tensor: Tensor, op: str, algorithm: Algorithm | None, wire: AnyWire | None
    ) -> _Sum | None:
        """Return what such a call may `repeat` unchecked, as `remember` noted one; else None."""
        try:
            found = self._prepared.known(*_kind_of(tensor, op, algorithm, wire))
        except (
            AttributeError,
            RuntimeError,
            TypeError,
        ):  # it is no tensor, has no strides, or an argument no hash
            return None
        if found is None or tensor.is_inference() or tensor.is_neg():
            return None
        return found

    def remember(
        self,
        tensor: Tensor,
        op: str,
        algorithm: Algorithm | None,
        wire: AnyWire | None,
        call: AllReduce,
    ) -> None:
        """Note a call that was made, of a tensor without gaps on the host; nothing is in flight."""
        members = self._world.membership.ranks
        schedule = _chosen(algorithm, call, len(members))
        own = self._prepared.known(schedule, members, call)
        if own is None or tensor.stride() != call.strides:
            return
        with suppress(TypeError):  # of an algorithm without a hash
            self._prepared.keep(own, *_kind_of(tensor, op, algorithm, wire))

    def repeat(self, own: _Sum, tensor: Tensor, residual: Tensor | None, tag: Tag) -> None:
        """Run a sum that was prepared. On the communication thread."""
        listener = self._comm_thread.listener
        if listener is None:
            own.run(tensor, residual, tag)
            return
        facts: dict[str, Fact] = {"bucket": tag.bucket, "algorithm": own.algorithm}
        with within_range(listener, "sum", step=tag.step, **facts):
            own.run(tensor, residual, tag, listener)

    def run(
        self, schedule: Schedule, call: AllReduce, tensor: Tensor, residual: Tensor | None, tag: Tag
    ) -> None:
        """Overwrite `tensor` with the sum or the mean over the members.

        On the communication thread.
        """
        members = self._world.membership.ranks
        if len(members) == 1:
            return
        own = self._prepared.known(schedule, members, call)
        if own is None:
            own = self._prepare(schedule, members, call)
        self.require_no_mismatch()
        self.repeat(own, tensor, residual, tag)
        if tensor.is_cuda:
            self._unconfirmed.append((own, tag))
            # may be freed on another stream
            for used in (tensor,) if residual is None else (tensor, residual):
                used.record_stream(torch.cuda.current_stream(tensor.device))

    def forget(self) -> None:
        """Let go of all memory."""
        self._prepared.forget()
        self._memory.clear()
        self._unconfirmed.clear()

    def require_no_mismatch(self) -> None:
        """Raise `DisagreementError` if a GPU found that an earlier call met a different one."""
        for own, tag in self._unconfirmed:
            if own.packing.mismatched:
                own.refuse(tag)

    def _prepare(self, schedule: Schedule, members: Members, call: AllReduce) -> _Sum:
        if not self._prepared.is_current:
            self.forget()  # a broken peer may still read what it was sent
        # other sizes on other ranks would end the world
        numel = layout_of([call.shape.numel()]).numel
        claim = Claim(members, f"{traits_of(schedule).digest} {numel} {wire_text(call.wire)}")
        self._prepared.compare_once(claim, self._compare)
        return self._prepared.keep(self._bind(schedule, members, call), schedule, members, call)

    def _bind(self, schedule: Schedule, members: Members, call: AllReduce) -> _Sum:
        packed = layout_of([call.shape.numel()])
        mine = member_program(schedule, members, self._transport.rank, self._transport.places)
        checksum = zlib.crc32(f"{call} {traits_of(schedule).digest}".encode())
        scale = 1 / len(members) if call.op == "mean" else 1
        is_plain = call.device.type == "cpu" and not is_quantized(call.wire)
        is_long = (
            call.shape.numel() > SLICE_NUMEL and SLICE_NUMEL // mine.chunks >= packed.head_numel
        )
        if is_plain and is_long:
            return self._bind_slices(mine, call, schedule.name, packed, scale, checksum)
        wire = self._memory.row(packed.numel, buffer_dtype(call.wire), call.device, "wire")
        plain = wire[: packed.head_numel] if is_quantized(call.wire) else wire
        program: RunnableProgram
        program = head = bind(mine, plain, self._transport, self._memory, self._comm_thread.streams)
        residual = None
        numel = call.shape.numel()
        if is_quantized(call.wire):  # its values are added in fp32
            residual = (
                self._memory.row(numel, torch.float32, call.device, "residual")
                if call.wire.feedback
                else None
            )
            (program,) = carrier_of(call.wire).bind_values(
                mine,
                call.wire,
                [ValuesOnWire(head, wire[packed.head_numel :][:numel], residual)],
                self._transport,
                lambda use, nbytes: self._memory.row(nbytes, torch.uint8, call.device, use),
                self._calls,
            )
        packs = packing(wire, packed, [call.empty("meta")])
        return _Sum(call, schedule.name, program, packs, scale, checksum, residual)

    def _bind_slices(
        self,
        mine: Program,
        call: AllReduce,
        name: str,
        packed: Layout,
        scale: float,
        checksum: int,
    ) -> _SlicedSum:
        bounds = chunk_bounds(packed.numel, mine.chunks, GRANULE)
        ahead = packed.head_numel
        step = SLICE_NUMEL // mine.chunks // GRANULE * GRANULE
        dtype = buffer_dtype(call.wire)
        whole = self._memory.row(step * mine.chunks, dtype, call.device, "wire")
        slices = list[_Slice]()
        programs = dict[tuple[int, ...], RunnableProgram]()
        for lo in range(0, max(end - begin for begin, end in pairwise(bounds)), step):
            cut = [
                (min(begin + lo, end), min(begin + lo + step, end))
                for begin, end in pairwise(bounds)
            ]
            ends = tuple(accumulate((end - begin for begin, end in cut), initial=0))
            wire = whole[: ends[-1]]
            if ends not in programs:
                streams = self._comm_thread.streams
                programs[ends] = bind(
                    mine, wire, self._transport, self._memory, streams, bounds=ends
                )
            places = list[Tensor]()
            spans = list[slice]()
            for place, (begin, end) in zip(ends, cut, strict=False):
                first = max(begin, ahead)
                last = min(end, ahead + call.shape.numel())
                if first < last:
                    places.append(wire[place + first - begin : place + last - begin])
                    spans.append(slice(first - ahead, last - ahead))
            slices.append(_Slice(programs[ends], places, spans))
        nothing = torch.empty(0, dtype=call.dtype, device="meta")
        head = packing(whole[:ahead], layout_of([0]), [nothing])
        return _SlicedSum(call, name, slices[0].program, head, scale, checksum, None, slices)

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._prepared.forget_bound()  # it would keep the smaller memory
        return self._transport.allocate(numel, dtype, device)


def _kind_of(
    tensor: Tensor, op: str, algorithm: Algorithm | None, wire: AnyWire | None
) -> tuple[Any, ...]:
    """Return all on which it depends whether a call is right, but for values and tag."""
    return (
        type(tensor),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.device,
        op,
        algorithm,
        wire,
    )


def _chosen(algorithm: Algorithm | None, call: AllReduce, ranks: int) -> Schedule:
    if algorithm is None and call.is_short and ranks <= MOST_IN_ONE_SHOT:
        return one_shot(ranks)
    return schedule_of(DEFAULT if algorithm is None else algorithm, 0, ranks)


@lru_cache(KEPT)
def _prove(schedule: Schedule) -> None:
    prove(schedule, all_reduce(schedule.ranks, schedule.chunks))
