# SPDX-License-Identifier: Apache-2.0
"""Every error commrt raises on purpose.

::

    CommrtError
    ├── UsageError                 an argument or a call that cannot work; nothing was sent
    ├── ScheduleError              a schedule that is malformed or does not keep its promise
    ├── DisagreementError          ranks came with different schedules, layouts or settings
    └── TransportError             a transfer did not happen; carries rank, peer, step, bucket, hop
        ├── DeadlineExceeded       the peer is alive, as far as we know, but did not deliver in time
        ├── PeerLost               the connection to the peer broke: its process is gone
        ├── SizeMismatch           two ends of one transfer disagree about its size
        ├── TransportClosed        this side closed the transport, or an earlier error did
        ├── Evicted                the other ranks go on without this process
        └── QuorumLost             fewer ranks are left than gradients are needed for a step

A message says what happened, what was expected, and what to do. ``UsageError`` is a ``ValueError`` and
``DeadlineExceeded`` a ``TimeoutError``, so code that knows nothing of commrt can still catch them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = [
    "CommrtError",
    "DeadlineExceeded",
    "DisagreementError",
    "Evicted",
    "PeerLost",
    "Place",
    "QuorumLost",
    "ScheduleError",
    "SizeMismatch",
    "TransportClosed",
    "TransportError",
    "UsageError",
]


class CommrtError(Exception):
    """Root of the tree."""


class UsageError(CommrtError, ValueError):
    """An argument or a call that cannot work. Raised before anything was sent."""


class ScheduleError(CommrtError):
    """A schedule that is malformed or does not keep its promise; the message is the counter-example."""


class DisagreementError(CommrtError):
    """Ranks came to the same place with different schedules, bucket layouts or settings."""

    def __init__(self, what: str, about: str | None = None) -> None:
        self.about = about
        """The name of the first thing in which they differ, where it has one."""
        super().__init__(what)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the run a transfer belongs; unknown fields are None."""

    rank: int | None = None
    peer: int | None = None
    step: int | None = None
    bucket: int | str | None = None
    hop: int | None = None
    nbytes: int | None = None

    def __str__(self) -> str:
        known = ((f.name, getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{name} {value}" for name, value in known if value is not None)


class TransportError(CommrtError):
    """A transfer did not happen. `place` says which: rank, peer, step, bucket, hop, nbytes."""

    def __init__(self, what: str, place: Place | None = None) -> None:
        self.what = what
        self.place = place or Place()
        self.elsewhere = ""
        """What the ranks saw that this one was waiting for, if it could be learned."""
        super().__init__(what)

    def __str__(self) -> str:
        where = str(self.place)
        here = f"{self.what} [{where}]" if where else self.what
        return f"{here}. {self.elsewhere}" if self.elsewhere else here


class DeadlineExceeded(TransportError, TimeoutError):
    """A peer did not deliver or take a transfer before the deadline; it may be slow, stopped or elsewhere."""


class PeerLost(TransportError):
    """The connection to a peer broke. Its process most likely ended: look at that rank's own output."""


class SizeMismatch(TransportError):
    """The two ends of one transfer disagree about its size: the ranks do not run the same program."""


class TransportClosed(TransportError):
    """The transport was closed by this side, or shut down after an earlier error (see ``__cause__``)."""


class Evicted(TransportError):
    """The other ranks go on without this process, because it missed a deadline. End it; the launcher may restart it.

    `generation` is the number of the generation that this process is no member of, `by` the rank that found it late
    (None if another process has this rank's place now).
    """

    def __init__(self, why: str, place: Place, generation: int, by: int | None) -> None:
        self.generation, self.by = generation, by
        self._why = why
        noticed = "" if by is None else f" (noticed by rank {by})"
        super().__init__(
            f"this process was evicted, and generation {generation} goes on without it: {why}{noticed}. End this "
            "process; with backup workers, start the program again to take the rank's place",
            place,
        )

    def again(self) -> Evicted:
        """The same error, for the next call that it ends."""
        return Evicted(self._why, self.place, self.generation, self.by)


class QuorumLost(TransportError):
    """With backup workers: fewer ranks are left than gradients are needed for a step."""
