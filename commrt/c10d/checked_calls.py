# SPDX-License-Identifier: Apache-2.0
"""The arguments of torch.distributed's collectives, checked, as calls. Nothing is sent here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from commrt.algorithms.catalogue import ROOTED
from commrt.algorithms.parts import require_root
from commrt.c10d.call import Call, Kind, Piece
from commrt.errors import UsageError
from commrt.kernels.dispatch import OPERATIONS
from commrt.pricing.selection import SUMS, WIRE_NBYTES, slots_of
from commrt.runtime.all_reduce_call import is_expanded

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
KEPT = 1024
Pieces = Sequence[Tensor] | Tensor
"""A tensor for each rank, or one that holds the pieces of all."""


class CheckedCalls:
    """Makes the calls of one rank of a group. All methods raise `UsageError` for what cannot work.

    `opts` are torch's, such as ``AllreduceOptions``; None stands for a sum, or for root 0.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._kind = lru_cache(KEPT)(self._new_kind)

    def whole(self, collective: str, tensor: Tensor, opts: Any = None) -> Call:
        """Combine or copy `tensor`, as large on all ranks, in place: an all_reduce, a reduce or a
        broadcast.
        """
        both = [tensor]
        is_root = self.rank == _root(collective, opts)
        put = both if is_root or collective != "broadcast" else []
        takes = {"broadcast": not is_root, "reduce": is_root}.get(collective, True)
        return self._call(collective, tensor, put, both if takes else [], opts)

    def pieces(self, collective: str, own: Tensor, pieces: Pieces, opts: Any = None) -> Call:
        """Exchange a piece for each rank, of which `own` is this rank's: a gather, a scatter, and
        those of all ranks.

        `pieces` are outputs where `own` is an input, and inputs elsewhere. Those of a rooted
        collective are the root's.
        """
        gathers = collective.endswith("gather")
        if collective in ROOTED and self.rank != _root(collective, opts):
            pieces = []
        else:
            pieces = self._one_each(
                pieces, own, f"{'outputs' if gathers else 'inputs'} of {collective}"
            )
        if gathers:
            return self._call(collective, own, [own], pieces, opts)
        return self._call(collective, own, pieces, [own], opts)

    def barrier(self) -> Call:
        """Wait for all ranks."""
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        return self._call("barrier", token, [token], [], None)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Call:
        """Copy the input of each rank's number to that rank,
        to its output of this rank's number.
        """
        _require_alike([*outputs, *inputs])
        mine = self.rank
        size = self.size
        if len(outputs) != size or len(inputs) != size:
            raise UsageError(
                f"{len(inputs)} inputs and {len(outputs)} outputs of an all_to_all: give {size}"
                " each"
            )
        copies: list[tuple[Tensor, Tensor]] = []
        taken = [_row(one, torch.uint8, copies) for one in outputs]
        put = [_row(one, torch.uint8) for one in inputs]
        sent = [row.numel() for row in put]
        received = [row.numel() for row in taken]
        if sent[mine] != received[mine]:
            raise UsageError(
                f"an all_to_all gives this rank {sent[mine]} bytes of its own, and its output has"
                f" {received[mine]}"
            )
        sizes = [0] * (size * size)
        sizes[mine::size] = received
        sizes[mine * size : (mine + 1) * size] = sent
        sizes[mine * size + mine] = 0  # it does not travel
        others = [rank for rank in range(size) if rank != mine]
        leaves = tuple(Piece(mine * size + rank, rank, 0) for rank in others)
        comes = tuple(Piece(rank * size + mine, rank, 0) for rank in others)
        kind = Kind(
            "all_to_all", outputs[0].dtype, None, 0, tuple(sizes), leaves, comes, outputs[0].device
        )
        return Call(kind, put, taken, outputs, copies=[(taken[mine], put[mine]), *copies])

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
    ) -> Call:
        """Copy the part of each rank's number to that rank; no sizes stand for equal parts."""
        _require_alike([output, tensor])
        _require_places(memory_of(output))  # of the whole, which the caller knows
        call = self.all_to_all(self._split(output, output_sizes), self._split(tensor, input_sizes))
        call.result = [output]
        return call

    def _split(self, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Return the parts of `tensor` along its first dimension; equal ones without sizes."""
        rows = len(tensor) if tensor.dim() else 0
        if not sizes and rows % self.size:
            raise UsageError(
                f"{rows} rows do not divide into {self.size} equal parts: give split sizes"
            )
        given = list(sizes) or [rows // self.size] * self.size
        if len(given) != self.size or sum(given) != rows or min(given) < 0:
            raise UsageError(
                f"split sizes {given} for {self.size} ranks: give one each, that sum up to {rows}"
                " rows"
            )
        return torch.split(memory_of(tensor), given)

    def _call(
        self,
        collective: str,
        like: Tensor,
        put: Sequence[Tensor],
        taken: Sequence[Tensor],
        opts: Any,
    ) -> Call:
        _require_alike([like, *put, *taken])
        op: Any = option(opts, "reduceOp", ReduceOp.SUM) if collective in SUMS else None
        wire_dtype = torch.uint8 if op is None else like.dtype
        copies: list[tuple[Tensor, Tensor]] = []
        outputs = [_row(each, wire_dtype, copies) for each in taken]
        inputs = outputs if taken is put else [_row(each, wire_dtype) for each in put]
        rows = tuple([(len(side), side[0].numel() if side else 0) for side in (inputs, outputs)])
        how = getattr(op, "op", op)
        root = _root(collective, opts)
        kind = self._kind(collective, like.numel(), like.dtype, like.device, how, root, rows)
        factor = op.factor if kind.is_scaled else None
        if isinstance(factor, Tensor) and not torch.can_cast(factor.dtype, like.dtype):
            raise UsageError(
                f"a factor of {factor.dtype} for tensors of {like.dtype}: convert one of them"
            )
        return Call(kind, inputs, outputs, taken or [like], factor, copies)

    def _new_kind(
        self,
        collective: str,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        how: Any,
        root: int,
        rows: Sequence[tuple[int, int]],
    ) -> Kind:
        """Return the kind of a call with pieces of `numel`; `rows` has how many go in and come out,
        and their size.
        """
        require_root(self.size, root, collective)
        operation = None if how is None else _operation(how, dtype)
        slots = slots_of(collective, self.size)
        wide = numel if operation else numel * dtype.itemsize

        def places(count: int, first: int) -> tuple[Piece, ...]:
            """Return where the pieces lie: one in each row, or all ranks' in one row."""
            if count != 1:
                return tuple(Piece(slot, slot, 0) for slot in range(count))
            if first != slots * wide:
                return (Piece(self.rank, 0, 0),)
            return tuple(Piece(slot, 0, slot * wide) for slot in range(slots))

        put, take = (places(*each) for each in rows)
        sizes = (wide,) * slots
        divisor = self.size if how == _OPS.AVG else 1
        return Kind(
            collective,
            dtype,
            operation,
            root,
            sizes,
            put,
            take,
            device,
            divisor,
            how == _OPS.PREMUL_SUM,
        )

    def _one_each(self, pieces: Pieces, like: Tensor, what: str) -> Sequence[Tensor]:
        """Return the tensors that hold a piece like `like` for each rank; raise `UsageError` for
        other sizes.
        """
        numel = like.numel()
        size = self.size
        if isinstance(pieces, Tensor):
            given: Sequence[Tensor] = [pieces]
            expected = [size * numel]
        else:
            given = pieces
            expected = [numel] * size
        if [tensor.numel() for tensor in given] != expected:
            raise UsageError(
                f"{len(given)} {what}, {', '.join(map(_text, given)):.200}, beside {_text(like)}:"
                f" give {size} with as many elements, or one with {size} times as many"
            )
        return given


def option(opts: Any, name: str, default: Any) -> Any:
    """Return the option `name` of `opts`, `default` if they are None; raise `UsageError` if they
    are something else.
    """
    if opts is None:
        return default
    try:
        return getattr(opts, name)
    except AttributeError:
        raise UsageError(
            f"{opts!r} has no {name}: pass an options object, such as"
            f" torch.distributed.ReduceOptions(), and set the {name} of that"
        ) from None


def _root(collective: str, opts: Any) -> int:
    root: int = option(opts, "rootRank", 0) if collective in ROOTED else 0
    return root


def _operation(kind: Any, dtype: torch.dtype) -> str:
    """Return what is combined for an operation of torch; raises `UsageError` if it fails on one
    element.
    """
    operation = NAMES.get(kind)
    if operation is None:
        raise UsageError(f"{kind} is no operation that tensors can be combined with")
    if kind == _OPS.AVG and dtype is torch.bool:
        raise UsageError(f"the mean of {dtype} has no place in its own dtype: convert it to float")
    if kind == _OPS.PREMUL_SUM and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(
            f"the scaled sum of {dtype} has no place in its own dtype: use SUM, or convert it to"
            " float"
        )
    try:
        one = torch.zeros(1, dtype=dtype, device="cpu")
        OPERATIONS[operation](one, one, out=one)
    except RuntimeError as error:
        raise UsageError(
            f"{operation} of {dtype} is not possible ({error}): convert the tensor first"
        ) from error
    return operation


def _require_alike(tensors: Sequence[Tensor]) -> None:
    first = tensors[0]
    dtype = first.dtype
    device = first.device
    for tensor in tensors:
        if tensor.device.type not in WIRE_NBYTES or tensor.is_quantized:
            raise UsageError(
                f"{_text(tensor)}: only plain tensors on a CPU or an NVIDIA GPU can travel"
            )
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"a tensor is {tensor.layout}: only all_reduce takes sparse ones; pass a dense copy"
            )
        if tensor.dtype is not dtype or tensor.device != device:
            raise UsageError(
                f"{_text(tensor)} beside {_text(first)}: all must have one dtype, on one device"
            )


