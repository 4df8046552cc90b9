# SPDX-License-Identifier: Apache-2.0
"""In which dtype the gradients of a parameter come, and in which a buffer of them travels.

Functions that keep and write nothing, for any thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commrt.runtime.wire import AnyWire, buffer_dtype, travels_as


def gradient_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of the gradients of `param`, which recent versions of torch let users
    choose.
    """
    chosen: torch.dtype | None = getattr(param, "grad_dtype", None)
    return param.dtype if chosen is None else chosen


def wire_dtype(own: torch.dtype, wire: AnyWire | None) -> torch.dtype:
    """Return the dtype of a wire buffer for values of dtype `own`: the narrower one; fp32 if it is
    quantized.
    """
    return buffer_dtype(travels_as(own, wire))
