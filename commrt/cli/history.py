# SPDX-License-Identifier: Apache-2.0
"""``commrt train --report``: what each rank notes while it trains, and how all of that comes to one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from commrt.recording import Event, Timeline
from commrt.replicas.report import StepReport
from commrt.runtime.world import World

__all__ = [
    "MOST_TURNS",
    "TIMELINE_TURNS",
    "Departure",
    "History",
    "Notes",
    "Record",
    "Share",
    "Turn",
    "gathered",
    "noted",
]

MOST_TURNS = 20_000
"""Passes of the loop that a rank keeps: 3 MB or so."""
TIMELINE_TURNS = 40
"""Passes of which a timeline is kept, the first ones."""


class Turn(NamedTuple):
    """One pass of the training loop."""

    step: int
    seconds: float
    loss: float
    accuracy: float
    """Of this rank's part of the batch, before the update."""


class Share(NamedTuple):
    """What averaging was in one step, as one rank reports it; see `StepReport`."""

    step: int
    members: tuple[int, ...]
    heard: tuple[int, ...]
    counted: bool
    exposed_s: float
    comm_s: float | None
    """None where the library does not tell, as `nbytes_sent`."""
    nbytes_sent: int | None


class Departure(NamedTuple):
    """A rank that the others went on without."""

    rank: int
    step: int
    why: str


@dataclass(slots=True)
class History:
    """All that one rank noted."""

    rank: int
    turns: list[Turn] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    left_out: int = 0
    """Passes after `MOST_TURNS`."""

    def text(self) -> str:
        """As JSON, for `read`."""
        return json.dumps([self.rank, self.turns, self.shares, self.left_out])

    @classmethod
    def read(cls, text: str | bytes) -> History:
        """What `text` was made of."""
        rank, turns, shares, left_out = json.loads(text)
        kept = [Share(step, tuple(members), tuple(heard), *rest) for step, members, heard, *rest in shares]
        return cls(rank, [Turn(*turn) for turn in turns], kept, left_out)


@dataclass(frozen=True, slots=True)
class Record:
    """What all ranks that were left at the end had noted."""

    transport: str
    histories: tuple[History, ...]
    events: tuple[Event, ...]
    """The timelines of the first passes."""
    departures: tuple[Departure, ...] = ()


class Notes:
    """One rank's notes, taken after each pass."""

    def __init__(self, world: World) -> None:
        self.history = History(world.rank)
        self.timeline: Timeline | None = None
        self._world, self._before = world, world.recorder
        if isinstance(world.recorder, Timeline):  # --trace
            self.timeline = world.recorder
        else:
            world.recorder = self.timeline = Timeline(world.rank)
        self._events = 0
        self._last: StepReport | None = None
        self._begin_s = perf_counter()

    def take(self, step: int, loss: float, outputs: Tensor, digits: Tensor, report: StepReport | None) -> None:
        """Of the pass that ends now."""
        history, now_s = self.history, perf_counter()
        seconds, self._begin_s = now_s - self._begin_s, now_s
        if len(history.turns) >= MOST_TURNS:
            history.left_out += 1
            return
        right = float((outputs.detach().argmax(dim=1) == digits).float().mean())
        history.turns.append(Turn(step, round(seconds, 7), loss, right))
        self.share(report)
        if len(history.turns) == TIMELINE_TURNS:
            self.stop()

    def share(self, report: StepReport | None) -> None:
        """Of the latest step, once; gossip reports a step while the next one is made."""
        if report is not None and report is not self._last:
            self._last = report
            self.history.shares.append(_share(report))

    def stop(self) -> None:
        """Record no more."""
        if self.timeline is not None and not self._events:
            self._events = len(self.timeline.events)
            if self._world.recorder is self.timeline is not self._before:
                self._world.recorder = self._before

    @property
    def events(self) -> list[Event]:
        """What was recorded until `stop`."""
        return [] if self.timeline is None else self.timeline.events[: self._events]


def _share(report: StepReport) -> Share:
    told = bool(report.spans)
    return Share(
        report.step,
        report.members,
        tuple(sorted(report.heard)),
        report.counted,
        round(report.exposed_s, 7),
        round(report.comm_s, 7) if told else None,
        report.nbytes_sent if told else None,
    )


@contextmanager
def noted(world: World, *, wanted: bool) -> Iterator[Notes | None]:
    """Take notes meanwhile, if they are `wanted`."""
    notes = Notes(world) if wanted else None
    try:
        yield notes
    finally:
        if notes is not None:
            notes.stop()


def gathered(world: World, notes: Notes) -> Record | None:
    """What all noted, on the first rank that is left; collective."""
    world.store.set(f"history/{world.rank}", notes.history.text())
    world.store.set(f"history events/{world.rank}", json.dumps(notes.events))
    world.agree("history")
    record = None
    if world.rank == world.members[0]:
        histories = tuple(History.read(world.store.get(f"history/{rank}")) for rank in world.members)
        events = [event for rank in world.members for event in json.loads(world.store.get(f"history events/{rank}"))]
        departures = tuple(Departure(loss.rank, loss.step, loss.why) for loss in world.lost)
        record = Record(world.transport.kind, histories, tuple(events), departures)
    world.agree("history read")  # rank 0 may hold the store
    return record
