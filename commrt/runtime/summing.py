# SPDX-License-Identifier: Apache-2.0
"""Sums and means of tensors of any size over all ranks, along an algorithm's schedule.

They travel one at a time, so one wire buffer serves all: as large as the largest so far, not as all of them together.
Where a rank may be lost meanwhile, the tensor is written to when all have its sum: until then they may begin anew.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from commrt.algorithms.backup import BackupWorkers
from commrt.algorithms.gossip import Gossip
from commrt.collective import all_reduce
from commrt.errors import CommrtError, DisagreementError, ScheduleError, UsageError
from commrt.kernels.dispatch import GPU_DTYPES, packing
from commrt.kernels.layout import layout_of
from commrt.kernels.packing import Packing, TorchPacking
from commrt.model.admission import check_algorithm, check_wire
from commrt.program import among
from commrt.proving.proof import prove
from commrt.recording import Recorder, within_range
from commrt.runtime.comparison import Comparison
from commrt.runtime.elastic import Elastic
from commrt.runtime.executor import BoundProgram, bind, scratch_numel
from commrt.schedule import Algorithm, Schedule
from commrt.threads.lane import Lane, Result
from commrt.transport.media import Media
from commrt.transport.protocol import Moment
from commrt.wire.buckets import is_expanded
from commrt.wire.stamp import sealed

__all__ = ["Sum", "Summing", "check_all_reduce", "checked", "require_moment"]

KEPT = 256
"""Bound programs, of the tensors seen last."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32)
"""In narrower ones flags of many ranks would overflow."""
OPS = ("mean", "sum")
UNCONFIRMED = 64
"""Latest calls on a GPU whose stamps may still come to light as disputed."""


@dataclass(frozen=True, slots=True)
class Kind:
    """All that matters of a tensor but its values and its place; equal on all ranks."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    wire: torch.dtype
    """What travels."""
    device: torch.device

    def __str__(self) -> str:
        """What must be the same on all ranks: strides as far as they matter."""
        strides = [stride if size > 1 else 0 for size, stride in zip(self.shape, self.strides, strict=True)]
        dtypes = " as ".join(str(one)[6:] for one in dict.fromkeys((self.dtype, self.wire)))
        return f"{dtypes}{list(self.shape)} with strides {strides}"

    def empty(self, device: torch.device | str) -> Tensor:
        """A tensor of this kind."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Sum:
    """One call, checked."""

    tensor: Tensor
    kind: Kind
    op: str
    algorithm: Algorithm
    moment: Moment
    """When it happens, for errors and traces; the same on all ranks."""

    def scale(self, members: int) -> float:
        """By which each rank's values count."""
        return 1 / members if self.op == "mean" else 1  # an integer, for integers

    def __str__(self) -> str:
        return f"the {self.op} of {self.kind}, at step {self.moment.step}, as {self.moment.bucket}"


def checked(tensor: Tensor, op: str, algorithm: Algorithm, wire: torch.dtype | None, moment: Moment) -> Sum:
    """The `Sum` of these; raises `UsageError` for what cannot be summed."""
    _check_tensor(tensor)
    _check_arithmetic(tensor.dtype, op)
    check_wire(wire)
    check_all_reduce(algorithm)
    require_moment(moment)
    narrower = wire is not None and tensor.is_floating_point() and wire.itemsize < tensor.dtype.itemsize
    travels = wire if wire is not None and narrower else tensor.dtype
    like = torch.empty_like(tensor, device="meta")  # has the strides of a dense tensor, and makes others dense
    kind = Kind(like.shape, like.stride(), like.dtype, travels, tensor.device)
    return Sum(tensor, kind, op, algorithm, moment)


def require_moment(moment: Moment) -> None:
    """Raise `UsageError` for anything else."""
    if not isinstance(moment, Moment):
        raise UsageError(f"moment={moment!r:.80}: give a commrt.Moment(step, bucket), or leave it out")


def check_all_reduce(algorithm: Algorithm) -> None:
    """Raise `UsageError` for an algorithm that is known to be no all-reduce."""
    check_algorithm(algorithm)
    if isinstance(algorithm, Gossip | BackupWorkers):
        raise UsageError(
            f"algorithm={algorithm!r} is no all-reduce, in which every rank takes part: use Torus2D(), Ring() or "
            "HalvingDoubling() here, and attach() for gossip and backup workers"
        )


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
    program: BoundProgram
    packing: Packing


