# SPDX-License-Identifier: Apache-2.0
"""What the runtime calls for a wire of few bits: the functions of a `Carrier`.

See `commrt.runtime.wire_carrier`; the third one, `bind_values`, is that of `quantized_program`.
These write nothing and keep no state, so any thread may call them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commrt.errors import UsageError
from commrt.quantization.adaptive_bits import Adaptive
from commrt.quantization.quantized_program import bind_values
from commrt.quantization.step_bits import StepBits
from commrt.quantizer import Quantizer

__all__ = ["bind_values", "check_residual", "step_quantizer"]


def step_quantizer(wire: Quantizer | Adaptive) -> StepBits:
    """Return what chooses the quantizer of each step."""
    return StepBits(wire)


def check_residual(wire: Quantizer, residual: Tensor | None, tensor: Tensor) -> None:
    """Raise `UsageError` unless there is a residual for `tensor` exactly with feedback."""
    if wire.feedback != (residual is not None):
        raise UsageError(
            f"{wire} with residual={'a tensor' if residual is not None else None}: a wire with"
            " feedback needs a residual, where it keeps what rounding lost from call to call, and"
            " others take none"
        )
    if residual is None:
        return
    if (
        not isinstance(residual, Tensor)
        or residual.data_ptr() == tensor.data_ptr() != 0
        or residual.is_inference()
    ):
        raise UsageError(
            "residual= needs a tensor of its own, no inference tensor, of zeros at first, in each"
            " call"
        )
    right = (torch.float32, (tensor.numel(),), tensor.device, True)
    if (residual.dtype, residual.shape, residual.device, residual.is_contiguous()) != right:
        raise UsageError(
            f"residual= needs torch.zeros({tensor.numel()}, device={str(tensor.device)!r}), made"
            " once"
        )
