# SPDX-License-Identifier: Apache-2.0
"""What a world calls of the model that is attached to it.

Only a model with backup workers, whose ranks vote on whose gradients count, sets ``world.hooks``,
when it is attached. It takes them away when it is detached; so does the end of a world (`ending`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions of the attached model; by default they do nothing.

    Called on the training thread, those about a close on the one that closes the world.
    """

    before_collective: Callable[[], None] = _nothing
    when_all_came: Callable[[], None] = _nothing
    """To a collective, before its work begins."""
    before_close: Callable[[], None] = _nothing
    """Only if the world has not failed."""
    before_leave: Callable[[], None] = _nothing
    """No task runs any more, and the other ranks still count on this process."""
    on_collective_error: Callable[[BaseException], None] = lambda _: None


NO_HOOKS = Hooks()
"""Those of all other worlds; the same object, so that ``is`` tells them apart."""
