# SPDX-License-Identifier: Apache-2.0
"""What a forked child must give up: connections and threads of its parent.

Any thread may add an object, which is kept weakly; it is called in a child's only thread.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class _Forkable(Protocol):
    def leave_to_parent(self) -> None:
        """Give up all connections in a forked child, without a word to the peers."""


_OPEN: WeakSet[_Forkable] = WeakSet()


def release_in_forked_child(opened: _Forkable) -> None:
    """Call ``opened.leave_to_parent()`` in each child forked while `opened` exists."""
    _OPEN.add(opened)


def _after_fork() -> None:
    for opened in tuple(_OPEN):
        opened.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
