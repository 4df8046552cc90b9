# SPDX-License-Identifier: Apache-2.0
"""The arguments of torch.distributed's collectives, checked, as calls. Nothing is sent here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from commrt.c10d.call import Call, Placed, Traits, whole
from commrt.errors import UsageError
from commrt.kernels.dispatch import OPERATIONS

__all__ = ["Requests"]

_OPS: Any = ReduceOp.RedOpType  # torch's stub lists no members
NAMES = {
    _OPS.SUM: "sum",
    _OPS.AVG: "sum",
    _OPS.PREMUL_SUM: "sum",
    _OPS.PRODUCT: "product",
    _OPS.MIN: "min",
    _OPS.MAX: "max",
    _OPS.BAND: "and",
    _OPS.BOR: "or",
    _OPS.BXOR: "xor",
}
"""torch's operations, and what is combined for them."""


class _Arithmetic(NamedTuple):
    operation: str | None = None
    factor: Any = None
    divisor: int = 1


MOVED = _Arithmetic()
"""Nothing is combined."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Makes the calls of one rank of a group. All methods raise `UsageError` for what cannot work."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor, op: Any, timeout_s: float | None = None) -> Call:
        """Combine all ranks' tensors at every rank."""
        how = self._arithmetic(op, tensor.dtype)
        return self._call("all_reduce", [tensor], [tensor], how, timeout_s=timeout_s)

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float | None = None) -> Call:
        """Copy the root's tensor to all ranks."""
        is_root = self.rank == root
        return self._call("broadcast", [tensor] * is_root, [tensor] * (not is_root), MOVED, root, timeout_s, tensor)

    def reduce(self, tensor: Tensor, op: Any, root: int, timeout_s: float | None = None) -> Call:
        """Combine all ranks' tensors at the root."""
        how = self._arithmetic(op, tensor.dtype)
        return self._call("reduce", [tensor], [tensor] * (self.rank == root), how, root, timeout_s)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, timeout_s: float | None = None) -> Call:
        """Copy each rank's tensor to all ranks, to the output of that rank's number."""
        self._require_one_each(outputs, tensor, "outputs of an all_gather")
        return self._call("all_gather", [tensor], outputs, MOVED, timeout_s=timeout_s)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int, timeout_s: float | None = None) -> Call:
        """Copy each rank's tensor to the root, to the output of that rank's number; others give no outputs."""
        if self.rank == root:
            self._require_one_each(outputs, tensor, "outputs of a gather")
        return self._call("gather", [tensor], outputs, MOVED, root, timeout_s)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, timeout_s: float | None = None) -> Call:
        """Copy the root's input of each rank's number to that rank; others give no inputs."""
        if self.rank == root:
            self._require_one_each(inputs, output, "inputs of a scatter")
        return self._call("scatter", inputs, [output], MOVED, root, timeout_s)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Any, timeout_s: float | None = None) -> Call:
        """Combine all ranks' inputs of a rank's number at that rank."""
        self._require_one_each(inputs, output, "inputs of a reduce_scatter")
        how = self._arithmetic(op, output.dtype)
        return self._call("reduce_scatter", inputs, [output], how, timeout_s=timeout_s)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout_s: float | None = None) -> Call:
        """Copy the input of each rank's number to that rank, to its output of this rank's number."""
        like = self._require_alike([*outputs, *inputs])
        if len(outputs) != self.size or len(inputs) != self.size:
            raise UsageError(f"{len(inputs)} inputs and {len(outputs)} outputs of an all_to_all: give {self.size} each")
        slots, sizes = self.size * self.size, [0] * self.size * self.size
        taken = [(rank * self.size + self.rank, whole(one, torch.uint8)) for rank, one in enumerate(outputs)]
        put = [(self.rank * self.size + rank, whole(one, torch.uint8)) for rank, one in enumerate(inputs)]
        for slot, row in (*taken, *put):
            sizes[slot] = row.numel()
        own, other = put.pop(self.rank)[1], taken[self.rank][1]
        if own.numel() != other.numel():
            raise UsageError(
                f"an all_to_all gives this rank {own.numel()} bytes of its own, and its output has {other.numel()}"
            )
        sizes[self.rank * self.size + self.rank] = 0  # it does not travel
        traits = Traits("all_to_all", slots, None, like.dtype, None, 0)
        copies = [(outputs[self.rank], own), *_gaps(outputs, taken)]
        del taken[self.rank]
        return Call(traits, tuple(sizes), put, taken, outputs, like.device, timeout_s=timeout_s, copies=copies)

    def barrier(self, timeout_s: float | None = None) -> Call:
        """Wait for all ranks."""
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        return self._call("barrier", [token], [], MOVED, timeout_s=timeout_s)

    def pieces(self, tensor: Tensor, other: Tensor) -> Sequence[Tensor]:
        """Return `tensor`, which must be contiguous, in as many parts as there are ranks, each as large as `other`."""
        if tensor.numel() != self.size * other.numel() or tensor.dtype != other.dtype:
            raise UsageError(
                f"tensors of {_text(tensor)} and {_text(other)} for {self.size} ranks: the first must have "
                f"{self.size} times as many elements as the second, of the same dtype"
            )
        if not tensor.is_contiguous():
            raise UsageError(f"a tensor of shape {tuple(tensor.shape)} has gaps: pass its contiguous() copy")
        return tensor.detach().view(self.size, -1).unbind()

    def split(self, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Return the parts of `tensor`, which must be contiguous, along its first dimension; equal ones if no sizes."""
        rows = len(tensor) if tensor.dim() else 0
        if not sizes and rows % self.size:
            raise UsageError(f"{rows} rows do not divide into {self.size} equal parts: give split sizes")
        given = list(sizes) or [rows // self.size] * self.size
        if len(given) != self.size or sum(given) != rows or min(given) < 0:
            raise UsageError(f"split sizes {given} for {self.size} ranks: give one each, that sum up to {rows} rows")
        if not tensor.is_contiguous():
            raise UsageError(f"a tensor of shape {tuple(tensor.shape)} has gaps: pass its contiguous() copy")
        return torch.split(tensor.detach(), given)

    def _call(
        self,
        collective: str,
        put: Sequence[Tensor],
        taken: Sequence[Tensor],
        how: _Arithmetic,
        root: int = 0,
        timeout_s: float | None = None,
        like: Tensor | None = None,
    ) -> Call:
        like = self._require_alike([*put, *taken] if like is None else [like])
        if not 0 <= root < self.size:
            raise UsageError(
                f"rank {root} cannot be the root of a {collective}: the group has ranks 0..{self.size - 1}"
            )
        slots = 1 if collective in {"all_reduce", "broadcast", "reduce"} else self.size
        traits = Traits(collective, slots, like.numel(), like.dtype, how.operation, root)
        inputs, outputs = (self._placed(side, traits) for side in (put, taken))
        size = like.numel() * like.dtype.itemsize // traits.wire_dtype.itemsize
        result = list(taken) or [like]
        gaps = _gaps(taken, outputs)
        sizes = (size,) * slots
        return Call(traits, sizes, inputs, outputs, result, like.device, how.factor, how.divisor, timeout_s, gaps)

    def _placed(self, tensors: Sequence[Tensor], traits: Traits) -> list[Placed]:
        """Return the slot of each tensor, and the tensor as a row: all ranks' pieces, or that of this rank."""
        rows = [whole(each, traits.wire_dtype) for each in tensors]
        return [(0 if traits.slots == 1 else self.rank, rows[0])] if len(rows) == 1 else list(enumerate(rows))

    def _require_one_each(self, tensors: Sequence[Tensor], like: Tensor, what: str) -> None:
        if len(tensors) != self.size:
            raise UsageError(f"{len(tensors)} {what}: give one for each of the {self.size} ranks")
        for tensor in tensors:
            if tensor.numel() != like.numel():
                raise UsageError(f"{what} of {_text(tensor)} beside {_text(like)}: all must have as many elements")

    def _require_alike(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the first of `tensors`, which are dense, of one dtype and on one device."""
        first = tensors[0]
        for tensor in tensors:
            if tensor.layout != torch.strided:
                raise UsageError(f"a tensor is {tensor.layout}: only all_reduce takes sparse ones; pass a dense copy")
            if tensor.dtype != first.dtype or tensor.device != first.device:
                raise UsageError(f"{_text(tensor)} beside {_text(first)}: all must have one dtype, on one device")
        return first

    def _arithmetic(self, op: Any, dtype: torch.dtype) -> _Arithmetic:
        kind = getattr(op, "op", op)
        if (operation := NAMES.get(kind)) is None:
            raise UsageError(f"{op} is no operation that tensors can be combined with")
        is_mean = kind == _OPS.AVG
        if is_mean and not (dtype.is_floating_point or dtype.is_complex):
            raise UsageError(f"the mean of {dtype} has no place in its own dtype: use SUM, or convert it to float")
        _require_possible(operation, dtype)
        factor = op.factor if kind == _OPS.PREMUL_SUM else None
        return _Arithmetic(operation, factor, self.size if is_mean else 1)


def _gaps(tensors: Sequence[Tensor], placed: Sequence[Placed]) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors whose rows are copies, each with its row."""
    pairs = zip(tensors, placed, strict=True)
    return [(tensor, row) for tensor, (_, row) in pairs if tensor.data_ptr() != row.data_ptr()]


@lru_cache
def _require_possible(operation: str, dtype: torch.dtype) -> None:
    """Raise `UsageError` if torch cannot combine elements of `dtype` so: try it on one."""
    one = torch.zeros(1, dtype=dtype, device="cpu")
    try:
        OPERATIONS[operation](one, one, out=one)
    except RuntimeError as error:
        raise UsageError(f"{operation} of {dtype} is not possible ({error}): convert the tensor first") from error


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)} on {tensor.device}"
