# SPDX-License-Identifier: Apache-2.0
"""A call of World.all_reduce: whether it can work, and what of it must be equal on all ranks.

Pure checks on the calling thread; only a quantized wire's module may be imported here. Other ways
to sum refuse by the same (`check_all_reduce`, `is_expanded`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from commrt.algorithm import Algorithm
from commrt.algorithms.arguments import require_maker
from commrt.algorithms.torus import Torus2D
from commrt.errors import UsageError
from commrt.options import require_compatible
from commrt.runtime.tags import check_tag
from commrt.runtime.wire import AnyWire, check_wire, is_quantized, travels_as
from commrt.runtime.wire_carrier import carrier_of
from commrt.transport.protocol import Tag

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

INTEGERS = (torch.int64, torch.int32)
"""Narrower ones would overflow: each rank adds flags to the sum as well."""

OPS = ("mean", "sum")

SHORT_NBYTES = 16 << 10
"""Up to so many bytes a message costs more than they do."""

DEFAULT = Torus2D()
"""What an all-reduce takes if no algorithm is given."""


class AllReduce(NamedTuple):
    """What must be equal on all ranks to add up a tensor, and where it lies."""

    op: str
    shape: torch.Size
    strides: tuple[int, ...]
    """Strides of a tensor without gaps."""
    dtype: torch.dtype
    wire: AnyWire
    device: torch.device

    def __str__(self) -> str:
        """Name all that must be equal on all ranks; strides of dimensions of size 1 may differ."""
        strides = [
            stride if size > 1 else 0 for size, stride in zip(self.shape, self.strides, strict=True)
        ]
        kinds = dict.fromkeys((self.dtype, self.wire))
        dtypes = " as ".join(repr(one) if is_quantized(one) else str(one)[6:] for one in kinds)
        return f"the {self.op} of {dtypes}{list(self.shape)} with strides {strides}"

    @property
    def is_short(self) -> bool:
        """True if it travels as so few bytes, unquantized."""
        return (
            isinstance(self.wire, torch.dtype)
            and self.shape.numel() * self.wire.itemsize <= SHORT_NBYTES
        )

    def empty(self, device: torch.device | str) -> Tensor:
        """Return an uninitialized tensor of this layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def check_all_reduce_call(
    tensor: Tensor,
    op: str,
    algorithm: Algorithm | None,
    wire: AnyWire | None,
    tag: Tag,
    residual: Tensor | None,
) -> AllReduce:
    """Return the checked call; raises `UsageError` for what cannot be summed."""
    _check_tensor(tensor)
    _check_arithmetic(tensor.dtype, op)
    check_wire(wire)
    if algorithm is not None or wire is not None:
        check_all_reduce(DEFAULT if algorithm is None else algorithm, wire)
    check_tag(tag)
    travels = travels_as(tensor.dtype, wire)
    if is_quantized(travels):
        carrier_of(travels).check_residual(travels, residual, tensor)
    elif residual is not None:
        raise UsageError(
            f"{travels} with residual=a tensor: only a wire with feedback keeps one; leave it out"
        )
    # a meta tensor has the strides of a dense one, and makes others dense
    like = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
    return AllReduce(op, like.shape, like.stride(), like.dtype, travels, tensor.device)


def check_all_reduce(algorithm: Algorithm, wire: AnyWire | None = None) -> None:
    """Raise `UsageError` for an algorithm that is no all-reduce, or a wire only for `attach`."""
    require_maker("algorithm", algorithm)
    require_compatible(algorithm, wire, ["all-reduce"])


def is_expanded(tensor: Tensor) -> bool:
    """Return True if several elements share one place in memory."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and not stride for size, stride in strides)


def _check_tensor(tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise UsageError(
            f"all_reduce() takes a tensor, not a {type(tensor).__name__}: make one with"
            " torch.tensor()"
        )
    for is_so, complaint in (
        (
            type(tensor) not in (Tensor, nn.Parameter),
            f"is a {type(tensor).__name__}: use a plain tensor",
        ),
        (
            tensor.layout != torch.strided or tensor.is_nested,
            f"is {tensor.layout}, or nested: use a dense copy",
        ),
        (tensor.is_meta, "is on the meta device and has no values"),
        (
            tensor.is_inference(),
            "was made under torch.inference_mode(): clone() it outside of that",
        ),
    ):
        if is_so:
            raise UsageError(f"all_reduce() writes to its tensor, which {complaint}")
    if is_expanded(tensor):
        raise UsageError(
            "all_reduce() writes to its tensor, of which several elements share one place: use its"
            " clone()"
        )


def _check_arithmetic(dtype: torch.dtype, op: str) -> None:
    if op not in OPS:
        raise UsageError(f'op={op!r:.80}: use "mean", as gradients are averaged, or "sum"')
    if dtype not in (*FLOATS, *INTEGERS):
        offered = ", ".join(str(one) for one in (*FLOATS, *INTEGERS))
        raise UsageError(f"all_reduce() of {dtype}: convert it to one of {offered} first")
    if dtype in INTEGERS and op == "mean":
        raise UsageError(
            f'the mean of {dtype} has no place in its own dtype: use op="sum", or convert it to'
            " float"
        )
