# SPDX-License-Identifier: Apache-2.0
"""What the runtime needs of a wire of few bits: see `commrt.runtime.wire.Carrier`. Imported on use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from commrt.errors import UsageError
from commrt.program import Program
from commrt.quantization.adaptive import Adaptive, Progress
from commrt.quantization.quantized_program import (
    ZEROS,
    QuantizedBuffers,
    QuantizedProgram,
    bind_quantized,
    scratch_nbytes,
)
from commrt.quantization.short_sums import require_short_sums
from commrt.quantizer import Quantizer
from commrt.runtime.wire import ValuesOnWire
from commrt.transport.protocol import Transport

__all__ = ["QuantizerChooser", "bind_values", "check_residual", "require_short_sums", "step_quantizer"]


class QuantizerChooser:
    """The quantizer of each step: always the same one, or what an `Adaptive` wire's rule says.

    State of the communication thread.
    """

    def __init__(self, wire: Quantizer | Adaptive) -> None:
        self._wire = wire
        self._now = wire.quantizer(None) if isinstance(wire, Adaptive) else wire
        self._step: int | None = None
        self._squares: list[Tensor] = []  # of the norms of this step's buckets
        self._resumed: float | None = None  # the norm that a checkpoint holds

    def at(self, step: int) -> Quantizer:
        """Return the quantizer of `step`, after all of the step before was averaged."""
        if isinstance(self._wire, Adaptive) and step != self._step:
            norm = self.norm
            self._now = self._wire.quantizer(None if norm is None else Progress(step, norm))
            self._step, self._squares, self._resumed = step, [], None
        return self._now

    def note(self, average: Tensor) -> None:
        """Look at a bucket's `average`, fp32 [numel], of the step that runs."""
        if isinstance(self._wire, Adaptive):
            self._squares.append(torch.linalg.vector_norm(average, dtype=torch.float64).square())

    @property
    def norm(self) -> float | None:
        """The norm of the latest average, rounded to fp32, so that the order of additions makes no difference."""
        if not self._squares:
            return self._resumed
        return float(torch.stack(self._squares).sum().sqrt().float())

    def resume(self, norm: float | None) -> None:
        """Go on after a step whose average had this `norm`."""
        self._step, self._squares, self._resumed = None, [], norm


step_quantizer = QuantizerChooser


def bind_values(
    program: Program,
    quantizer: Quantizer,
    buffers: Sequence[ValuesOnWire],
    transport: Transport,
    allocate: Callable[[str, int], Tensor],
    calls: Iterator[int] = ZEROS,
) -> list[QuantizedProgram]:
    """Return, for each buffer, a program that runs its head and carries its values quantized; see `Carrier`."""
    codes = allocate("quantized", max(quantizer.nbytes(len(each.values)) for each in buffers))
    scratch = allocate("received", max(scratch_nbytes(program, len(each.values), quantizer) for each in buffers))
    memory = (
        QuantizedBuffers(each.values, codes[: quantizer.nbytes(len(each.values))], scratch, each.residual)
        for each in buffers
    )
    return [
        bind_quantized(program, each.head, own, quantizer, transport, calls)
        for each, own in zip(buffers, memory, strict=True)
    ]


def check_residual(wire: Quantizer, residual: Tensor | None, tensor: Tensor) -> None:
    """Raise `UsageError` unless there is a residual for `tensor` exactly where there is feedback."""
    if wire.feedback != (residual is not None):
        raise UsageError(
            f"{wire} with residual={'a tensor' if residual is not None else None}: a wire with feedback needs a "
            "residual, where it keeps what rounding lost from call to call, and others take none"
        )
    if residual is None:
        return
    if not isinstance(residual, Tensor) or residual.data_ptr() == tensor.data_ptr() != 0:
        raise UsageError("residual= needs a tensor of its own, of zeros at first: pass the same one in each call")
    right = (torch.float32, (tensor.numel(),), tensor.device, True)
    if (residual.dtype, residual.shape, residual.device, residual.is_contiguous()) != right:
        raise UsageError(f"residual= needs torch.zeros({tensor.numel()}, device={str(tensor.device)!r}), made once")
