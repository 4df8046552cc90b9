# SPDX-License-Identifier: Apache-2.0
"""All-reduce of tensors of any shape, along an algorithm's schedule.

Sums travel one at a time, so all share one wire buffer, as large as the largest tensor so far. Where a rank may be lost
meanwhile, a sum is computed on a copy: the tensor is written once all ranks have the result, so until then they can
start again.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count
from typing import cast

import torch
from torch import Tensor, nn

from commrt.errors import CommrtError, DisagreementError, ScheduleError, UsageError
from commrt.kernels.dispatch import packing
from commrt.kernels.layout import layout_of
from commrt.kernels.packing import Packing
from commrt.options import require_compatible
from commrt.program import member_program
from commrt.proof.replay import prove
from commrt.proof.spec import all_reduce
from commrt.runtime.consistency import ConsistencyCheck
from commrt.runtime.executor import RunnableProgram, bind, scratch_numel
from commrt.runtime.membership import Membership
from commrt.runtime.recording import Recorder, within_range
from commrt.runtime.wire import AnyWire, ValuesOnWire, carrier_of, check_wire, is_quantized, travels_as, wire_text
from commrt.schedule import Algorithm, Schedule
from commrt.threads.comm_thread import CommThread, RecoveredError
from commrt.threads.future import Future
from commrt.transport.by_device import TransportByDevice
from commrt.transport.protocol import Tag

__all__ = [
    "Collectives",
    "check_algorithm",
    "check_all_reduce",
    "check_all_reduce_call",
    "check_run",
    "is_expanded",
]

KEPT = 256
"""Bound programs that are kept: those of the tensors seen last."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32)
"""Narrower ones would overflow: each rank adds flags to the sum as well."""
OPS = ("mean", "sum")
UNCONFIRMED = 64
"""Latest calls on a GPU for which a mismatch may still be found."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """What must be equal on all ranks to add up a tensor, and where it lies."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    wire: AnyWire
    """What travels."""
    device: torch.device

    def __str__(self) -> str:
        """Name all that must be equal on all ranks; the strides of dimensions of size 1 may differ."""
        strides = [stride if size > 1 else 0 for size, stride in zip(self.shape, self.strides, strict=True)]
        kinds = dict.fromkeys((self.dtype, self.wire))
        dtypes = " as ".join(repr(one) if is_quantized(one) else str(one)[6:] for one in kinds)
        return f"{dtypes}{list(self.shape)} with strides {strides}"

    def empty(self, device: torch.device | str) -> Tensor:
        """Return an uninitialized tensor of this layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """One call of `World.all_reduce`, checked."""

    tensor: Tensor
    layout: TensorLayout
    op: str
    algorithm: Algorithm
    tag: Tag
    residual: Tensor | None = None
    """What this rank still owes to the sum."""

    def __str__(self) -> str:
        return f"the {self.op} of {self.layout}, at step {self.tag.step}, as {self.tag.bucket}"


def check_all_reduce_call(
    tensor: Tensor,
    op: str,
    algorithm: Algorithm,
    wire: AnyWire | None,
    tag: Tag,
    residual: Tensor | None = None,
) -> AllReduce:
    """Return the checked call; raises `UsageError` for what cannot be summed."""
    _check_tensor(tensor)
    _check_arithmetic(tensor.dtype, op)
    check_wire(wire)
    check_all_reduce(algorithm, wire)
    _check_tag(tag)
    travels = travels_as(tensor, wire)
    _check_residual(residual, travels, tensor)
    like = torch.empty_like(tensor, device="meta")  # has the strides of a dense tensor, and makes others dense
    layout = TensorLayout(like.shape, like.stride(), like.dtype, travels, tensor.device)
    return AllReduce(tensor, layout, op, algorithm, tag, residual)


def _check_tag(tag: Tag) -> None:
    """Raise `UsageError` unless `tag` is one."""
    if not isinstance(tag, Tag):
        raise UsageError(f"tag={tag!r:.80}: give a commrt.Tag(step, bucket), or leave it out")


def check_run(schedule: Schedule, ranks: int, tag: Tag) -> None:
    """Raise `UsageError` unless `schedule` is one of so many `ranks`."""
    _check_tag(tag)
    if not isinstance(schedule, Schedule):
        raise UsageError(f"{schedule!r} is no schedule: an algorithm makes one with its schedule(step, ranks)")
    if schedule.ranks != ranks:
        raise UsageError(
            f"{schedule.name} is a schedule of {schedule.ranks} ranks and the world has {ranks}: say which of "
            f"them play it with schedule.over(ranks, world={ranks})"
        )


def check_algorithm(algorithm: object) -> None:
    """Raise `UsageError` unless `algorithm` has a method ``schedule``."""
    if isinstance(algorithm, type) or not callable(getattr(algorithm, "schedule", None)):
        raise UsageError(f"algorithm={algorithm!r:.200} makes no schedules: pass an object, such as commrt.Ring()")


def check_all_reduce(algorithm: Algorithm, wire: AnyWire | None = None) -> None:
    """Raise `UsageError` for an algorithm that is no all-reduce, and for a wire that only `attach` takes."""
    check_algorithm(algorithm)
    require_compatible(algorithm, wire, ["all-reduce"])


def _check_residual(residual: Tensor | None, travels: AnyWire, tensor: Tensor) -> None:
    if is_quantized(travels):
        carrier_of(travels).check_residual(travels, residual, tensor)
    elif residual is not None:
        raise UsageError(f"{travels} with residual=a tensor: only a wire with feedback keeps one; leave it out")


def is_expanded(tensor: Tensor) -> bool:
    """Return True if several elements share one place in memory."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and not stride for size, stride in strides)


