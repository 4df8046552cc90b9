# SPDX-License-Identifier: Apache-2.0
"""Decide which tensors share a bucket; describe buckets in headers, so that ranks can compare them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from commrt.runtime.wire import AnyWire, is_quantized

__all__ = [
    "AVERAGED_BUFFERS",
    "MIB",
    "WIDTHS",
    "Header",
    "Named",
    "TensorKind",
    "Unit",
    "bucket_description",
    "encode",
    "explain_mismatch",
    "gradient_dtype",
    "plan_buckets",
    "wire_dtype",
]

AVERAGED_BUFFERS = ("running_mean", "running_var")
"""Names of the buffers of which replicas take the mean: the statistics of torch's norms."""
MIB = 1 << 20
KEPT = 256
"""Headers whose words are kept: only one of a step is new."""

Named = tuple[str, nn.Parameter]
"""A parameter and its name in the model."""


@dataclass(frozen=True, slots=True)
class Unit:
    """The facts about one tensor that `plan_buckets` uses."""

    name: str
    nbytes: int
    dtype: torch.dtype


def plan_buckets(units: Sequence[Unit], cap_nbytes: int, first_cap_nbytes: int) -> list[list[int]]:
    """Group `units`, given in ready order, into buckets of one dtype; a bucket closes when it reaches the cap.

    The first bucket of each dtype closes at `first_cap_nbytes`, so that communication starts early. Buckets
    are sorted by when their last member becomes ready.

    >>> units = [Unit(name, 6, torch.float32) for name in "abcde"]
    >>> plan_buckets(units, cap_nbytes=12, first_cap_nbytes=1)
    [[0], [1, 2], [3, 4]]
    """
    closed: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    left: dict[torch.dtype, int] = {}
    for index, unit in enumerate(units):
        filling.setdefault(unit.dtype, []).append(index)
        left[unit.dtype] = left.get(unit.dtype, first_cap_nbytes) - unit.nbytes
        if left[unit.dtype] <= 0:
            closed.append(filling.pop(unit.dtype))
            left[unit.dtype] = cap_nbytes
    return sorted([*closed, *filling.values()], key=lambda members: members[-1])


class TensorKind(NamedTuple):
    """Dtype, shape and strides of a tensor."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorKind:
        """Return the kind of `tensor`."""
        return cls(tensor.dtype, tensor.shape, tensor.stride())

    def lies_like(self, strides: tuple[int, ...]) -> bool:
        """Return True if `strides` lead to the same places in memory; strides of dimensions of size 1 do not matter."""
        pairs = zip(self.shape, self.strides, strides, strict=True)
        return self.shape.numel() == 0 or all(size == 1 or own == other for size, own, other in pairs)

    def __str__(self) -> str:
        contiguous = tuple(accumulate(self.shape[:0:-1], mul, initial=1))[::-1] if self.shape else ()
        strides = "" if self.lies_like(contiguous) else f" with strides {self.strides}"
        return f"{str(self.dtype)[6:]}{list(self.shape)}{strides}"


def bucket_description(index: int, wire: AnyWire, names: Iterable[str], kinds: Iterable[TensorKind]) -> str:
    """Return everything about a bucket that must agree between ranks, as text."""
    members = ", ".join(f"{name} {kind}" for name, kind in zip(names, kinds, strict=True))
    travels = repr(wire) if is_quantized(wire) else str(wire)[6:]
    return f"bucket {index} ({travels}): {members}"


def gradient_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of the gradients of `param`; recent versions of torch let users choose it."""
    chosen: torch.dtype | None = getattr(param, "grad_dtype", None)
    return param.dtype if chosen is None else chosen


def wire_dtype(own: torch.dtype, wire: AnyWire | None) -> torch.dtype:
    """Return the dtype of a wire buffer for values of dtype `own`: the narrower one; fp32 if it is quantized."""
    if is_quantized(wire):
        return torch.float32
    narrow = cast("torch.dtype | None", wire)
    return narrow if narrow is not None and narrow.itemsize < own.itemsize else own


class Header(NamedTuple):
    """What must be equal on all ranks that sum a bucket; each field counts modulo 2 to the power of its width."""

    late: int
    """1 if this rank had no backward pass and averages in its optimizer's step."""
    model: int
    """Number of the model among those attached to one world."""
    optimizer_steps: int
    """Since `attach` or the latest ``join()``; each optimizer's have a weight of their own."""
    step: int
    bucket: int
    settings: int
    """A digest of the optimizers' numeric settings."""


WIDTHS = Header(late=1, model=6, optimizer_steps=5, step=6, bucket=6, settings=8)
STARTS = [0, *accumulate(WIDTHS)][:-1]
BITS = sum(WIDTHS)

EXPLANATIONS = {
    "late": "some ranks came to optimizer.step() without a backward pass and others had one: call replica.average() "
    "where a rank has no batch, in place of its backward()",
    "model": "the ranks call backward() of the models attached to one world in different orders: use one order "
    "everywhere, and attach models that share a backward pass as one, in an nn.ModuleList",
    "optimizer_steps": "the ranks ran different numbers of backward passes for one optimizer.step(), or stepped "
    "different optimizers: put all but the last pass of an accumulation in no_sync(). With BackupWorkers, call "
    "replica.drain() first in each iteration, and choose the optimizer by replica.step, not by a counter of the loop",
    "step": "the ranks are at different steps: one ran a backward pass, or loaded a checkpoint, and others did not",
    "bucket": "the ranks are at different buckets of a step: a backward pass was interrupted on one of them",
    "settings": "the optimizers' settings (learning rate, momentum, ...) have come to differ between ranks: drive "
    "schedulers by what is equal everywhere (the step, a loss averaged over ranks), not by a rank's own data. Pass "
    "them to replica.join() if ranks run out of data at different times. With BackupWorkers, pass them to "
    "attach(also=); if the loop has a counter of its own, put `iter_num = replica.step` at its top",
}


@lru_cache(KEPT)
def encode(header: Header) -> int:
    """Return `header` as the 64-bit word that `Packing.pack` writes: low bits for zeros, high bits for ones.

    >>> hex(encode(Header(late=1, model=0, optimizer_steps=0, step=0, bucket=0, settings=0)))
    '0x1fffffffe'
    """
    word = 0
    for value, width, start in zip(header, WIDTHS, STARTS, strict=True):
        word |= (value % (1 << width)) << start
    return word << BITS | ~word & ((1 << BITS) - 1)


def explain_mismatch(total: Tensor) -> str:
    """Return why `total` [64], the sum of the ranks' header flags, does not come from equal headers.

    >>> from commrt.kernels.plain_torch import bits
    >>> both = bits(encode(Header(0, 1, 0, 7, 0, 9))).int() + bits(encode(Header(0, 2, 0, 7, 0, 9))).int()
    >>> explain_mismatch(both)[:42]
    'the ranks call backward() of the models at'
    """
    set_by_some = (total != 0).cpu()
    differs = set_by_some[:BITS] & set_by_some[BITS:]
    for name, start, width in zip(Header._fields, STARTS, WIDTHS, strict=True):
        if differs[start : start + width].any():
            return EXPLANATIONS[name]
    return "it is no sum of headers: the ranks run different programs, or models in different orders"
