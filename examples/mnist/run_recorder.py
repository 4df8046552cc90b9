# SPDX-License-Identifier: Apache-2.0
"""What one rank counts and times while it trains, and the timeline of ``--trace``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from ddp_replica import DdpReplica
from gather import gather_on_first

import commrt
from commrt.threads.chrome_trace import chrome_trace
from commrt.threads.recording import Timeline
from commrt.tools.pictures.files import write

__all__ = ["Part", "RunRecorder"]


class Part(NamedTuple):
    """The part of a run that one process took part in."""

    steps: int
    images: int
    """Of this rank, in gradients that counted."""
    seconds: float


class RunRecorder:
    """Counts images and seconds of one rank, and records its timeline if `trace` names a file for
    it.
    """

    def __init__(
        self, world: commrt.World, replica: commrt.Replica | DdpReplica, trace: str | None
    ) -> None:
        self._world = world
        self._replica = replica
        self._trace = trace
        self._first_step = replica.step
        self._images = 0
        self._timeline = Timeline(world.rank)
        if trace is not None:
            world.recorder = self._timeline
        self._begin_s = perf_counter()

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

    def end_step(self, images: int) -> None:
        """Count the images of a step whose gradient counted."""
        report = self._replica.last
        if report is None or report.counted:
            self._images += images

    def stop(self) -> Part:
        """End the recording; the first rank that is left writes the timelines of all ranks.

        Collective.
        """
        part = Part(
            self._replica.step - self._first_step, self._images, perf_counter() - self._begin_s
        )
        if self._trace is not None:
            self._world.recorder = None
            self._write(self._trace)
        return part

    def _write(self, path: str) -> None:
        texts = gather_on_first(self._world, "trace", json.dumps(self._timeline.events))
        if texts is not None:
            text = json.dumps(chrome_trace(event for each in texts for event in json.loads(each)))
            write("--trace", path, lambda: Path(path).write_text(text, encoding="utf-8"))