def _check_tensor(tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise UsageError(f"all_reduce() takes a tensor, not a {type(tensor).__name__}: make one with torch.tensor()")
    for is_so, complaint in (
        (type(tensor) not in (Tensor, nn.Parameter), f"is a {type(tensor).__name__}: use a plain tensor"),
        (tensor.layout != torch.strided or tensor.is_nested, f"is {tensor.layout}, or nested: use a dense copy"),
        (tensor.is_meta, "is on the meta device and has no values"),
        (tensor.is_inference(), "was made under torch.inference_mode(): clone() it outside of that"),
    ):
        if is_so:
            raise UsageError(f"all_reduce() writes to its tensor, which {complaint}")
    if is_expanded(tensor):
        raise UsageError(
            "all_reduce() writes to its tensor, of which several elements share one place: use its clone()"
        )


def _check_arithmetic(dtype: torch.dtype, op: str) -> None:
    if op not in OPS:
        raise UsageError(f'op={op!r:.80}: use "mean", as gradients are averaged, or "sum"')
    if dtype not in (*FLOATS, *INTEGERS):
        offered = ", ".join(str(one) for one in (*FLOATS, *INTEGERS))
        raise UsageError(f"all_reduce() of {dtype}: convert it to one of {offered} first")
    if dtype in INTEGERS and op == "mean":
        raise UsageError(f'the mean of {dtype} has no place in its own dtype: use op="sum", or convert it to float')


@dataclass(frozen=True, slots=True)
class _Bound:
    program: RunnableProgram
    packing: Packing


class Collectives:
    """The all-reduces of one world. The communication thread runs `_reduce_now` and all that it calls."""

    def __init__(
        self,
        transport: TransportByDevice,
        comm_thread: CommThread,
        membership: Membership,
        consistency: ConsistencyCheck,
    ) -> None:
        self._transport, self._comm_thread = transport, comm_thread
        self.membership, self._consistency = membership, consistency
        self._proven = lru_cache(KEPT)(_prove)
        self._calls = count(1)  # so that random numbers of untagged calls differ
        self._start_again()

    def all_reduce(self, call: AllReduce, recorder: Recorder | None) -> None:
        """Return when the tensor holds the result, of the ranks that are left if one is lost. Collective."""
        self._schedule(call, len(self.membership.ranks))  # its errors end nothing here
        before = call.residual.clone() if self.membership.is_elastic and call.residual is not None else None
        refusal, total = self.membership.together(lambda: self._attempt(call, recorder, before))
        if refusal is not None:
            raise refusal
        if total is not call.tensor:
            with torch.no_grad():
                call.tensor.copy_(total)

    def _attempt(
        self, call: AllReduce, recorder: Recorder | None, before: Tensor | None
    ) -> tuple[DisagreementError | None, Tensor]:
        """Reduce the tensor, or a copy where ranks may be lost: all then start again, and owe what they owed `before`.

        Return (None, the sum) or (the error that all ranks found before anything was sent, the tensor).
        """
        own = call
        if before is not None and call.residual is not None:
            call.residual.copy_(before)
        if self.membership.is_elastic:
            with torch.no_grad():
                own = replace(call, tensor=call.layout.empty(call.layout.device).copy_(call.tensor))
        try:
            self.membership.submit(lambda: self._reduce_now(own, recorder)).result()
        except DisagreementError as error:
            if self._comm_thread.failure is not None:
                raise
            return error, own.tensor  # ranks vote on it like on a sum
        return None, own.tensor

    def run(self, schedule: Schedule, buffer: Tensor, run_now: Callable[[Tensor], object]) -> None:
        """Run `schedule` on `buffer` in a world that may lose ranks: on a copy, as a lost rank may end the attempt."""
        done = self.membership.together(lambda: self._run_copy(schedule, buffer, run_now))
        if isinstance(done, CommrtError):
            raise done
        buffer.copy_(done)

    def _run_copy(
        self, schedule: Schedule, buffer: Tensor, run_now: Callable[[Tensor], object]
    ) -> Tensor | CommrtError:
        """Return the result, or an error that all ranks have alike: they vote on it as on a result."""
        try:
            self._consistency.require_present(schedule)
        except UsageError as error:
            return error
        self._consistency.require_possible(schedule, buffer)
        copy = buffer.clone()
        try:
            self.membership.submit(lambda: run_now(copy)).result()
        except (DisagreementError, UsageError) as error:
            if self._comm_thread.failure is not None:
                raise
            return error
        return copy

    def begin_all_reduce(self, call: AllReduce, recorder: Recorder | None) -> Future[None]:
        """Return at once, with the future of the result. Collective."""
        self._schedule(call, len(self.membership.ranks))  # as above
        return self._comm_thread.submit(lambda: self._reduce_now(call, recorder))

    def require_no_mismatch(self) -> None:
        """Raise `DisagreementError` if a GPU found that an earlier call was summed with a different one."""
        for call, own in self._unconfirmed:
            if own.packing.mismatched:
                raise _mismatch(call)

    def _reduce_now(self, call: AllReduce, recorder: Recorder | None) -> None:
        members = tuple(self.membership.ranks)
        if len(members) == 1:
            return
        try:
            schedule = self._schedule(call, len(members))
            numel = layout_of([call.tensor.numel()]).numel  # other sizes on other ranks would end the world
            self._consistency.require_same_buffers_now(schedule, members, numel, wire_text(call.layout.wire))
        except (UsageError, ScheduleError, DisagreementError) as refusal:  # nothing was sent
            raise RecoveredError(refusal) from refusal
        tag = call.tag
        with within_range(recorder, "sum", step=tag.step, bucket=tag.bucket, algorithm=schedule.name):
            self._run(call, schedule, members, recorder)

    def _schedule(self, call: AllReduce, members: int) -> Schedule:
        schedule = call.algorithm.schedule(0, members)
        if not isinstance(schedule, Schedule) or schedule.ranks != members:
            raise UsageError(
                f"{call.algorithm} made {schedule!r:.80} for {members} ranks, which is no schedule of them"
            )
        if is_quantized(wire := call.layout.wire):
            carrier_of(wire).require_short_sums(schedule, wire)
        return self._proven(schedule)

    def _run(self, call: AllReduce, schedule: Schedule, members: tuple[int, ...], recorder: Recorder | None) -> None:
        tensor, layout, header = call.tensor, call.layout, self._header(call, schedule)
        if self._memory_epoch != self.membership.memory_epoch:
            self._start_again()
        own = self._bound(schedule, members, layout, call.residual)
        is_dense = tensor.stride() == layout.strides and not tensor.is_neg()  # a view that is negated when read
        dense = tensor if is_dense else layout.empty(tensor.device).copy_(tensor)
        self.require_no_mismatch()
        own.packing.pack([dense], 1 / len(members) if call.op == "mean" else 1, header)
        own.program.run(call.tag, recorder)
        own.packing.unpack([dense], header)
        if own.packing.mismatched:
            raise _mismatch(call)
        if dense is not tensor:
            tensor.copy_(dense)
        if tensor.is_cuda:
            self._unconfirmed.append((call, own))
            tensor.record_stream(torch.cuda.current_stream(tensor.device))  # it may be freed on another stream

    def _header(self, call: AllReduce, schedule: Schedule) -> int:
        """Return 64 bits that show in their sum over ranks if calls differ: 32 of a checksum, and their inverse."""
        checksum = zlib.crc32(f"{call} {self._consistency.digest(schedule)}".encode())
        return checksum << 32 | ~checksum & 0xFFFFFFFF

    def _start_again(self) -> None:
        """Use new memory: after connections broke, a peer may still read what it was sent."""
        self._memory_epoch = self.membership.memory_epoch
        self._memory: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._unconfirmed: deque[tuple[AllReduce, _Bound]] = deque(maxlen=UNCONFIRMED)
        self._bound = lru_cache(KEPT)(self._bind)

    def _bind(
        self, schedule: Schedule, members: tuple[int, ...], layout: TensorLayout, residual: Tensor | None
    ) -> _Bound:
        packed = layout_of([layout.shape.numel()])
        mine = member_program(schedule, members, self._transport.rank, self._transport.ranks)
        dtype, device, quantizer = _buffer_dtype(layout), layout.device, layout.wire
        wire = self._allocate("wire", packed.numel, dtype, device)
        plain = wire[: packed.head_numel] if is_quantized(quantizer) else wire
        scratch = self._allocate("scratch", scratch_numel(mine, plain.numel()), dtype, device)
        bound = bind(mine, plain, self._transport, scratch, self._comm_thread.streams)
        packed_tensor = packing(wire, packed, [layout.empty("meta")])
        if not is_quantized(quantizer):
            return _Bound(bound, packed_tensor)
        values = wire[packed.head_numel :][: layout.shape.numel()]
        allocate = partial(self._allocate_bytes, device)
        (program,) = carrier_of(quantizer).bind_values(
            mine, quantizer, [ValuesOnWire(bound, values, residual)], self._transport, allocate, self._calls
        )
        return _Bound(program, packed_tensor)

    def _allocate_bytes(self, device: torch.device, use: str, nbytes: int) -> Tensor:
        return self._allocate(use, nbytes, torch.uint8, device)

    def _allocate(self, use: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return [numel] of the one piece of memory for this `use`; its old contents stay, and nobody reads them."""
        key = use, dtype, device
        if key not in self._memory or self._memory[key].numel() < numel:
            self._bound.cache_clear()  # it would keep the smaller one
            self._memory[key] = self._transport.allocate(numel, dtype, device)
        return self._memory[key][:numel]


def _buffer_dtype(layout: TensorLayout) -> torch.dtype:
    """Return the dtype of the wire buffer: values that are quantized are added in fp32."""
    return torch.float32 if is_quantized(layout.wire) else cast("torch.dtype", layout.wire)


def _prove(schedule: Schedule) -> Schedule:
    prove(schedule, all_reduce(schedule.ranks, schedule.chunks))
    return schedule


def _mismatch(call: AllReduce) -> DisagreementError:
    return DisagreementError(
        f"all_reduce() of {call}: another rank came with another op, shape, layout in memory, dtype, wire, algorithm "
        "or tag; make the same calls in the same order on every rank"
    )
