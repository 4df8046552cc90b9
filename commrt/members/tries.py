# SPDX-License-Identifier: Apache-2.0
"""How often the same members try what all of them do together, before it is in vain."""

from __future__ import annotations

from collections.abc import Sequence

from commrt.errors import DeadlineExceeded, PeerLost, TransportError

__all__ = ["Tries"]

PATIENT, OF_BACKED, BROKEN, UNCONNECTED = 2, 4, 16, 2
"""Until a deadline that passes ends it; the same with backup workers, where a rank may be stopped again as soon as it
is back; until a connection that breaks does, if the one that sees why did not end; and until one that is not made."""


class Tries:
    """In a row, of the same members: who of them does not come lives, and will not come the next time either."""

    def __init__(self, *, have_backups: bool) -> None:
        self._of_deadlines = OF_BACKED if have_backups else PATIENT
        self._members: Sequence[int] = ()
        self._count = 0

    def are_in_vain(self, failure: TransportError, members: Sequence[int]) -> bool:
        """True if this one of `members`, which ended in `failure`, was the last.

        >>> tries = Tries(have_backups=False)
        >>> [tries.are_in_vain(DeadlineExceeded("late"), each) for each in [(0, 1, 2), (0, 1), (0, 1)]]
        [False, False, True]
        """
        self._count = self._count + 1 if members == self._members else 1
        self._members = members
        return self._count >= self._limit(failure)

    def _limit(self, failure: TransportError) -> int:
        if isinstance(failure, DeadlineExceeded):
            return self._of_deadlines
        return BROKEN if isinstance(failure, PeerLost) else UNCONNECTED
