# SPDX-License-Identifier: Apache-2.0
"""Who is told of what all ranks do together, and of the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Around"]


@dataclass(slots=True)
class Around:
    """What is called before and after all ranks do something together, and before the world is closed in good order."""

    gather: Callable[[str, bool], None] = lambda *_: None
    """Takes what they do, and whether it counts as a call of all."""
    disperse: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None
    leave: Callable[[], None] = lambda: None
    """Before the others may think that this process is gone."""
    failed: Callable[[BaseException], None] = lambda _: None
    """What all do together has."""
