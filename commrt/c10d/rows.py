# SPDX-License-Identifier: Apache-2.0
"""Tensors of callers as rows of a call: contiguous, in the wire's dtype, copied if they have gaps.

Runs on the thread that calls, and writes to no tensor. Waits for one that a functional collective
returned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commrt.errors import UsageError
from commrt.pricing.slices import WIRE_NBYTES
from commrt.runtime.all_reduce_call import is_expanded


def require_alike(tensors: Sequence[Tensor]) -> None:
    """Raise `UsageError` unless plain dense `tensors` have one dtype, on one device."""
    first = tensors[0]
    dtype = first.dtype
    device = first.device
    for tensor in tensors:
        if tensor.device.type not in WIRE_NBYTES or tensor.is_quantized:
            raise UsageError(
                f"{text_of(tensor)}: only plain tensors on a CPU or an NVIDIA GPU can travel"
            )
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"a tensor is {tensor.layout}: only all_reduce takes sparse ones; pass a dense copy"
            )
        if tensor.dtype is not dtype or tensor.device != device:
            raise UsageError(
                f"{text_of(tensor)} beside {text_of(first)}: all must have one dtype, on one device"
            )


def memory_of(tensor: Tensor) -> Tensor:
    """Return the memory of `tensor`; waits for one that a functional collective returned.

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


def row_of(
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
        require_places(plain)
        copies.append((plain, row))
    return row


def require_places(result: Tensor) -> None:
    """Raise `UsageError` unless each element of `result` has a place of its own."""
    if is_expanded(result):
        raise UsageError(
            f"{text_of(result)} has elements that share one place, so no result fits it: use its"
            " clone()"
        )


def text_of(tensor: Tensor) -> str:
    """Return how errors name `tensor`, such as ``float32[2, 3] on cpu``."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)} on {tensor.device}"
