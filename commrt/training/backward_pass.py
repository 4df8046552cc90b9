# SPDX-License-Identifier: Apache-2.0
"""The backward pass that this thread runs: its number, and what is called at its end.

Writes nothing of others. Parts of torch's autograd engine that are used here are not public yet;
DDP and FSDP use the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

INTERRUPTED = (
    "{what} came from a backward pass inside or after one that did not end: an error interrupted"
    " it, or reentrant activation checkpointing is on (use use_reentrant=False)"
)
"""Replicas raise it, in their hooks of gradients: they know which pass their step is of."""
NO_PASS = -1
"""Stands for the number of a backward pass where there is none, as autograd has it."""
current_pass: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001
"""Return the number of the backward pass that this thread runs; `NO_PASS` outside of one."""
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
)
"""Call a function when the running backward pass has ended; ``backward()`` raises its error.

On the thread that ends the pass: the one that called ``backward()``, which waits else, or one of
autograd's.
"""


class PassEnd:
    """Calls `ended` where the running backward pass ends, then `anyway`; on an error only this.

    Made in a hook of the pass. After an error autograd drops it, on any thread, which calls
    `anyway`.
    """

    def __init__(self, ended: Callable[[], None], anyway: Callable[[], None]) -> None:
        self._ended = ended
        self._anyway: Callable[[], None] | None = anyway
        at_end_of_backward(self)

    def __call__(self) -> None:
        """End the pass; autograd calls this."""
        anyway = self._anyway
        self._anyway = None
        try:
            self._ended()
        finally:
            if anyway is not None:
                anyway()

    def __del__(self) -> None:  # autograd lets go of what an error keeps it from calling
        if self._anyway is not None:
            self._anyway()
