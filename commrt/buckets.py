# SPDX-License-Identifier: Apache-2.0
"""Parameters -> buckets -> wire buffers.

Buckets are filled in the order in which gradients become ready. A wire buffer holds the gradients of its bucket
one after the other, in the dtype that travels; then one flag per gradient, 1 if this rank had it, 0 if it sent
zeros instead; then a stamp. Flags and stamp are summed with the rest, so after the reduction each rank knows which
gradients somebody had, and that all ranks sent the same bucket of the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from commrt.errors import DisagreementError, UsageError
from commrt.kernels.pack import pack
from commrt.kernels.unpack import unpack
from commrt.stamp import STAMP_NUMEL, Claim, complaint, stamp
from commrt.transport.protocol import Allocate, zeros

__all__ = ["MIB", "Bucket", "Named", "Unit", "build_buckets", "is_expanded", "plan_buckets"]

MIB = 1 << 20

CHANGED = (
    "the gradient of {name} was changed, replaced or removed while it was being averaged: change gradients, "
    "and step or zero them, only after backward() has returned (hooks that change them: register these before attach())"
)

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
    """Parameters whose gradients travel together.

    A step of a bucket is `take`, on the thread that ran the backward pass; `pack` and `unpack`, on the lane; and
    `settle`, on the first thread again. In between nobody else may touch the gradients, and who does is found out.
    """

    index: int
    params: Sequence[Named]
    wire: Tensor
    """[numel + len(params) + STAMP_NUMEL] gradients, flags, stamp."""
    model: int
    """Which of the models attached to one world this is."""
    views: list[Tensor] = field(init=False)
    """The gradients' places in `wire`, in the parameters' shapes."""
    flags: Tensor = field(init=False)
    """[len(params)] a view of `wire`."""
    stamp: Tensor = field(init=False)
    """[STAMP_NUMEL] a view of `wire`; see `commrt.stamp`."""
    _claim: Claim = field(init=False)
    _grads: list[Tensor | None] = field(init=False)
    """The gradients on their way."""
    _made: dict[int, Tensor] = field(init=False)
    """Those that only other ranks had, by place."""
    _versions: list[int] = field(init=False)
    """How often each of them has been written to, if only we did."""
    _own_stamp: Tensor = field(init=False)

    def __post_init__(self) -> None:
        sizes = [param.numel() for _, param in self.params]
        *places, self.flags, self.stamp = torch.split(self.wire, [*sizes, len(sizes), STAMP_NUMEL])
        self.views = [place.view(param.shape) for place, (_, param) in zip(places, self.params, strict=True)]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in wire order."""
        return tuple(name for name, _ in self.params)

    def layout(self) -> str:
        """All that must agree between ranks, as text."""
        shapes = (f"{name} {str(param.dtype)[6:]}{list(param.shape)}" for name, param in self.params)
        return f"bucket {self.index} ({str(self.wire.dtype)[6:]}): {', '.join(shapes)}"

    def take(self, claim: Claim, is_ready: Callable[[str], bool]) -> None:
        """Hold on to the gradients at hand, to be sent with `claim`.

        Raises `UsageError` for one that does not fit, or that `is_ready` knows and that has gone since.
        """
        self._claim, self._own_stamp, self._made = claim, stamp(claim), {}
        self._grads = [param.grad for _, param in self.params]
        for view, name, grad in zip(self.views, self.names, self._grads, strict=True):
            if grad is not None:
                _require_fit(name, grad, view)
            elif is_ready(name):
                raise UsageError(CHANGED.format(name=name))
        self._versions = _versions(self._grads)

    def pack(self, scale: float) -> None:
        """Gradients times `scale` into the wire buffer, zeros for those that are None."""
        self._require_unchanged()
        sources = [grad for grad in self._grads if grad is not None]
        pack(sources, [view for view, grad in zip(self.views, self._grads, strict=True) if grad is not None], scale)
        self.flags.fill_(1)
        for i in (i for i, grad in enumerate(self._grads) if grad is None):
            self.views[i].zero_()
            self.flags[i] = 0
        self.stamp.copy_(self._own_stamp)

    def unpack(self) -> None:
        """The wire buffer into the gradients; one that no rank had stays None.

        Raises `DisagreementError`, before it writes, if ranks sent different things.
        """
        if not torch.equal(self.stamp != 0, self._own_stamp):
            why = complaint(self.stamp)
            raise DisagreementError(f"bucket {self.index} was summed with something else: {why}")
        self._require_unchanged()
        missing = [i for i, grad in enumerate(self._grads) if grad is None]
        elsewhere = self.flags.tolist() if missing else []
        self._made = {i: torch.empty_like(self.params[i][1]) for i in missing if elsewhere[i]}
        places = [
            (view, self._made.get(i, grad)) for i, (view, grad) in enumerate(zip(self.views, self._grads, strict=True))
        ]
        pairs = [(view, grad) for view, grad in places if grad is not None]
        unpack([view for view, _ in pairs], [grad for _, grad in pairs])
        self._versions = [version + 1 if version >= 0 else -1 for version in self._versions]

    def settle(self) -> None:
        """Give the parameters what has arrived; raises `UsageError` if somebody was at the gradients meanwhile."""
        self._require_unchanged()
        for (name, param), grad in zip(self.params, self._grads, strict=True):
            if param.grad is not grad:
                raise UsageError(CHANGED.format(name=name))
        for i, made in self._made.items():
            self.params[i][1].grad = made
        self._grads, self._made, self._versions = [], {}, []  # or they would live until the next step

    def _require_unchanged(self) -> None:
        now = _versions(self._grads)
        if now != self._versions:
            changed = next(i for i, version in enumerate(now) if version != self._versions[i])
            raise UsageError(CHANGED.format(name=self.names[changed]))


def _versions(grads: Sequence[Tensor | None]) -> list[int]:
    """-1 for None, and for views: all views of a tensor count together."""
    return [-1 if grad is None or grad._base is not None else grad._version for grad in grads]  # noqa: SLF001  # nothing else tells


def _require_fit(name: str, grad: Tensor, view: Tensor) -> None:
    """A tensor of another shape would be written over its neighbours' places."""
    if grad.shape != view.shape:
        raise UsageError(
            f"the gradient of {name} has shape {list(grad.shape)}, but {list(view.shape)} when the model "
            "was attached: detach() and attach() again after changing parameters"
        )
    if grad.is_inference():
        raise UsageError(f"the gradient of {name} was made under torch.inference_mode(): use torch.no_grad() there")
    if not grad.is_contiguous() and is_expanded(grad):
        raise UsageError(f"the gradient of {name} is expanded, several elements share one place: use its .clone()")


def is_expanded(tensor: Tensor) -> bool:
    """True if several elements share one place in memory."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


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
    numel = sum(param.numel() for _, param in params) + len(params) + STAMP_NUMEL
    dtype = wire if wire is not None and wire.itemsize < first.element_size() else first.dtype
    return allocate(numel, dtype, first.device)
