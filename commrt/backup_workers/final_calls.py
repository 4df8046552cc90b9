# SPDX-License-Identifier: Apache-2.0
"""Functions of the user that are called once, before an error ends training.

`BackupWorkersReplica` owns the list, which `before_giving_up` fills. On the training thread, or
that of its backward pass where the error comes from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from commrt.errors import DeadlineExceeded, PeerLost, QuorumLost

_log = logging.getLogger("commrt")
ENDS_TRAINING = (QuorumLost, DeadlineExceeded, PeerLost)
"""Too few ranks are left, they do not answer, or the process that holds the store is gone."""


class FinalCalls(list[Callable[[], object]]):
    """Calls to make once, before an error ends training; `make` takes them out."""

    def make(self, error: BaseException) -> None:
        """Make the calls if `error` ends training; logs what they raise."""
        if isinstance(error, ENDS_TRAINING) or isinstance(error.__cause__, ENDS_TRAINING):
            while self:
                try:
                    self.pop(0)()
                except Exception:  # the other calls are made, and `error` is raised
                    _log.exception("commrt: a function given to before_giving_up() failed")
