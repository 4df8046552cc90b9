# SPDX-License-Identifier: Apache-2.0
"""Sums and means of tensors of any size over all ranks, along an algorithm's schedule.

They travel one at a time, so one wire buffer serves all: as large as the largest so far, not as all of them together.
The tensor is written to when its sum is whole, so that after the loss of a rank the others can begin anew.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from commrt.admission import check_wire
from commrt.algorithms.backup import BackupWorkers
from commrt.algorithms.gossip import Gossip
from commrt.buckets import is_expanded
from commrt.collective import all_reduce
from commrt.comparison import Comparison
from commrt.errors import DisagreementError, UsageError
from commrt.executor import BoundProgram, bind, scratch_numel
from commrt.kernels.dispatch import GPU_DTYPES, packing
from commrt.kernels.layout import layout_of
from commrt.kernels.packing import Packing, TorchPacking
from commrt.lane import Lane, Result
from commrt.program import among
from commrt.proof import prove
from commrt.recording import Recorder, within_range
from commrt.schedule import Algorithm, Schedule
from commrt.stamp import sealed
from commrt.survival import Survival
from commrt.transport.media import Media
from commrt.transport.protocol import Moment

__all__ = ["Sum", "Summing", "check_algorithm", "checked"]

KEPT = 256
"""Bound programs, of the tensors seen last."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32)
"""In narrower ones flags of many ranks would overflow."""
OPS = ("mean", "sum")


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
        return f"{str(self.dtype)[6:]}{list(self.shape)} with strides {list(self.strides)}"

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

    def scale(self, members: int) -> float:
        """By which each rank's values count."""
        return 1 / members if self.op == "mean" else 1  # an integer, for integers

    @property
    def text(self) -> str:
        """What must be the same on all ranks."""
        return f"the {self.op} of {self.kind}"

    @property
    def seal(self) -> int:
        """`text` as a stamp."""
        return sealed(zlib.crc32(self.text.encode()))


def checked(tensor: Tensor, op: str, algorithm: Algorithm, wire: torch.dtype | None) -> Sum:
    """The `Sum` of these; raises `UsageError` for what cannot be summed."""
    _check_tensor(tensor)
    _check_arithmetic(tensor.dtype, op)
    check_wire(wire)
    check_algorithm(algorithm)
    narrower = wire is not None and tensor.is_floating_point() and wire.itemsize < tensor.dtype.itemsize
    travels = wire if wire is not None and narrower else tensor.dtype
    like = torch.empty_like(tensor, device="meta")  # has the strides of a dense tensor, and makes others dense
    return Sum(tensor, Kind(like.shape, like.stride(), like.dtype, travels, tensor.device), op, algorithm)


def check_algorithm(algorithm: Algorithm) -> None:
    """Raise `UsageError` for one that is known to be no all-reduce."""
    if isinstance(algorithm, Gossip | BackupWorkers) or not hasattr(algorithm, "schedule"):
        raise UsageError(
            f"algorithm={algorithm!r} is no all-reduce, in which every rank takes part: use Torus2D(), Ring() or "
            "HalvingDoubling() here, and attach() for gossip and backup workers"
        )


def _check_tensor(tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise UsageError(f"all_reduce() takes a tensor, not a {type(tensor).__name__}: make one with torch.tensor()")
    complaint = (
        f"is {tensor.layout}: use its to_dense()"
        if tensor.layout != torch.strided
        else "is on the meta device and has no values"
        if tensor.is_meta
        else "is expanded, several elements share one place in memory: use its clone()"
        if is_expanded(tensor)
        else "was made under torch.inference_mode(): use its clone()"
        if tensor.is_inference()
        else None
    )
    if complaint:
        raise UsageError(f"all_reduce() writes to its tensor, which {complaint}")


def _check_arithmetic(dtype: torch.dtype, op: str) -> None:
    if op not in OPS:
        raise UsageError(f'op={op!r}: use "mean", as gradients are averaged, or "sum"')
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
    """Of one world; `checked` calls in, sums out."""

    def __init__(self, transport: Media, lane: Lane, survival: Survival, comparison: Comparison) -> None:
        self._transport, self._lane, self._survival, self._comparison = transport, lane, survival, comparison
        self._proven = lru_cache(KEPT)(_proven)
        self._begin_anew()

    def now(self, call: Sum, moment: Moment, recorder: Recorder | None) -> None:
        """Return when the tensor holds the result, of those who are left if a rank is lost; collective."""

        def attempt() -> None:
            self._survival.submit(self._prepared(call, moment, recorder)).result()

        self._survival.together(attempt)

    def begin(self, call: Sum, moment: Moment, recorder: Recorder | None) -> Result[None]:
        """Return at once, after the first call of its kind; collective."""
        return self._lane.submit(self._prepared(call, moment, recorder))

    def _prepared(self, call: Sum, moment: Moment, recorder: Recorder | None) -> Callable[[], None]:
        """A task for the lane: this rank and the others mean the same, as far as can be told before it is run."""
        members = tuple(self._survival.membership.members)
        schedule = self._proven(call.algorithm.schedule(0, len(members)))
        wire, kind = layout_of([call.tensor.numel()]).numel, call.kind
        self._comparison.require_same(schedule, members, wire, kind.wire, self._survival.generation)

        def carry() -> None:
            if len(members) > 1:
                with within_range(recorder, "sum", step=moment.step, bucket=moment.bucket, algorithm=schedule.name):
                    self._carry(call, self._ready(schedule, members, kind), moment, recorder)

        return carry

    def _carry(self, call: Sum, own: _Bound, moment: Moment, recorder: Recorder | None) -> None:
        tensor = call.tensor
        dense = tensor if tensor.stride() == call.kind.strides else call.kind.empty(tensor.device).copy_(tensor)
        own.packing.pack([dense], call.scale(len(self._survival.membership.members)), call.seal)
        own.program.run(moment, recorder)
        own.packing.unpack([dense], call.seal)
        if own.packing.disputed:  # on a GPU of an earlier call
            raise DisagreementError(
                f"all_reduce() of {call.text}: another rank came with another op, shape, layout in memory or dtype; "
                "make the same calls in the same order on every rank"
            )
        if dense is not tensor:
            tensor.copy_(dense)
        if tensor.is_cuda:  # used on this stream, and perhaps freed on another
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def _ready(self, schedule: Schedule, members: tuple[int, ...], kind: Kind) -> _Bound:
        if self._room != self._survival.room:
            self._begin_anew()
        return self._bound(schedule, members, kind)

    def _begin_anew(self) -> None:
        """Connections were broken, and a broken peer may still read what it was sent."""
        self._room = self._survival.room
        self._memory: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
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
