# SPDX-License-Identifier: Apache-2.0
"""A call of World.all_reduce: whether it can work, and what of it must be equal on all ranks.

Pure checks on the calling thread; only a quantized wire's module may be imported here. Other ways
to sum refuse by the same (`check_all_reduce`, `is_expanded`), and other calls that write to a
tensor (`require_writable`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from commrt.algorithm import Algorithm
from commrt.algorithms.arguments import as_algorithm
from commrt.algorithms.torus import Torus2D
from commrt.errors import UsageError
from commrt.options import require_compatible
from commrt.runtime.tags import check_tag
from commrt.runtime.wire import AnyWire, as_wire, is_quantized, travels_as
from commrt.runtime.wire_carrier import carrier_of
from commrt.transport.protocol import Tag

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

INTEGERS = (torch.int64, torch.int32)
"""Narrower ones would overflow: each rank adds flags to the sum as well."""

Op = Literal["mean", "avg", "sum"] | ReduceOp | ReduceOp.RedOpType
"""What `World.all_reduce` takes as its `op`."""

OPS = {"mean": "mean", "avg": "mean", "sum": "sum"}
"""By all their names, those of torch's ``ReduceOp`` in small letters."""

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
        """True if it travels as at most `SHORT_NBYTES`, unquantized."""
        return (
            isinstance(self.wire, torch.dtype)
            and self.shape.numel() * self.wire.itemsize <= SHORT_NBYTES
        )

    def empty(self, device: torch.device | str) -> Tensor:
        """Return an uninitialized tensor of this layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def check_all_reduce_call(
    tensor: Tensor,
    op: Op,
    algorithm: Algorithm | str | None,
    wire: AnyWire | str | None,
    tag: Tag,
    residual: Tensor | None,
) -> AllReduce:
    """Return the checked call; raises `UsageError` for what cannot be summed."""
    require_writable("all_reduce()", tensor)
    op_name = _name_of(op)
    _check_arithmetic(tensor.dtype, op_name)
    values = as_wire(wire)
    if algorithm is not None or values is not None:
        check_all_reduce(DEFAULT if algorithm is None else algorithm, values)
    check_tag(tag)
    travels = travels_as(tensor.dtype, values)
    if is_quantized(travels):
        carrier_of(travels).check_residual(travels, residual, tensor)
    elif residual is not None:
        raise UsageError(
            f"{travels} with residual=a tensor: only a wire with feedback keeps one; leave it out"
        )
    # a meta tensor has the strides of a dense one, and makes others dense
    like = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
    return AllReduce(op_name, like.shape, like.stride(), like.dtype, travels, tensor.device)


def check_all_reduce(algorithm: Algorithm | str, wire: AnyWire | None = None) -> None:
    """Raise `UsageError` for an algorithm that is no all-reduce, or a wire only for `attach`."""
    require_compatible(as_algorithm(algorithm), wire, ["all-reduce"])


def is_expanded(tensor: Tensor) -> bool:
    """Return True if several elements share one place in memory."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and not stride for size, stride in strides)


def require_writable(what: str, tensor: object) -> None:
    """Raise `UsageError` for what is no plain dense tensor, to which `what` could write."""
    if not isinstance(tensor, Tensor):
        raise UsageError(
            f"{what} takes a tensor, not a {type(tensor).__name__}: make one with torch.tensor()"
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
            raise UsageError(f"{what} writes to its tensor, which {complaint}")
    if is_expanded(tensor):
        raise UsageError(
            f"{what} writes to its tensor, of which several elements share one place: use its"
            " clone()"
        )


def _name_of(op: object) -> str:
    """Return "mean" or "sum" for one of `OPS`, or for torch's ``ReduceOp`` of that name."""
    name = getattr(getattr(op, "op", op), "name", op)
    found = OPS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise UsageError(
            f'op={name!r:.80}: use "mean", as gradients are averaged, or "sum"; for others take'
            " all_gather_object(), or torch.distributed over the backend commrt"
        )
    return found


def _check_arithmetic(dtype: torch.dtype, op: str) -> None:
    if dtype not in (*FLOATS, *INTEGERS):
        offered = ", ".join(str(one) for one in (*FLOATS, *INTEGERS))
        raise UsageError(f"all_reduce() of {dtype}: convert it to one of {offered} first")
    if dtype in INTEGERS and op == "mean":
        raise UsageError(
            f'the mean of {dtype} has no place in its own dtype: use op="sum", or convert it to'
            " float"
        )
