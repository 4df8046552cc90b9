# SPDX-License-Identifier: Apache-2.0
"""What the ranks record while they train, for ``--report`` and ``--trace``, gathered on one rank."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from gather import gather_on_first
from torch import Tensor

import commrt
from commrt.threads.recording import Timeline
from commrt.tools.pictures.files import chrome_trace, write

__all__ = [
    "MAX_ITERATIONS", "TIMELINE_ITERATIONS", "AveragedStep", "HistoryRecorder", "Iteration", "RankHistory", "RunRecord",
    "gather_record", "write_timeline",
]  # fmt: skip

Event = dict[str, Any]
"""A range of time in Chrome's trace format."""

MAX_ITERATIONS = 20_000
"""Iterations that a rank keeps: about 3 MB."""
TIMELINE_ITERATIONS = 40
"""The first iterations, of which a timeline is kept too."""


class Iteration(NamedTuple):
    """One pass of the training loop on one rank."""

    step: int
    seconds: float
    loss: float
    accuracy: float
    """On this rank's part of the batch, before the update."""


class AveragedStep(NamedTuple):
    """How one step was averaged, as one rank reports it; see `commrt.training.StepReport`."""

    step: int
    members: tuple[int, ...]
    received_from: tuple[int, ...]
    counted: bool
    exposed_s: float
    comm_s: float | None
    """None, like `nbytes_sent`, if the library does not report it."""
    nbytes_sent: int | None


@dataclass(slots=True)
class RankHistory:
    """Everything that one rank recorded."""

    rank: int
    iterations: list[Iteration] = field(default_factory=list)
    averaged_steps: list[AveragedStep] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    """The timeline of the first iterations."""
    left_out: int = 0
    """Iterations after `MAX_ITERATIONS`."""

    def to_json(self) -> str:
        """Return this history as text for `from_json`."""
        return json.dumps([self.rank, self.iterations, self.averaged_steps, self.events, self.left_out])

    @classmethod
    def from_json(cls, text: str) -> RankHistory:
        """Return the history that `to_json` wrote."""
        rank, iterations, averaged, events, left_out = json.loads(text)
        averaged = [AveragedStep(step, tuple(members), tuple(peers), *rest) for step, members, peers, *rest in averaged]
        return cls(rank, [Iteration(*each) for each in iterations], averaged, events, left_out)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What the ranks that were left at the end had recorded."""

    transport: str
    histories: tuple[RankHistory, ...]
    lost: tuple[commrt.elastic.Loss, ...] = ()
    """Ranks that the others went on without."""

    def members_by_step(self) -> dict[int, frozenset[int]]:
        """Return the ranks that took part in each step that a remaining rank has seen."""
        found = dict[int, frozenset[int]]()
        for history in self.histories:
            for averaged in history.averaged_steps:
                if averaged.members:
                    found[averaged.step] = found.get(averaged.step, frozenset()) | frozenset(averaged.members)
        return dict(sorted(found.items()))

    def mix_counts(self, ranks: int) -> list[list[int]]:
        """Return [ranks][ranks]: how often the first rank mixed in the weights of the second."""
        counts = [[0] * ranks for _ in range(ranks)]
        for history in self.histories:
            for averaged in history.averaged_steps:
                for peer in averaged.received_from:
                    counts[history.rank][peer] += 1
        return counts


class HistoryRecorder:
    """Records what one rank does, once per iteration.

    Replaces the recorder of `world` by a timeline during the first iterations, unless it is one already (--trace).
    """

    def __init__(self, world: commrt.World) -> None:
        self.history = RankHistory(world.rank)
        self._world, self._recorder_before = world, world.recorder
        self._timeline = world.recorder if isinstance(world.recorder, Timeline) else Timeline(world.rank)
        self._records_timeline = True
        world.recorder = self._timeline
        self._last_report: commrt.training.StepReport | None = None
        self._begin_s = perf_counter()

    def record_iteration(
        self, step: int, loss: float, outputs: Tensor, digits: Tensor, report: commrt.training.StepReport | None
    ) -> None:
        """Record the iteration that ends now, and `report`, how the latest known step was averaged."""
        history, now_s = self.history, perf_counter()
        seconds, self._begin_s = now_s - self._begin_s, now_s
        if len(history.iterations) >= MAX_ITERATIONS:
            history.left_out += 1
            return
        accuracy = float((outputs.detach().argmax(dim=1) == digits).float().mean())
        history.iterations.append(Iteration(step, round(seconds, 7), loss, accuracy))
        self.record_averaged_step(report)
        if len(history.iterations) == TIMELINE_ITERATIONS:
            self.stop_timeline()

    def record_averaged_step(self, report: commrt.training.StepReport | None) -> None:
        """Record `report` once; gossip reports a step during the next one."""
        if report is None or report is self._last_report:
            return
        self._last_report = report
        comm_s, nbytes_sent = (round(report.comm_s, 7), report.nbytes_sent) if report.spans else (None, None)
        peers, exposed_s = tuple(sorted(report.received_from)), round(report.exposed_s, 7)
        self.history.averaged_steps.append(
            AveragedStep(report.step, report.members, peers, report.counted, exposed_s, comm_s, nbytes_sent)
        )

    def stop_timeline(self) -> None:
        """Keep the timeline recorded so far, and record no more of it."""
        if self._records_timeline:
            self._records_timeline = False
            self.history.events = [*self._timeline.events]
            self._world.recorder = self._recorder_before


def gather_record(world: commrt.World, recorder: HistoryRecorder) -> RunRecord | None:
    """Return what all ranks recorded, on the first rank that is left; collective."""
    recorder.stop_timeline()
    texts = gather_on_first(world, "history", recorder.history.to_json())
    if texts is None:
        return None
    return RunRecord(world.transport.kind, tuple(map(RankHistory.from_json, texts)), world.lost)


def write_timeline(world: commrt.World, timeline: Timeline, path: str) -> None:
    """Let the first rank that is left write the timelines of all ranks to `path`; collective."""
    texts = gather_on_first(world, "trace", json.dumps(timeline.events))
    if texts is not None:
        text = json.dumps(chrome_trace(event for each in texts for event in json.loads(each)))
        write("--trace", path, lambda: Path(path).write_text(text, encoding="utf-8"))
