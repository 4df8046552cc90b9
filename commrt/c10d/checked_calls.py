# SPDX-License-Identifier: Apache-2.0
"""The arguments of torch.distributed's collectives, checked, as calls.

Runs on the thread that calls, before anything is sent; waits for arguments that a functional
collective returned. Writes to no tensor, and keeps only kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from commrt.algorithms.arguments import require_root
from commrt.algorithms.catalogue import ROOTED, SUMS
from commrt.c10d.call import Call, Kind
from commrt.c10d.call_layout import Layout, exchange_places, places
from commrt.c10d.call_options import option
from commrt.c10d.rows import memory_of, require_alike, require_places, row_of, text_of
from commrt.errors import UsageError
from commrt.kernels.dispatch import OPERATIONS
from commrt.pricing.slices import slots_of

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
"""Kinds of calls that a group remembers."""
Sides = tuple[Layout, Layout]
"""The layouts of what goes in, and of what comes out."""
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
        """Combine or copy all of `tensor`, which has one size on all ranks, in place."""
        is_root = self.rank == _root(collective, opts)
        gives = is_root or collective != "broadcast"
        takes = {"broadcast": not is_root, "reduce": is_root}.get(collective, True)
        put = [tensor] if gives else []
        taken = [tensor] if takes else []
        sides: Sides = "whole" if gives else "nothing", "whole" if takes else "nothing"
        return self._call(collective, tensor, put, taken, sides, opts)

    def pieces(self, collective: str, own: Tensor, pieces: Pieces, opts: Any = None) -> Call:
        """Exchange a piece for each rank, of which `own` is this rank's: gathers and scatters.

        `pieces` are outputs where `own` is an input, and inputs elsewhere. Those of a rooted
        collective are the root's. Others may differ in size, as all ranks know all sizes.
        """
        gathers = collective.endswith("gather")
        layout: Layout = "joined" if isinstance(pieces, Tensor) else "each"
        sizes: int | tuple[int, ...] = own.numel()
        if collective in ROOTED and self.rank != _root(collective, opts):
            pieces = []
            layout = "nothing"
        else:
            what = f"{'outputs' if gathers else 'inputs'} of {collective}"
            pieces = self._one_each(pieces, own, what, may_differ=collective not in ROOTED)
            if layout == "each":
                numels = tuple([piece.numel() for piece in pieces])
                sizes = numels if len(set(numels)) > 1 else sizes
        if gathers:
            return self._call(collective, own, [own], pieces, ("own", layout), opts, sizes)
        return self._call(collective, own, pieces, [own], (layout, "own"), opts, sizes)

    def barrier(self) -> Call:
        """Wait for all ranks."""
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        return self._call("barrier", token, [token], [], ("own", "nothing"), None)

    def all_to_all(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        result: Sequence[Tensor] | None = None,
    ) -> Call:
        """Copy the input of each rank's number there, to the output of this rank's number.

        `result` is what the call returns, if that is not `outputs`.
        """
        mine = self.rank
        size = self.size
        if len(outputs) != size or len(inputs) != size:
            raise UsageError(
                f"{len(inputs)} inputs and {len(outputs)} outputs of an all_to_all: give {size}"
                " each"
            )
        require_alike([*outputs, *inputs])
        copies: list[tuple[Tensor, Tensor]] = []
        taken = [row_of(one, torch.uint8, copies) for one in outputs]
        put = [row_of(one, torch.uint8) for one in inputs]
        sent = [row.numel() for row in put]
        received = [row.numel() for row in taken]
        if sent[mine] != received[mine]:
            raise UsageError(
                f"an all_to_all gives this rank {sent[mine]} bytes of its own, and its output has"
                f" {received[mine]}"
            )
        sizes, leaves, comes = exchange_places(mine, sent, received)
        first = outputs[0]
        kind = Kind("all_to_all", first.dtype, None, 0, sizes, leaves, comes, first.device)
        copies = [(taken[mine], put[mine]), *copies]
        return Call(kind, put, taken, result or outputs, copies=copies)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
    ) -> Call:
        """Copy the part of each rank's number to that rank; no sizes stand for equal parts."""
        require_alike([output, tensor])
        require_places(memory_of(output))  # of the whole, which the caller knows
        outputs = self._split(output, output_sizes)
        return self.all_to_all(outputs, self._split(tensor, input_sizes), [output])

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
        sides: Sides,
        opts: Any,
        sizes: int | tuple[int, ...] | None = None,
    ) -> Call:
        require_alike([like, *put, *taken])
        op: Any = option(opts, "reduceOp", ReduceOp.SUM) if collective in SUMS else None
        wire_dtype = torch.uint8 if op is None else like.dtype
        copies: list[tuple[Tensor, Tensor]] = []
        outputs = [row_of(each, wire_dtype, copies) for each in taken]
        is_in_place = sides == ("whole", "whole")
        inputs = outputs if is_in_place else [row_of(each, wire_dtype) for each in put]
        how = getattr(op, "op", op)
        root = _root(collective, opts)
        numel = like.numel() if sizes is None else sizes
        kind = self._kind(collective, numel, like.dtype, like.device, how, root, sides)
        factor = op.factor if kind.is_scaled else None
        if isinstance(factor, Tensor) and not torch.can_cast(factor.dtype, like.dtype):
            raise UsageError(
                f"a factor of {factor.dtype} for tensors of {like.dtype}: convert one of them"
            )
        return Call(kind, inputs, outputs, taken or [like], factor, copies)

    def _new_kind(
        self,
        collective: str,
        numel: int | tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        how: Any,
        root: int,
        sides: Sides,
    ) -> Kind:
        """Return the kind of a call with pieces of `numel` elements; raise if there is none."""
        require_root(self.size, root, collective)
        operation = None if how is None else _operation(how, dtype)
        slots = slots_of(collective, self.size)
        numels = numel if isinstance(numel, tuple) else (numel,) * slots
        width = 1 if operation else dtype.itemsize
        sizes = tuple([each * width for each in numels])
        put, take = [places(side, self.rank, slots, sizes[0]) for side in sides]
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

    def _one_each(
        self, pieces: Pieces, like: Tensor, what: str, *, may_differ: bool
    ) -> Sequence[Tensor]:
        """Return the tensors of a piece for each rank; raise for sizes that cannot work.

        This rank's has the size of `like`, and all others, unless they `may_differ`.
        """
        numel = like.numel()
        size = self.size
        if isinstance(pieces, Tensor):
            given: Sequence[Tensor] = [pieces]
            expected = [size * numel]
        else:
            given = pieces
            expected = [numel] * size
        numels = [tensor.numel() for tensor in given]
        if may_differ and len(numels) == size:
            expected = [*numels[: self.rank], numel, *numels[self.rank + 1 :]]
        if numels != expected:
            listed = f", {', '.join(map(text_of, given)):.200}," if given else ""
            raise UsageError(
                f"{len(given)} {what}{listed} beside {text_of(like)}: give {size} with as many"
                f" elements, or one with {size} times as many"
            )
        return given


def _root(collective: str, opts: Any) -> int:
    root: int = option(opts, "rootRank", 0) if collective in ROOTED else 0
    return root


def _operation(kind: Any, dtype: torch.dtype) -> str:
    """Return what is combined for torch's operation; raise if it fails on one element."""
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
    except (RuntimeError, TypeError) as error:  # the latter since torch 2.15
        raise UsageError(
            f"{operation} of {dtype} is not possible ({error}): convert the tensor first"
        ) from error
    return operation