class Summing:
    """Of one world; `checked` calls in, sums out. What `_carry` and what it calls do happens on the lane."""

    def __init__(self, transport: Media, lane: Lane, elastic: Elastic, comparison: Comparison) -> None:
        self._transport, self._lane, self._elastic, self._comparison = transport, lane, elastic, comparison
        self._proven = lru_cache(KEPT)(_proven)
        self._begin_anew()

    def now(self, call: Sum, recorder: Recorder | None) -> None:
        """Return when the tensor holds the result, of those who are left if a rank is lost; collective."""
        self._look_ahead(call)
        refusal, total = self._elastic.together(lambda: self._attempt(call, recorder))
        if refusal is not None:
            raise refusal
        if total is not call.tensor:
            with torch.no_grad():
                call.tensor.copy_(total)

    def _attempt(self, call: Sum, recorder: Recorder | None) -> tuple[CommrtError | None, Tensor]:
        """On a copy, where who has its sum may learn that another lost a rank, and that all do it again."""
        own = call
        if self._elastic.is_elastic:
            with torch.no_grad():
                own = replace(call, tensor=call.kind.empty(call.kind.device).copy_(call.tensor))
        refusal = self._elastic.submit(lambda: self._carry(own, recorder)).result()
        if refusal is not None and not isinstance(refusal, DisagreementError):
            raise refusal  # of this rank alone, perhaps: no end that all could have come to
        return refusal, own.tensor

    def begin(self, call: Sum, recorder: Recorder | None) -> Result[CommrtError | None]:
        """Return at once; the answer may be an error after which the world goes on. Collective."""
        self._look_ahead(call)
        return self._lane.submit(lambda: self._carry(call, recorder))

    def _look_ahead(self, call: Sum) -> None:
        """Raise what the algorithm does wrong here, where it ends nothing."""
        self._schedule(call, len(self._elastic.generation.ranks))

    def require_agreement(self) -> None:
        """Raise `DisagreementError` if a GPU has found out that an earlier call was summed with another one."""
        for call, own in self._unconfirmed:
            if own.packing.disputed:
                raise _dispute(call)

    def _carry(self, call: Sum, recorder: Recorder | None) -> CommrtError | None:
        members = tuple(self._elastic.generation.ranks)
        if len(members) == 1:
            return None
        try:
            schedule = self._schedule(call, len(members))
            self._require_same(call, schedule, members)
        except (UsageError, ScheduleError, DisagreementError) as refusal:
            return refusal
        place = call.moment
        with within_range(recorder, "sum", step=place.step, bucket=place.bucket, algorithm=schedule.name):
            self._sum(call, schedule, members, recorder)
        return None

    def _schedule(self, call: Sum, members: int) -> Schedule:
        schedule = call.algorithm.schedule(0, members)
        if not isinstance(schedule, Schedule) or schedule.ranks != members:
            raise UsageError(
                f"{call.algorithm} made {schedule!r:.80} for {members} ranks, which is no schedule of them"
            )
        return self._proven(schedule)

    def _require_same(self, call: Sum, schedule: Schedule, members: tuple[int, ...]) -> None:
        """Sizes that differ would end the world."""
        numel, generation = layout_of([call.tensor.numel()]).numel, self._elastic.generation.number
        self._comparison.require_same_buffers_now(schedule, members, numel, call.kind.wire, generation)

    def _sum(self, call: Sum, schedule: Schedule, members: tuple[int, ...], recorder: Recorder | None) -> None:
        tensor, seal = call.tensor, self._seal(call, schedule)
        own = self._ready(schedule, members, call.kind)
        is_dense = tensor.stride() == call.kind.strides and not tensor.is_neg()  # a view that is negated when read
        dense = tensor if is_dense else call.kind.empty(tensor.device).copy_(tensor)
        self.require_agreement()
        own.packing.pack([dense], call.scale(len(members)), seal)
        own.program.run(call.moment, recorder)
        own.packing.unpack([dense], seal)
        if own.packing.disputed:
            raise _dispute(call)
        if dense is not tensor:
            tensor.copy_(dense)
        if tensor.is_cuda:
            self._unconfirmed.append((call, own))
            tensor.record_stream(torch.cuda.current_stream(tensor.device))  # it is perhaps freed on another

    def _seal(self, call: Sum, schedule: Schedule) -> int:
        """A stamp that differs where ranks would add up different things."""
        return sealed(zlib.crc32(f"{call} {self._comparison.digest(schedule)}".encode()))

    def _ready(self, schedule: Schedule, members: tuple[int, ...], kind: Kind) -> _Bound:
        if self._room != self._elastic.room:
            self._begin_anew()
        return self._bound(schedule, members, kind)

    def _begin_anew(self) -> None:
        """Connections were broken, and a broken peer may still read what it was sent."""
        self._room = self._elastic.room
        self._memory: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._unconfirmed: deque[tuple[Sum, _Bound]] = deque(maxlen=UNCONFIRMED)
        self._bound = lru_cache(KEPT)(self._bind)

    def _bind(self, schedule: Schedule, members: tuple[int, ...], kind: Kind) -> _Bound:
        """What lies between tensors on the wire is whatever was there before; nobody reads it."""
        layout = layout_of([kind.shape.numel()])
        mine = among(schedule, members, self._transport.rank, self._transport.ranks)
        wire = self._place("wire", layout.numel, kind)
        scratch = self._place("scratch", scratch_numel(mine, layout.numel), kind)
        bound = bind(mine, wire, self._transport, scratch, self._lane.streams)
        pack = packing if kind.dtype in GPU_DTYPES else TorchPacking  # the kernels are not made for integers
        return _Bound(bound, pack(wire, layout, [kind.empty("meta")]))

    def _place(self, use: str, numel: int, kind: Kind) -> Tensor:
        """[numel] in the one piece of memory for this `use`."""
        key = use, kind.wire, kind.device
        if key not in self._memory or self._memory[key].numel() < numel:
            self._bound.cache_clear()  # it would keep the smaller one
            self._memory[key] = self._transport.allocate(numel, kind.wire, kind.device)
        return self._memory[key][:numel]


def _proven(schedule: Schedule) -> Schedule:
    prove(schedule, all_reduce(schedule.ranks, schedule.chunks))
    return schedule


def _dispute(call: Sum) -> DisagreementError:
    return DisagreementError(
        f"all_reduce() of {call}: another rank came with another op, shape, layout in memory, dtype, wire, algorithm "
        "or moment; make the same calls in the same order on every rank"
    )
