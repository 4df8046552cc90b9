# SPDX-License-Identifier: Apache-2.0
"""Whether a reduction may wait for a rank that is stopped. Nobody knows which one is, so all ranks
are called to a roll call, which finds out.
"""

from __future__ import annotations

from functools import partial

from commrt.elastic.elastic_membership import ElasticMembership
from commrt.runtime.generation import Generation
from commrt.threads.calls import start_call
from commrt.threads.deadline import Deadline

STALLED_S = 1.0
"""A reduction that takes so long may wait for a rank that is stopped."""


class StallWatch:
    """Watches the reductions of one model.

    `begin` runs on the communication thread, which then waits inside a reduction; `look` and `end`
    on the training thread.
    """

    def __init__(self, membership: ElasticMembership) -> None:
        self._membership = membership
        self._patience_s = STALLED_S
        self._running: tuple[Generation, Deadline] | None = None
        self._called: Generation | None = None  # by this rank, out of its latest reduction

    def begin(self) -> None:
        """A reduction begins. It may take twice as long as before if the roll call before it has
        found that nobody was missing.
        """
        generation = self._membership.generation
        if self._called is not None:
            was_slow = generation.connected == self._called.connected
            self._patience_s = 2 * self._patience_s if was_slow else STALLED_S
            self._called = None
        self._running = generation, Deadline(self._patience_s)

    def look(self) -> None:
        """Call all ranks to a roll call if the reduction takes too long."""
        running = self._running
        if running is not None and running[1].left_s <= 0:
            self._running = None
            self._called = running[0]
            start_call(partial(self._membership.member.roster.call_members, running[0]))

    def end(self) -> None:
        """The step has ended."""
        self._running = None
