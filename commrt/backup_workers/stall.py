# SPDX-License-Identifier: Apache-2.0
"""Whether a reduction may wait for a rank that is stopped. Nobody knows which one is, so all ranks
are called to a roll call: they break off, and those that do not answer on the store are left out.
All that is written here of others are the calls on the store. `StallWatch` says which of two
threads runs what.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from commrt.elastic.elastic_membership import ElasticMembership
from commrt.runtime.generation import Generation
from commrt.threads.calls import start_call
from commrt.threads.deadline import Deadline

STALLED_S = 1.0
"""A reduction that takes so long may wait for a rank that is stopped."""


@dataclass(slots=True)
class _Reduction:
    """One that may stall. Only `is_called` changes: the thread that waits for the step sets it."""

    generation: Generation
    limit: Deadline
    is_called: bool = False
    """This rank has called all to a roll call, out of it."""


class StallWatch:
    """Watches the reductions of one model.

    `begin` and `end` run on the communication thread, which alone writes the fields here, and waits
    in a reduction in between. `call_if_stalled` runs on the thread that waits for the step.
    """

    def __init__(self, membership: ElasticMembership) -> None:
        self._membership = membership
        self._patience_s = STALLED_S
        self._latest: _Reduction | None = None
        self._is_running = False

    def begin(self) -> None:
        """A reduction begins. It may take twice as long as before if the roll call before it has
        found that nobody was missing.
        """
        generation = self._membership.generation
        before = self._latest
        if before is not None and before.is_called:
            was_slow = generation.connected == before.generation.connected
            self._patience_s = 2 * self._patience_s if was_slow else STALLED_S
        self._latest = _Reduction(generation, Deadline(self._patience_s))
        self._is_running = True

    def call_if_stalled(self) -> None:
        """Call all ranks to a roll call if the reduction takes too long."""
        latest = self._latest
        if latest is None or latest.is_called or not self._is_running:
            return
        if latest.limit.left_s <= 0:
            latest.is_called = True
            roster = self._membership.member.roster
            start_call(partial(roster.call_members, latest.generation))

    def end(self) -> None:
        """The exchange of the step has ended."""
        self._is_running = False
