# SPDX-License-Identifier: Apache-2.0
"""Parameters -> buckets -> wire buffers.

Buckets are filled in the order in which gradients become ready. A wire buffer begins with a stamp and one flag per
gradient, 1 if this rank had it, 0 if it sent zeros instead; then come the gradients, in the dtype that travels. Stamp
and flags are summed with the rest, so after the reduction each rank knows that all ranks sent the same bucket of the
same step, and which gradients somebody had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor, nn

from commrt.errors import DisagreementError, UsageError
from commrt.kernels.dispatch import packing, repeatable
from commrt.kernels.layout import Layout, layout_of
from commrt.kernels.packing import Packing, Repeatable
from commrt.transport.protocol import Allocate, zeros
from commrt.wire.apart import Apart
from commrt.wire.stamp import Claim, complaint, stamp

__all__ = ["MIB", "Bucket", "Named", "Unit", "build_buckets", "gradient_dtype", "is_expanded", "plan_buckets"]

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
    layout: Layout
    """Where stamp, flags and gradients lie in `wire`."""
    wire: Tensor
    """[layout.numel] in the dtype that travels."""
    model: int
    """Which of the models attached to one world this is."""
    apart: Apart = field(default_factory=Apart)
    """What all buckets of the model have taken."""
    _like: list[Tensor] = field(init=False)
    """Tensors without memory that have the gradients' dtypes, shapes and strides."""
    _kinds: list[_Kind] = field(init=False)
    """These three of each."""
    _nbytes: list[int] = field(init=False)
    _packing: Packing = field(init=False)
    repeatable: Repeatable | None = field(init=False)
    """Launches that a device can remember; None on a CPU."""
    _stamp: int = field(init=False)
    """What the wire must show after the reduction."""
    _grads: list[Tensor | None] = field(init=False)
    """The gradients on their way."""
    _made: dict[int, Tensor] = field(init=False)
    """Those that only other ranks had, by place."""
    _versions: list[int] = field(init=False)
    """How often each of them has been written to, if only we did."""

    def __post_init__(self) -> None:
        self._like = [torch.empty_like(param, dtype=gradient_dtype(param), device="meta") for _, param in self.params]
        self._kinds = [_kind(like) for like in self._like]
        self._nbytes = [like.nbytes for like in self._like]
        self._packing = packing(self.wire, self.layout, self._like)
        self.repeatable = repeatable(self._packing)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in wire order."""
        return tuple(name for name, _ in self.params)

    def description(self) -> str:
        """All that must agree between ranks, as text."""
        shapes = (f"{name} {kind}" for name, kind in zip(self.names, self._kinds, strict=True))
        return f"bucket {self.index} ({str(self.wire.dtype)[6:]}): {', '.join(shapes)}"

    def take(self, claim: Claim, is_ready: Callable[[str], bool]) -> None:
        """Hold on to the gradients at hand, to be sent with `claim`.

        Raises `UsageError` for one that does not fit, or that `is_ready` knows and that has gone since.
        """
        self._require_agreement()  # on a GPU the last step's may have come to light since
        self._stamp, self._made = stamp(claim), {}
        self._grads = [param.grad for _, param in self.params]
        for kind, (name, _), grad in zip(self._kinds, self.params, self._grads, strict=True):
            if grad is not None:
                _require_fit(name, grad, kind, self.wire.device)
            elif is_ready(name):
                raise UsageError(CHANGED.format(name=name))
        addresses = [0 if grad is None else grad.data_ptr() for grad in self._grads]
        self.apart.require(self.index, self.names, addresses, self._nbytes)
        self._versions = _versions(self._grads)

    def pack(self, scale: float) -> None:
        """Gradients times `scale` into the wire buffer, zeros for those that are None."""
        self._require_unchanged()
        self._packing.pack(self._grads, scale, self._stamp)

    def unpack(self) -> None:
        """The wire buffer into the gradients; one that no rank had stays None.

        Raises `DisagreementError` if ranks sent different things: before it writes; on a GPU in the next step.
        """
        self._require_unchanged()
        self._make_missing()
        self._packing.unpack([self._made.get(i, grad) for i, grad in enumerate(self._grads)], self._stamp)
        self._require_agreement()
        self._note_own_writes()

    def _make_missing(self) -> None:
        """Room for what only others had; on a GPU waits for the wire if something is missing here."""
        missing = [i for i, grad in enumerate(self._grads) if grad is None]
        elsewhere = self._packing.present() if missing else []
        self._made = {i: torch.empty_like(self._like[i], device=self.wire.device) for i in missing if elsewhere[i]}

    def aim(self, repeatable: Repeatable, scale: float) -> None:
        """`pack`, for launches that are repeated."""
        self._require_unchanged()
        repeatable.aim(self._grads, scale, self._stamp)

    def repeated(self, repeatable: Repeatable) -> None:
        """`unpack`, after launches were repeated: what they did not know of."""
        repeatable.repeated(self._grads)
        self._make_missing()
        if self._made:
            self._packing.unpack([self._made.get(i) for i in range(len(self._grads))], self._stamp)
        self._require_agreement()
        self._note_own_writes()

    def settle(self) -> None:
        """Give the parameters what has arrived; raises `UsageError` if somebody was at the gradients meanwhile."""
        self._require_unchanged()
        for (name, param), grad in zip(self.params, self._grads, strict=True):
            if param.grad is not grad:
                raise UsageError(CHANGED.format(name=name))
        for i, made in self._made.items():
            if made.is_cuda:  # made on the lane's stream, used and freed on this one
                made.record_stream(torch.cuda.current_stream(made.device))
            self.params[i][1].grad = made
        self.release()

    def release(self) -> None:
        """Instead of `settle`, for what will not be used: let go of the gradients."""
        self._grads, self._made, self._versions = [], {}, []  # or they would live until the next step

    def _require_agreement(self) -> None:
        if self._packing.disputed:
            why = complaint(self.layout.stamp(self.wire))
            raise DisagreementError(f"bucket {self.index} was summed with something else: {why}")

    def _note_own_writes(self) -> None:
        self._versions = [version + 1 if version >= 0 else -1 for version in self._versions]

    def _require_unchanged(self) -> None:
        now = _versions(self._grads)
        if now != self._versions:
            changed = next(i for i, version in enumerate(now) if version != self._versions[i])
            raise UsageError(CHANGED.format(name=self.names[changed]))


def _versions(grads: Sequence[Tensor | None]) -> list[int]:
    """-1 for None, and for views: all views of a tensor count together."""
    return [-1 if grad is None or grad._base is not None else grad._version for grad in grads]  # noqa: SLF001  # nothing else tells


class _Kind(NamedTuple):
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    def __str__(self) -> str:
        plain = tuple(accumulate(self.shape[:0:-1], mul, initial=1))[::-1] if self.shape else ()
        is_plain = self.strides == plain or _lie_alike(self, self._replace(strides=plain))
        return f"{str(self.dtype)[6:]}{list(self.shape)}{'' if is_plain else f' with strides {self.strides}'}"


def _kind(tensor: Tensor) -> _Kind:
    return _Kind(tensor.dtype, tensor.shape, tensor.stride())


def _require_fit(name: str, grad: Tensor, kind: _Kind, device: torch.device) -> None:
    """A tensor of another shape would be written over its neighbours' places; costs 0.5 us."""
    if grad.is_inference():
        raise UsageError(f"the gradient of {name} was made under torch.inference_mode(): use torch.no_grad() there")
    if grad.device != device:
        raise UsageError(f"the gradient of {name} is on {grad.device}, and its bucket on {device}: move it there")
    if (grad.dtype, grad.shape, grad.stride()) != kind:
        _require_alike(name, _kind(grad), kind)


