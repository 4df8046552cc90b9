# SPDX-License-Identifier: Apache-2.0
"""What averaging costs: one step, and all of them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Span", "Stats", "StepReport"]


@dataclass(frozen=True, slots=True)
class Span:
    """What the lane did for one bucket, in seconds of ``time.perf_counter``."""

    bucket: int | str
    begin_s: float
    end_s: float
    nbytes_sent: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step was, and cost this rank."""

    step: int
    members: tuple[int, ...]
    """The ranks that took part: whose gradients were averaged, or that gossiped with each other."""
    exposed_s: float
    """How long ``backward()`` waited at its end: what it did not hide, and the lane's own wait for a processor."""
    spans: tuple[Span, ...]
    """The lane's work, bucket by bucket."""
    heard: frozenset[int] = frozenset()
    """By gossip: the ranks whose values were mixed in."""
    counted: bool = True
    """This rank's gradient was used; with backup workers it may have come too late."""
    ended: bool = False
    """With backup workers: so few ranks train still that nobody's gradient was used."""
    late_s: float = 0.0
    """With backup workers: how much later than the last that counted this rank's gradient was ready. So long would all
    have waited for it (clocks of hosts may differ)."""
    samples: int | None = None
    """With backup workers: how many the gradients that counted were made of, by the first dimension of what the models
    were given; None if a member could not say."""
    dropped: tuple[int, ...] = ()
    """With backup workers: the ranks whose gradients did not count, slow, stopped or gone."""
    saved_s: float = 0.0
    """With backup workers: how long all would have waited in earlier steps, as those who were late then say now."""

    @property
    def comm_s(self) -> float:
        """Time the lane was busy: packing, transfers, reductions, unpacking."""
        return sum(span.end_s - span.begin_s for span in self.spans)

    @property
    def nbytes_sent(self) -> int:
        """Bytes this rank sent."""
        return sum(span.nbytes_sent for span in self.spans)


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals over the steps since `attach`; fields as in `StepReport`, of all steps."""

    steps: int = 0
    comm_s: float = 0.0
    exposed_s: float = 0.0
    nbytes_sent: int = 0
    heard: frozenset[int] = frozenset()
    counted: int = 0
    """Steps in which this rank's gradient was used."""
    late_s: float = 0.0
    dropped: int = 0
    """Gradients of all ranks that were not used."""
    saved_s: float = 0.0
    samples: int = 0
    """As far as members could say."""

    def plus(self, report: StepReport) -> Stats:
        """With one more step."""
        return Stats(
            self.steps + 1,
            self.comm_s + report.comm_s,
            self.exposed_s + report.exposed_s,
            self.nbytes_sent + report.nbytes_sent,
            self.heard | report.heard,
            self.counted + report.counted,
            self.late_s + report.late_s,
            self.dropped + len(report.dropped),
            self.saved_s + report.saved_s,
            self.samples + (report.samples or 0),
        )
