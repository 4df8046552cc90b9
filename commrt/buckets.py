# SPDX-License-Identifier: Apache-2.0
"""Parameters -> buckets -> wire buffers.

Buckets are filled in reverse order of registration, which is about the order in which gradients become ready.
A wire buffer holds the gradients of its bucket one after the other, in the dtype that travels, then one flag
per gradient: 1 if this rank had it, 0 if it sent zeros instead. The flags are summed with the rest, so after
the reduction each rank knows which gradients somebody had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from commrt.errors import UsageError
from commrt.kernels.pack import pack
from commrt.kernels.unpack import unpack
from commrt.transport.protocol import Allocate, zeros

__all__ = ["MIB", "Bucket", "Named", "Unit", "build_buckets", "plan_buckets"]

MIB = 1 << 20

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True, slots=True)
class Unit:
    """What planning knows of a parameter."""

    name: str
    nbytes: int
    dtype: torch.dtype


def plan_buckets(units: Sequence[Unit], cap_nbytes: int, first_cap_nbytes: int) -> list[list[int]]:
    """Group `units` (in order of readiness) into buckets of one dtype; a bucket closes when it reaches the cap.

    The first bucket of each dtype closes at `first_cap_nbytes`, so that communication starts early. Buckets
    are ordered by when their last member becomes ready.

    >>> units = [Unit(name, 6, torch.float32) for name in "abcde"]
    >>> plan_buckets(units, cap_nbytes=12, first_cap_nbytes=1)
    [[0], [1, 2], [3, 4]]
    """
    closed: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    room: dict[torch.dtype, int] = {}
    for index, unit in enumerate(units):
        filling.setdefault(unit.dtype, []).append(index)
        room[unit.dtype] = room.get(unit.dtype, first_cap_nbytes) - unit.nbytes
        if room[unit.dtype] <= 0:
            closed.append(filling.pop(unit.dtype))
            room[unit.dtype] = cap_nbytes
    return sorted([*closed, *filling.values()], key=lambda members: members[-1])


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters whose gradients travel together."""

    index: int
    params: Sequence[Named]
    wire: Tensor
    """[numel + len(params)] gradients, then flags."""
    views: list[Tensor] = field(init=False)
    """The gradients' places in `wire`, in the parameters' shapes."""
    flags: Tensor = field(init=False)
    """[len(params)] a view of `wire`."""

    def __post_init__(self) -> None:
        sizes = [param.numel() for _, param in self.params]
        *places, self.flags = torch.split(self.wire, [*sizes, len(sizes)])
        self.views = [place.view(param.shape) for place, (_, param) in zip(places, self.params, strict=True)]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in wire order."""
        return tuple(name for name, _ in self.params)

    def layout(self) -> str:
        """All that must agree between ranks, as text."""
        shapes = (f"{name} {str(param.dtype)[6:]}{list(param.shape)}" for name, param in self.params)
        return f"bucket {self.index} ({str(self.wire.dtype)[6:]}): {', '.join(shapes)}"

    def pack(self, scale: float) -> None:
        """Gradients times `scale` into the wire buffer, zeros for those that are None."""
        had = [param.grad is not None for _, param in self.params]
        sources = [param.grad for _, param in self.params if param.grad is not None]
        pack(sources, [view for view, there in zip(self.views, had, strict=True) if there], scale)
        self.flags.fill_(1)
        for i in (i for i, there in enumerate(had) if not there):
            self.views[i].zero_()
            self.flags[i] = 0

    def unpack(self) -> None:
        """The wire buffer into the gradients; one that no rank had stays None."""
        missing = [i for i, (_, param) in enumerate(self.params) if param.grad is None]
        elsewhere = self.flags.tolist() if missing else []
        for i in (i for i in missing if elsewhere[i]):
            param = self.params[i][1]
            param.grad = torch.empty_like(param)
        kept = [(view, param.grad) for view, (_, param) in zip(self.views, self.params, strict=True)]
        pairs = [(view, grad) for view, grad in kept if grad is not None]
        unpack([view for view, _ in pairs], [grad for _, grad in pairs])


def build_buckets(
    params: Sequence[Named],
    wire: torch.dtype | None,
    cap_nbytes: int,
    first_cap_nbytes: int = MIB,
    allocate: Allocate = zeros,
) -> list[Bucket]:
    """Buckets with their wire buffers, made by `allocate`, for `params`, given in order of registration."""
    first_cap_nbytes = min(first_cap_nbytes, cap_nbytes)
    ready = list(reversed(params))
    units = [Unit(name, param.numel() * param.element_size(), param.dtype) for name, param in ready]
    plan = plan_buckets(units, cap_nbytes, first_cap_nbytes)
    return [_bucket(index, [ready[i] for i in members], wire, allocate) for index, members in enumerate(plan)]


def check_params(params: Iterable[Named]) -> None:
    """Raise `UsageError` for parameters whose gradients cannot travel."""
    devices: dict[torch.device, str] = {}
    for name, param in params:
        devices.setdefault(param.device, name)
        if not param.dtype.is_floating_point:
            raise UsageError(f"{name} is of dtype {param.dtype}: only real floating-point gradients can be averaged")
        if param.layout != torch.strided:
            raise UsageError(f"{name} has layout {param.layout}: only dense parameters can be averaged")
    if not devices:
        raise UsageError("the model has no parameter that requires a gradient: there is nothing to average")
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise UsageError(f"the parameters lie on different devices ({where}): move the model to one device")


def _bucket(index: int, params: list[Named], wire: torch.dtype | None, allocate: Allocate) -> Bucket:
    first = params[0][1]
    numel = sum(param.numel() for _, param in params) + len(params)
    dtype = wire if wire is not None and wire.itemsize < first.element_size() else first.dtype
    return Bucket(index, params, allocate(numel, dtype, first.device))
