# SPDX-License-Identifier: Apache-2.0
"""Where one rank stands in training: what it tells late ranks, and takes over when it was late.

All is written between exchanges, on the training thread or that of its backward pass. So the
communication thread may read it in an exchange.
"""

from __future__ import annotations

from commrt.backup_workers.replica_state import Snapshot
from commrt.backup_workers.skipping_guard import SkippingGuard
from commrt.training.riding import Riding


class Standing:
    """The version of one rank's weights, its session, and its order of gradients.

    Written here of others: the guard's count of steps, that it has no gradients (`drop`), and in
    `riding` who stops. Buckets and votes of another order or session are made by
    `BackupExchange.use_standing`, to be called after each method but `snapshot`.
    """

    def __init__(self, guard: SkippingGuard, riding: Riding) -> None:
        self._guard = guard
        self._riding = riding
        self.version = 0
        """The number of updates that this rank has applied; `BackupStep` adds one for each."""
        self.order: list[int] | None = None
        """The places of the parameters in the order in which gradients become ready; None before
        the first step, after which `BackupStep` sets it.
        """
        self.session = 1
        """One more than the number of checkpoints loaded since `attach`."""
        self.tried = (0, 0)
        """A step that is not over, and how often it was tried; `BackupStep` writes it after each
        step without this rank's gradients.
        """

    def snapshot(self, *, in_pass: bool) -> Snapshot:
        """Return where this rank stands."""
        # gradients that no optimizer has used; where a pass begins, its own replace them
        is_due = not in_pass and self._guard.is_due
        stopping = [*self._riding.known_to_stop]
        return Snapshot(
            self.version,
            optimizer_steps=self._guard.steps,
            order=self.order,
            session=self.session,
            in_pass=in_pass,
            is_due=is_due,
            stopping=stopping,
        )

    def follow(self, snapshot: Snapshot) -> None:
        """Go on where another rank stands, whose state this one has taken."""
        self._guard.drop()  # gradients of before
        self._guard.steps = snapshot.optimizer_steps
        self._riding.hear_of_stop(snapshot.stopping)
        # where it is due, the optimizers' step makes that version
        self.version = snapshot.version - 1 if snapshot.is_due else snapshot.version
        self.session = snapshot.session
        if snapshot.order is not None:
            self.order = snapshot.order

    def restart_at_step(self, version: int) -> None:
        """Go on at `version`: a checkpoint was loaded."""
        self._guard.steps = 0
        self.version = version
        self.session += 1
        self.tried = (0, 0)
