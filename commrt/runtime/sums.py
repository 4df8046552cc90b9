# SPDX-License-Identifier: Apache-2.0
"""The sums of `World.all_reduce`: prepared when a call is new, then only run.

They write the callers' tensors and residuals, which keep what rounding lost; see `Sums` for
threads. Gradients go by `commrt.buckets.engine`. Sums travel one at a time, so all share one wire
buffer, as large as the most that has travelled at once.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from commrt.algorithm import Algorithm
from commrt.algorithms.arguments import as_algorithm, schedule_of
from commrt.algorithms.direct import MOST_IN_ONE_SHOT, one_shot
from commrt.kernels.dispatch import packing
from commrt.kernels.layout import layout_of
from commrt.program import Program, member_program
from commrt.proof.replay import prove
from commrt.proof.spec import all_reduce
from commrt.proof.summing import require_short_sums
from commrt.runtime.all_reduce_call import DEFAULT, AllReduce, Op
from commrt.runtime.bound_sum import BoundSum
from commrt.runtime.comparison import Claim
from commrt.runtime.executor import BoundProgram, RunnableProgram, Scratch, bind
from commrt.runtime.generation import Members
from commrt.runtime.prepared import KEPT, HasMembership, Prepared
from commrt.runtime.remade_schedules import RemadeSchedules
from commrt.runtime.schedule_traits import traits_of
from commrt.runtime.sliced_sum import SlicedSum, bind_slices, slice_numel, travels_in_slices
from commrt.runtime.wire import (
    AnyWire,
    QuantizedWire,
    buffer_dtype,
    is_quantized,
    wire_text,
)
from commrt.runtime.wire_carrier import ValuesOnWire, carrier_of
from commrt.schedule import Schedule
from commrt.threads.comm_thread import CommThread
from commrt.threads.recording import Fact, within_range
from commrt.transport.by_device import TransportByDevice
from commrt.transport.protocol import Tag

UNCONFIRMED = 64
"""Latest calls on a GPU for which a mismatch may still be found."""


class Sums:
    """The all-reduces of one world.

    `run` and `repeat` send, on the communication thread, or the caller's in its place. `known`,
    `schedule` and `remember` send nothing, on the thread that calls the world. There `schedule`
    alone notes which schedule was seen, and `remember` which call may be repeated.
    `require_no_mismatch` is for both threads; the world calls `forget` when no task runs.
    """

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
        # each under what it was bound to (schedule, members, call), and there for `run`; also under
        # each kind of call that may repeat it (`_kind_of`); both are forgotten together
        self._prepared = Prepared[BoundSum](world, 2 * KEPT)
        self._remade = RemadeSchedules()
        self._calls = count(1)  # so that random numbers of untagged calls differ
        self._memory = Scratch(self._allocate)
        self._unconfirmed: deque[tuple[BoundSum, Tag]] = deque(maxlen=UNCONFIRMED)

    def schedule(self, algorithm: Algorithm | str | None, call: AllReduce) -> Schedule:
        """Return the members' proven schedule; raises `UsageError` or `ScheduleError` if none.

        Without an `algorithm` few bytes among few ranks take one step: a message costs more than
        its bytes.
        """
        members = self._world.membership.ranks
        schedule = _chosen(algorithm, call, len(members))
        if self._prepared.known(schedule, members, call) is None:
            _prove(schedule)
            tells = self._transport.rank == members[0]
            self._remade.see(schedule, algorithm, tells=tells)
            if is_quantized(call.wire):
                require_short_sums(schedule, call.wire)
        return schedule

    def known(
        self, tensor: Tensor, op: Op, algorithm: Algorithm | str | None, wire: AnyWire | str | None
    ) -> BoundSum | None:
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
        op: Op,
        algorithm: Algorithm | str | None,
        wire: AnyWire | str | None,
        call: AllReduce,
    ) -> None:
        """Note a call that was made, of a tensor without gaps on the host: `known` finds it.

        Nothing is in flight, so the communication thread does not write here meanwhile.
        """
        members = self._world.membership.ranks
        schedule = _chosen(algorithm, call, len(members))
        own = self._prepared.known(schedule, members, call)
        if own is None or tensor.stride() != call.strides:
            return
        with suppress(TypeError):  # of an algorithm without a hash
            self._prepared.keep(own, *_kind_of(tensor, op, algorithm, wire))

    def repeat(self, own: BoundSum, tensor: Tensor, residual: Tensor | None, tag: Tag) -> None:
        """Run a sum that was prepared."""
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
        """Overwrite `tensor` with the sum or the mean over the members; prepares a new call."""
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

    def _prepare(self, schedule: Schedule, members: Members, call: AllReduce) -> BoundSum:
        if not self._prepared.is_current:
            self.forget()  # a broken peer may still read what it was sent
        # other sizes on other ranks would end the world
        numel = layout_of([call.shape.numel()]).numel
        claim = Claim(members, f"{traits_of(schedule).digest} {numel} {wire_text(call.wire)}")
        self._prepared.compare_once(claim, self._compare)
        return self._prepared.keep(self._bind(schedule, members, call), schedule, members, call)

    def _bind(self, schedule: Schedule, members: Members, call: AllReduce) -> BoundSum:
        mine = member_program(schedule, members, self._transport.rank, self._transport.places)
        checksum = zlib.crc32(f"{call} {traits_of(schedule).digest}".encode())
        scale = 1 / len(members) if call.op == "mean" else 1
        layout = layout_of([call.shape.numel()])
        if travels_in_slices(call, mine.chunks):
            wire = self._wire(slice_numel(mine.chunks), call)
            streams = self._comm_thread.streams
            slices = bind_slices(call, mine, wire, self._transport, self._memory, streams)
            nothing = torch.empty(0, dtype=call.dtype, device="meta")
            header = packing(wire[: layout.head_numel], layout_of([0]), [nothing])
            first = slices[0].program
            return SlicedSum(call, schedule.name, first, header, scale, checksum, None, slices)
        wire = self._wire(layout.numel, call)
        program: RunnableProgram
        if is_quantized(call.wire):
            program, residual = self._bind_quantized(mine, call, call.wire, wire)
        else:
            program = self._bind_plain(mine, wire)
            residual = None
        packs = packing(wire, layout, [call.empty("meta")])
        return BoundSum(call, schedule.name, program, packs, scale, checksum, residual)

    def _wire(self, numel: int, call: AllReduce) -> Tensor:
        return self._memory.row(numel, buffer_dtype(call.wire), call.device, "wire")

    def _bind_plain(self, mine: Program, row: Tensor) -> BoundProgram:
        return bind(mine, row, self._transport, self._memory, self._comm_thread.streams)

    def _bind_quantized(
        self, mine: Program, call: AllReduce, quantizer: QuantizedWire, wire: Tensor
    ) -> tuple[RunnableProgram, Tensor | None]:
        """Return what carries the header of `wire` as it is, and its values, which are added in
        fp32, quantized; and the memory for the residual, if there is one.
        """
        numel = call.shape.numel()
        head_numel = layout_of([numel]).head_numel
        head = self._bind_plain(mine, wire[:head_numel])
        residual = None
        if quantizer.feedback:
            residual = self._memory.row(numel, torch.float32, call.device, "residual")
        (program,) = carrier_of(quantizer).bind_values(
            mine,
            quantizer,
            [ValuesOnWire(head, wire[head_numel:][:numel], residual)],
            self._transport,
            lambda use, nbytes: self._memory.row(nbytes, torch.uint8, call.device, use),
            self._calls,
        )
        return program, residual

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate what `_memory` lacks, amid `_bind`, and forget all sums that were kept before.

        They would keep the smaller memory alive. The sum that is bound now is kept after that.
        """
        self._prepared.forget_bound()
        return self._transport.allocate(numel, dtype, device)


def _kind_of(
    tensor: Tensor, op: Op, algorithm: Algorithm | str | None, wire: AnyWire | str | None
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


def _chosen(algorithm: Algorithm | str | None, call: AllReduce, ranks: int) -> Schedule:
    if algorithm is None and call.is_short and ranks <= MOST_IN_ONE_SHOT:
        return one_shot(ranks)
    return schedule_of(DEFAULT if algorithm is None else as_algorithm(algorithm), 0, ranks)


@lru_cache(KEPT)
def _prove(schedule: Schedule) -> None:
    prove(schedule, all_reduce(schedule.ranks, schedule.chunks))
