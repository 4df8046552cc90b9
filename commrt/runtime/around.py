# SPDX-License-Identifier: Apache-2.0
"""What a replica wants to do around collectives, and at the end of its world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Around"]


@dataclass(slots=True)
class Around:
    """Callbacks of the replica that is attached to a world; each does nothing by default."""

    before_collective: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None
    """Before the world is closed in good order."""
    leave: Callable[[], None] = lambda: None
    """Before the others may think that this process is gone."""
    failed: Callable[[BaseException], None] = lambda _: None
    """A collective ended in an error."""
