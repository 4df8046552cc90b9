# SPDX-License-Identifier: Apache-2.0
"""What one step of a rank did and cost, and the totals of all: plain records, which never change.

Replicas make them where a step ends: on the thread that trains, or that of its backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from commrt.buckets.span import Span


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, and what it cost this rank."""

    step: int
    members: tuple[int, ...]
    """The ranks that took part: whose gradients were averaged, or that gossiped with each other."""
    exposed_s: float
    """Seconds that ``backward()`` waited at its end for communication or a processor to run it."""
    spans: tuple[Span, ...]
    """The communication thread's work, bucket by bucket."""
    received_from: frozenset[int] = frozenset()
    """Gossip: the ranks whose values were mixed in."""
    counted: bool = True
    """True if this rank's gradient was used; with backup workers it may have come too late."""
    ended: bool = False
    """Backup workers: True if too few ranks still train, so that no gradient was used."""
    late_s: float = 0.0
    """Backup workers: how much later its gradient was ready than the last one that counted.

    Without backups all ranks would have waited so long (clocks of hosts may differ).
    """
    samples: int | None = None
    """Backup workers: samples of the gradients that counted; None if a member could not say.

    By the first dimension of the models' inputs.
    """
    dropped: tuple[int, ...] = ()
    """Backup workers: ranks whose gradients did not count, as they were slow, stopped or gone."""
    saved_s: float = 0.0
    """Backup workers: what all would have waited in earlier steps, as late ranks report now."""

    @property
    def comm_s(self) -> float:
        """Time for which the communication thread packed, transferred, reduced and unpacked."""
        return sum(span.end_s - span.begin_s for span in self.spans)

    @property
    def nbytes_sent(self) -> int:
        """Number of bytes that this rank sent."""
        return sum(span.nbytes_sent for span in self.spans)


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals since `attach`; the fields are those of `StepReport`."""

    steps: int = 0
    comm_s: float = 0.0
    exposed_s: float = 0.0
    nbytes_sent: int = 0
    received_from: frozenset[int] = frozenset()
    counted: int = 0
    """Steps in which this rank's gradient was used."""
    late_s: float = 0.0
    dropped: int = 0
    """Gradients of all ranks that were not used."""
    saved_s: float = 0.0
    samples: int = 0
    """Samples of all steps, without those in which a member could not say."""

    def plus(self, step: StepReport, *, steps: int = 1) -> Stats:
        """Return the totals with one more step; with 0 `steps` for exchanges between two."""
        comm_s = 0.0
        nbytes_sent = 0
        for span in step.spans:
            comm_s += span.end_s - span.begin_s
            nbytes_sent += span.nbytes_sent
        return Stats(
            self.steps + steps,
            self.comm_s + comm_s,
            self.exposed_s + step.exposed_s,
            self.nbytes_sent + nbytes_sent,
            self.received_from | step.received_from,
            self.counted + (steps if step.counted else 0),
            self.late_s + step.late_s,
            self.dropped + len(step.dropped),
            self.saved_s + step.saved_s,
            self.samples + (step.samples or 0),
        )
