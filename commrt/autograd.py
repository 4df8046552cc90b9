# SPDX-License-Identifier: Apache-2.0
"""The parts of torch's autograd engine that are not public yet; DDP and FSDP stand on the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = ["at_end_of_backward", "current_pass", "on_gradient"]


def current_pass() -> int:
    """The number of the backward pass that this thread runs; -1 outside of one."""
    return torch._C._current_graph_task_id()  # noqa: SLF001


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward pass has ended; its error is raised by ``backward()``."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


def on_gradient(param: nn.Parameter, callback: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `callback` with `param` each time a backward pass has added to ``param.grad``."""
    return cast("RemovableHandle", param.register_post_accumulate_grad_hook(callback))  # type: ignore[no-untyped-call]  # torch's own
