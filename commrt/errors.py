# SPDX-License-Identifier: Apache-2.0
"""The errors that commrt raises.

A message says what happened, what was expected, and what to do. `UsageError` is a ``ValueError``
and `DeadlineExceeded` a ``TimeoutError``, so code that does not import commrt can catch them. Any
thread raises and reads errors; only `TransportError` has fields that are written later.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


class CommrtError(Exception):
    """The base class of all errors of commrt."""


class UsageError(CommrtError, ValueError):
    """An argument or a call that cannot work.

    Raised before anything was sent, where it shows by then. What shows only later, such as a
    gradient that becomes ready twice in a step, is refused as soon as it does.
    """


class ScheduleError(CommrtError):
    """A schedule is malformed or breaks its promise; the message has the counter-example."""


class DisagreementError(CommrtError):
    """Ranks differ in schedule, bucket layout, settings or call at one point of the program."""

    def __init__(self, what: str, about: str | None = None) -> None:
        self.about = about
        """The name of the first field that differs, if it has one."""
        super().__init__(what)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the run an error happened; unknown fields are None."""

    rank: int | None = None
    peer: int | None = None
    step: int | None = None
    bucket: int | str | None = None
    hop: int | None = None
    nbytes: int | None = None

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {value}" for name, value in asdict(self).items() if value is not None
        )


class TransportError(CommrtError):
    """A transfer failed.

    `place` has its rank, peer, step, bucket, hop and nbytes, as far as they are known.
    """

    def __init__(self, what: str, place: Place | None = None) -> None:
        self.what = what
        self.place = place or Place()
        self.elsewhere = ""
        """What the peers reported for which this rank was waiting, if anything.

        Written after the failure, by whoever reads the reports (`commrt.store.reports.diagnose`).
        """
        self.call: tuple[str, str] | None = None
        """What the program had called, and which of several, where the place cannot say it.

        Written after the failure, before it is raised (`commrt.c10d.call_engine`).
        """
        super().__init__(what)

    def __str__(self) -> str:
        where = str(self.place)
        here = f"{self.what} [{where}]" if where else self.what
        return f"{here}. {self.elsewhere}" if self.elsewhere else here


class DeadlineExceeded(TransportError, TimeoutError):
    """A peer did not respond before the deadline; it may be slow, stopped or busy."""


class PeerLost(TransportError):
    """The connection to a peer broke. Most likely its process ended: look at that rank's output."""


class SizeMismatch(TransportError):
    """The two ends of a transfer disagree about its size: the ranks do not run the same program."""


OTHER_PROGRAMS = "the ranks make different calls, or one with different sizes"
"""Why two ends of a transfer may disagree."""


class CallMismatch(TransportError):
    """The two ends of a transfer belong to different calls: the ranks' programs differ."""


class TransportClosed(TransportError):
    """This rank closed the transport, or an earlier error did (see ``__cause__``)."""


class Evicted(TransportError):
    """The other ranks go on without this process, because it missed a deadline.

    End it; a launcher may start it again. `generation` is the number of the generation that goes on
    without it, `by` the rank that found it late (None if another process has its place now).
    """

    def __init__(self, why: str, place: Place, generation: int, by: int | None) -> None:
        self.generation = generation
        self.by = by
        self._why = why
        noticed = "" if by is None else f" (noticed by rank {by})"
        super().__init__(
            f"this process was evicted, and generation {generation} goes on without it:"
            f" {why}{noticed}. End this process; with backup workers, start the program again to"
            " take the rank's place",
            place,
        )

    def __reduce__(self) -> tuple[Any, ...]:  # for copies, and for pickles that cross processes
        return type(self), (self._why, self.place, self.generation, self.by), vars(self)


class QuorumLost(TransportError):
    """Too few ranks are left: below half of the last ones, or of what backup workers need."""