def memory_of(tensor: Tensor) -> Tensor:
    """Return the memory of `tensor`: of the tensor inside if a functional collective returned it,
    which is waited for.

    Writing to it does not count as an in-place change for autograd, as with Gloo. Raises
    `UsageError` for other subclasses that have no memory of their own, such as DTensor.
    """
    kind = type(tensor)
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return tensor.data
    wait = getattr(tensor, "trigger_wait", None)  # torch's AsyncCollectiveTensor has it
    if wait is None:
        raise UsageError(
            f"a {kind.__name__} cannot travel: pass the tensor in it, such as to_local() of a"
            " DTensor"
        )
    return memory_of(wait())


def _row(
    tensor: Tensor, dtype: torch.dtype, copies: list[tuple[Tensor, Tensor]] | None = None
) -> Tensor:
    """Return `tensor` as a contiguous row of `dtype`: its own memory, or a copy if it has gaps.

    A result whose row is a copy is added to `copies`, with it; raises `UsageError` if it cannot be
    written to.
    """
    plain = memory_of(tensor)
    as_is = plain.resolve_conj().resolve_neg() if plain.is_conj() or plain.is_neg() else plain
    # a view would keep the stride of a single element
    row = as_is.contiguous().as_strided((plain.numel(),), (1,))
    row = row if row.dtype is dtype else row.view(dtype)
    if copies is not None and row.data_ptr() != plain.data_ptr():
        _require_places(plain)
        copies.append((plain, row))
    return row


def _require_places(result: Tensor) -> None:
    """Raise `UsageError` unless each element of `result` has a place of its own."""
    if is_expanded(result):
        raise UsageError(
            f"{_text(result)} has elements that share one place, so no result fits it: use its"
            " clone()"
        )


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)} on {tensor.device}"