def _require_alike(name: str, own: _Kind, kind: _Kind) -> None:
    if own[:2] != kind[:2]:
        raise UsageError(
            f"the gradient of {name} is {own}, but was {kind} when the model was attached: "
            "detach() and attach() again after changing parameters"
        )
    if not _lie_alike(own, kind):
        raise UsageError(
            f"the gradient of {name} lies in memory with strides {own.strides}, and autograd makes it with "
            f"{kind.strides}: give it that layout, by torch.empty_like(param).copy_(grad)"
        )


def _lie_alike(own: _Kind, kind: _Kind) -> bool:
    """True if strides differ only where they do not matter."""
    pairs = zip(own.shape, own.strides, kind.strides, strict=True)
    return own.shape.numel() == 0 or all(size == 1 or here == there for size, here, there in pairs)


def gradient_dtype(param: Tensor) -> torch.dtype:
    """The dtype in which autograd makes the gradient of `param`; newer versions of torch let users choose."""
    chosen: torch.dtype | None = getattr(param, "grad_dtype", None)
    return param.dtype if chosen is None else chosen


def is_expanded(tensor: Tensor) -> bool:
    """True if several elements share one place in memory."""
    strides = tensor.stride()
    stretched = (size > 1 and not stride for size, stride in zip(tensor.shape, strides, strict=True))
    return 0 in strides and tensor.numel() > 0 and any(stretched)


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
    dtypes = [gradient_dtype(param) for _, param in params]
    units = [
        Unit(name, param.numel() * dtype.itemsize, dtype) for (name, param), dtype in zip(params, dtypes, strict=True)
    ]
    plan = plan_buckets(units, cap_nbytes, first_cap_nbytes)
    members, apart = ([params[i] for i in group] for group in plan), Apart()
    return [_bucket(index, named, wire, allocate, model, apart) for index, named in enumerate(members)]


def _bucket(
    index: int, params: list[Named], wire: torch.dtype | None, allocate: Allocate, model: int, apart: Apart
) -> Bucket:
    first = params[0][1]
    made = gradient_dtype(first)
    layout = layout_of([param.numel() for _, param in params])
    dtype = wire if wire is not None and wire.itemsize < made.itemsize else made
    return Bucket(index, params, layout, allocate(layout.numel, dtype, first.device), model, apart)
