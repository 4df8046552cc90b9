# SPDX-License-Identifier: Apache-2.0
"""Memory that is sent from, made anew in each generation of ranks; reads the world only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from commrt.runtime.prepared import HasMembership

T = TypeVar("T")


class Renewed(Generic[T]):
    """What ``make()`` returns: memory that is sent from, and made anew in each generation of ranks.

    After connections broke, a peer may still read what it was sent before. For one thread.
    """

    def __init__(self, world: HasMembership, make: Callable[[], T]) -> None:
        self._world = world
        self._make = make
        self._made: T | None = None
        self._generation = -1

    def current(self) -> T:
        """Return the memory of the generation that runs; the first call makes it."""
        number = self._world.membership.number
        if self._made is None or self._generation != number:
            self._made = self._make()
            self._generation = number  # not before: a `make` that raised is called again
        return self._made
