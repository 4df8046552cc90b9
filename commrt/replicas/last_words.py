# SPDX-License-Identifier: Apache-2.0
"""What a user wants to be done before training ends in an error: once, whatever becomes of each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from commrt.errors import CommrtError, DeadlineExceeded, PeerLost, QuorumLost

__all__ = ["LastWords"]

_log = logging.getLogger("commrt")
ENDS = (QuorumLost, DeadlineExceeded, PeerLost)
"""Too few ranks are left, or they do not answer, or the process that holds the store is gone."""


class LastWords(list[Callable[[], object]]):
    """Calls to make, in order."""

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around what may find that training cannot go on."""
        try:
            yield
        except CommrtError as error:
            self.speak_of(error)
            raise

    def speak_of(self, error: BaseException) -> None:
        """Make the calls, if `error` means that training cannot go on."""
        if isinstance(error, ENDS) or isinstance(error.__cause__, ENDS):
            self._speak()

    def _speak(self) -> None:
        calls = [*self]
        self.clear()
        for call in calls:
            try:
                call()
            except Exception:  # the others are called, and what happened is raised
                _log.exception("commrt: what was to be called before giving up failed")
