# SPDX-License-Identifier: Apache-2.0
"""What one rank records of a run, as ``--report``, ``--trace`` and ``--curve`` ask: its training loop calls this."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from ddp_replica import DdpReplica
from history import HistoryRecorder, RunRecord, gather_record, write_timeline
from job import Job
from result import Part
from torch import Tensor, nn
from training_curve import TrainingCurve

import commrt
from commrt.threads.recording import Timeline

__all__ = ["RunRecorder"]


class RunRecorder:
    """Counts images and seconds, and records what the options of `job` ask for. All ranks make the same calls."""

    def __init__(self, job: Job, world: commrt.World, model: nn.Module) -> None:
        """Make it before `attach`: it must see gradients before they are averaged."""
        self._job, self._world = job, world
        self._curve = TrainingCurve(job, model)
        self._timeline: Timeline | None = None
        self._history: HistoryRecorder | None = None

    def start(self, replica: commrt.Replica | DdpReplica) -> None:
        """Begin, right before the loop."""
        self._replica, self._first_step, self._images = replica, replica.step, 0
        self._begin_s = perf_counter()
        if self._job.trace is not None:
            self._world.recorder = self._timeline = Timeline(self._world.rank)
        if self._job.report is not None:
            self._history = HistoryRecorder(self._world)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Record the body as a range of the timeline, if there is one."""
        recorder = self._world.recorder
        if recorder is None:
            yield
            return
        recorder.begin(name, {})
        try:
            yield
        finally:
            recorder.end()

    def end_step(self, step: int, loss: float, outputs: Tensor, digits: Tensor) -> None:
        """Record the step that ends now; call it before the next `zero_grad`. `outputs` are from before its update."""
        self._curve.record(loss)
        report = self._replica.last
        self._images += len(digits) * (report is None or report.counted)
        if self._history is not None:
            self._history.record_iteration(step, loss, outputs, digits, report)

    def stop(self) -> Part:
        """End, right after the loop, and write the timeline; return what this process took part in. Collective."""
        part = Part(self._replica.step - self._first_step, self._images, perf_counter() - self._begin_s)
        if self._timeline is not None and self._job.trace is not None:
            self._world.recorder = None
            write_timeline(self._world, self._timeline, self._job.trace)
        return part

    def save(self) -> RunRecord | None:
        """Write the curve; return what all ranks recorded, on the first that is left, with --report. Collective."""
        record = None
        if self._history is not None:
            self._history.record_averaged_step(self._replica.last)  # gossip reports its last step late
            record = gather_record(self._world, self._history)
        self._curve.save(self._world)
        return record
