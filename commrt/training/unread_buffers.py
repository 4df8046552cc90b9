# SPDX-License-Identifier: Apache-2.0
"""Which buffers of a model may be overwritten unnoticed by autograd; on the thread that trains."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def unread_buffers(model: nn.Module) -> frozenset[int]:
    """Return ids of buffers that a graph saves but does not read: BatchNorm's while it trains."""
    norms = (
        module for module in model.modules() if isinstance(module, _BatchNorm) and module.training
    )
    return frozenset(id(buffer) for norm in norms for buffer in norm.buffers(recurse=False))
