# SPDX-License-Identifier: Apache-2.0
"""The arguments of torch.distributed's collectives, checked, as calls. Nothing is sent here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from commrt.algorithms.parts import require_root
from commrt.c10d.call import Call, Placed, Traits, memory_of, whole
from commrt.errors import UsageError
from commrt.kernels.dispatch import OPERATIONS
from commrt.pricing.selection import WIRE_NBYTES, slots_of
from commrt.runtime.collectives import is_expanded

__all__ = ["CheckedCalls"]

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
Pieces = Sequence[Tensor] | Tensor
"""A tensor for each rank, or one that holds the pieces of all."""


class _Part(NamedTuple):
    """Bytes [begin, begin + nbytes) of a row."""

    row: Tensor
    begin: int
    nbytes: int

    @property
    def tensor(self) -> Tensor:
        """The bytes themselves."""
        return self.row[self.begin : self.begin + self.nbytes]


@dataclass(frozen=True, slots=True)
class CheckedCalls:
    """Makes the calls of one rank of a group. All methods raise `UsageError` for what cannot work."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor, op: Any, timeout_s: float | None = None) -> Call:
        """Combine all ranks' tensors at every rank."""
        both = [tensor]
        return self._call("all_reduce", both, both, self._arithmetic(op, tensor.dtype), 0, timeout_s, tensor)

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float | None = None) -> Call:
        """Copy the root's tensor to all ranks."""
        put, taken = ([tensor], []) if self.rank == root else ([], [tensor])
        return self._call("broadcast", put, taken, MOVED, root, timeout_s, tensor)

    def reduce(self, tensor: Tensor, op: Any, root: int, timeout_s: float | None = None) -> Call:
        """Combine all ranks' tensors at the root."""
        how, taken = self._arithmetic(op, tensor.dtype), [tensor] if self.rank == root else []
        return self._call("reduce", [tensor], taken, how, root, timeout_s, tensor)

    def all_gather(self, outputs: Pieces, tensor: Tensor, timeout_s: float | None = None) -> Call:
        """Copy each rank's tensor to all ranks, to the output of that rank's number."""
        taken = self._one_each(outputs, tensor, "outputs of an all_gather")
        return self._call("all_gather", [tensor], taken, MOVED, 0, timeout_s, tensor)

    def gather(self, outputs: Pieces, tensor: Tensor, root: int, timeout_s: float | None = None) -> Call:
        """Copy each rank's tensor to the root, to the output of that rank's number; others give no outputs."""
        taken = self._one_each(outputs, tensor, "outputs of a gather") if self.rank == root else []
        return self._call("gather", [tensor], taken, MOVED, root, timeout_s, tensor)

    def scatter(self, output: Tensor, inputs: Pieces, root: int, timeout_s: float | None = None) -> Call:
        """Copy the root's input of each rank's number to that rank; others give no inputs."""
        put = self._one_each(inputs, output, "inputs of a scatter") if self.rank == root else []
        return self._call("scatter", put, [output], MOVED, root, timeout_s, output)

    def reduce_scatter(self, output: Tensor, inputs: Pieces, op: Any, timeout_s: float | None = None) -> Call:
        """Combine all ranks' inputs of a rank's number at that rank."""
        put = self._one_each(inputs, output, "inputs of a reduce_scatter")
        return self._call("reduce_scatter", put, [output], self._arithmetic(op, output.dtype), 0, timeout_s, output)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout_s: float | None = None) -> Call:
        """Copy the input of each rank's number to that rank, to its output of this rank's number."""
        like = self._require_alike([*outputs, *inputs])
        if len(outputs) != self.size or len(inputs) != self.size:
            raise UsageError(f"{len(inputs)} inputs and {len(outputs)} outputs of an all_to_all: give {self.size} each")
        taken, put = (
            [_Part(row, 0, row.numel()) for row in (whole(one, torch.uint8) for one in side)]
            for side in (outputs, inputs)
        )
        return self._all_to_all(outputs, taken, put, like, timeout_s)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        timeout_s: float | None = None,
    ) -> Call:
        """Copy the part of each rank's number to that rank; no sizes stand for equal parts."""
        self._require_alike([output, tensor])
        taken, put = self._parts(output, output_sizes), self._parts(tensor, input_sizes)
        return self._all_to_all([output], taken, put, tensor, timeout_s)

    def _all_to_all(
        self,
        result: Sequence[Tensor],
        taken: Sequence[_Part],
        put: Sequence[_Part],
        like: Tensor,
        timeout_s: float | None,
    ) -> Call:
        mine, size = self.rank, self.size
        if put[mine].nbytes != taken[mine].nbytes:
            raise UsageError(
                f"an all_to_all gives this rank {put[mine].nbytes} bytes of its own, and its output has "
                f"{taken[mine].nbytes}"
            )
        sizes = [0] * (size * size)
        sizes[mine::size] = [part.nbytes for part in taken]
        sizes[mine * size : (mine + 1) * size] = [part.nbytes for part in put]
        sizes[mine * size + mine] = 0  # it does not travel
        others = [rank for rank in range(size) if rank != mine]
        sent = [Placed(mine * size + rank, put[rank].row, put[rank].begin) for rank in others]
        received = [Placed(rank * size + mine, taken[rank].row, taken[rank].begin) for rank in others]
        traits = Traits("all_to_all", size * size, None, like.dtype, None, 0)
        copies = [(taken[mine].tensor, put[mine].tensor), *_gaps(result, [part.row for part in taken])]
        return Call(traits, tuple(sizes), sent, received, result, like.device, timeout_s=timeout_s, copies=copies)

    def _parts(self, tensor: Tensor, sizes: Sequence[int]) -> list[_Part]:
        """Return the parts of `tensor` along its first dimension; equal ones if no sizes are given."""
        rows = len(tensor) if tensor.dim() else 0
        if not sizes and rows % self.size:
            raise UsageError(f"{rows} rows do not divide into {self.size} equal parts: give split sizes")
        given = list(sizes) or [rows // self.size] * self.size
        if len(given) != self.size or sum(given) != rows or min(given) < 0:
            raise UsageError(f"split sizes {given} for {self.size} ranks: give one each, that sum up to {rows} rows")
        row = whole(tensor, torch.uint8)
        nbytes = row.numel() // max(rows, 1)
        begins = accumulate(given, initial=0)
        return [_Part(row, begin * nbytes, count * nbytes) for begin, count in zip(begins, given, strict=False)]

    def barrier(self, timeout_s: float | None = None) -> Call:
        """Wait for all ranks."""
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        return self._call("barrier", [token], [], MOVED, 0, timeout_s, token)

    def _call(
        self,
        collective: str,
        put: Sequence[Tensor],
        taken: Sequence[Tensor],
        how: _Arithmetic,
        root: int,
        timeout_s: float | None,
        like: Tensor,
    ) -> Call:
        """Return a call whose pieces are as large as `like`."""
        self._require_alike([like, *put, *taken])
        require_root(self.size, root, collective)
        slots = slots_of(collective, self.size)
        traits = Traits(collective, slots, like.numel(), like.dtype, how.operation, root)
        size = like.numel() * like.dtype.itemsize // traits.wire_dtype.itemsize
        inputs = [whole(each, traits.wire_dtype) for each in put]
        outputs = inputs if taken is put else [whole(each, traits.wire_dtype) for each in taken]
        return Call(
            traits,
            (size,) * slots,
            self._placed(inputs, slots, size),
            self._placed(outputs, slots, size),
            taken or [like],
            like.device,
            how.factor,
            how.divisor,
            timeout_s,
            _gaps(taken, outputs),
        )

    def _placed(self, rows: Sequence[Tensor], slots: int, size: int) -> list[Placed]:
        """Return where pieces of `size` lie: one in each row, or all ranks' in one row."""
        if len(rows) != 1:
            return [Placed(slot, row, 0) for slot, row in enumerate(rows)]
        (row,) = rows
        if row.numel() == slots * size:
            return [Placed(slot, row, slot * size) for slot in range(slots)]
        return [Placed(self.rank, row, 0)]

    def _one_each(self, pieces: Pieces, like: Tensor, what: str) -> Sequence[Tensor]:
        """Return the tensors that hold a piece like `like` for each rank; raise `UsageError` for other sizes."""
        if isinstance(pieces, Tensor):
            if pieces.numel() != self.size * like.numel():
                raise UsageError(
                    f"{what} of {_text(pieces)} beside {_text(like)}, for {self.size} ranks: it must have {self.size} "
                    "times as many elements"
                )
            return [pieces]
        if len(pieces) != self.size:
            raise UsageError(f"{len(pieces)} {what}: give one for each of the {self.size} ranks")
        for tensor in pieces:
            if tensor.numel() != like.numel():
                raise UsageError(f"{what} of {_text(tensor)} beside {_text(like)}: all must have as many elements")
        return pieces

    def _require_alike(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the first of `tensors`, which are dense, of one dtype and on one device."""
        first = tensors[0]
        dtype, device = first.dtype, first.device
        for tensor in tensors:
            if tensor.device.type not in WIRE_NBYTES or tensor.is_quantized:
                raise UsageError(f"{_text(tensor)}: only plain tensors on a CPU or an NVIDIA GPU can travel")
            if tensor.layout is not torch.strided:
                raise UsageError(f"a tensor is {tensor.layout}: only all_reduce takes sparse ones; pass a dense copy")
            if tensor.dtype is not dtype or tensor.device != device:
                raise UsageError(f"{_text(tensor)} beside {_text(first)}: all must have one dtype, on one device")
        return first

    def _arithmetic(self, op: Any, dtype: torch.dtype) -> _Arithmetic:
        kind = getattr(op, "op", op)
        if (operation := NAMES.get(kind)) is None:
            raise UsageError(f"{op} is no operation that tensors can be combined with")
        if kind == _OPS.AVG and dtype is torch.bool:
            raise UsageError(f"the mean of {dtype} has no place in its own dtype: convert it to float")
        if kind == _OPS.PREMUL_SUM and not (dtype.is_floating_point or dtype.is_complex):
            raise UsageError(
                f"the scaled sum of {dtype} has no place in its own dtype: use SUM, or convert it to float"
            )
        _require_possible(operation, dtype)
        factor = op.factor if kind == _OPS.PREMUL_SUM else None
        if isinstance(factor, Tensor) and not torch.can_cast(factor.dtype, dtype):
            raise UsageError(f"a factor of {factor.dtype} for tensors of {dtype}: convert one of them")
        return _Arithmetic(operation, factor, self.size if kind == _OPS.AVG else 1)


def _gaps(tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors whose rows are copies, each with its row; raise for one that cannot be written to."""
    pairs = zip(map(memory_of, tensors), rows, strict=False)
    found = [(tensor, row) for tensor, row in pairs if tensor.data_ptr() != row.data_ptr()]
    for tensor, _ in found:
        if is_expanded(tensor):
            raise UsageError(
                f"{_text(tensor)} has elements that share one place, so no result fits it: use its clone()"
            )
    return found


@lru_cache
def _require_possible(operation: str, dtype: torch.dtype) -> None:
    """Raise `UsageError` if torch cannot combine elements of `dtype` so: try it on one."""
    try:
        one = torch.zeros(1, dtype=dtype, device="cpu")
        OPERATIONS[operation](one, one, out=one)
    except RuntimeError as error:
        raise UsageError(f"{operation} of {dtype} is not possible ({error}): convert the tensor first") from error


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)} on {tensor.device}"
