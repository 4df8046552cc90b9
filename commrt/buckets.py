# SPDX-License-Identifier: Apache-2.0
"""Parameters -> buckets -> wire buffers.

Buckets are filled in the order in which gradients become ready. A wire buffer holds the gradients of its bucket
one after the other, in the dtype that travels; then one flag per gradient, 1 if this rank had it, 0 if it sent
zeros instead; then a stamp. Flags and stamp are summed with the rest, so after the reduction each rank knows which
gradients somebody had, and that all ranks sent gradients of the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from commrt.errors import DisagreementError, UsageError
from commrt.kernels.pack import pack
from commrt.kernels.unpack import unpack
from commrt.transport.protocol import Allocate, zeros

__all__ = ["MIB", "Bucket", "Named", "Unit", "build_buckets", "plan_buckets"]

MIB = 1 << 20

STAMP_BITS = 4
"""Up to 16 models of one world are told apart."""

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
    """[numel + len(params) + 2 * STAMP_BITS] gradients, flags, stamp."""
    model: int
    """Which of the models attached to one world this is."""
    views: list[Tensor] = field(init=False)
    """The gradients' places in `wire`, in the parameters' shapes."""
    flags: Tensor = field(init=False)
    """[len(params)] a view of `wire`."""
    stamp: Tensor = field(init=False)
    """[2 * STAMP_BITS] a view of `wire`: two places per bit of `model`, one of them 1; no sum hides a difference."""
    own_stamp: Tensor = field(init=False)
    """[2 * STAMP_BITS] which places of `stamp` are not 0 if all ranks sent this model's gradients."""

    def __post_init__(self) -> None:
        sizes = [param.numel() for _, param in self.params]
        *places, self.flags, self.stamp = torch.split(self.wire, [*sizes, len(sizes), 2 * STAMP_BITS])
        self.views = [place.view(param.shape) for place, (_, param) in zip(places, self.params, strict=True)]
        bits = [(self.model >> i) & 1 for i in range(STAMP_BITS)]
        self.own_stamp = torch.tensor([place == bit for bit in bits for place in (0, 1)], device=self.wire.device)

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
        self._require_shapes()
        sources = [param.grad for _, param in self.params if param.grad is not None]
        pack(sources, [view for view, there in zip(self.views, had, strict=True) if there], scale)
        self.flags.fill_(1)
        for i in (i for i, there in enumerate(had) if not there):
            self.views[i].zero_()
            self.flags[i] = 0
        self.stamp.copy_(self.own_stamp)

    def unpack(self) -> None:
        """The wire buffer into the gradients; one that no rank had stays None.

        Raises `DisagreementError`, before it writes, if ranks sent the gradients of different models.
        """
        if not torch.equal(self.stamp != 0, self.own_stamp):
            raise DisagreementError(
                f"bucket {self.index} of this model was summed with another model's: the ranks call backward() of the "
                "models attached to one world in different orders; use one order everywhere, or a world per model"
            )
        missing = [i for i, (_, param) in enumerate(self.params) if param.grad is None]
        elsewhere = self.flags.tolist() if missing else []
        for i in (i for i in missing if elsewhere[i]):
            param = self.params[i][1]
            param.grad = torch.empty_like(param)
        kept = [(view, param.grad) for view, (_, param) in zip(self.views, self.params, strict=True)]
        pairs = [(view, grad) for view, grad in kept if grad is not None]
        unpack([view for view, _ in pairs], [grad for _, grad in pairs])

    def _require_shapes(self) -> None:
        """A tensor of another shape would be written over its neighbours' places."""
        for view, (name, param) in zip(self.views, self.params, strict=True):
            if param.grad is not None and param.grad.shape != view.shape:
                raise UsageError(
                    f"the gradient of {name} has shape {list(param.grad.shape)}, but {list(view.shape)} when the model "
                    "was attached: detach() and attach() again after changing parameters"
                )


def build_buckets(
    params: Sequence[Named],
    wire: torch.dtype | None,
    cap_nbytes: int,
    model: int = 0,
    first_cap_nbytes: int = MIB,
    allocate: Allocate = zeros,
) -> list[Bucket]:
    """Buckets for `params`, given in the order in which gradients become ready; wire buffers are made by `allocate`."""
    first_cap_nbytes = min(first_cap_nbytes, cap_nbytes)
    units = [Unit(name, param.numel() * param.element_size(), param.dtype) for name, param in params]
    plan = plan_buckets(units, cap_nbytes, first_cap_nbytes)
    members = ([params[i] for i in group] for group in plan)
    return [Bucket(index, named, _wire(named, wire, allocate), model) for index, named in enumerate(members)]


def _wire(params: list[Named], wire: torch.dtype | None, allocate: Allocate) -> Tensor:
    first = params[0][1]
    numel = sum(param.numel() for _, param in params) + len(params) + 2 * STAMP_BITS
    dtype = wire if wire is not None and wire.itemsize < first.element_size() else first.dtype
    return allocate(numel, dtype, first.device)
