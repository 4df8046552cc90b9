# SPDX-License-Identifier: Apache-2.0
"""One step with backup workers: the first gradients that are ready count, and none uses the sum before all have it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from time import perf_counter, time
from typing import Any

import torch
from torch import nn

from commrt.algorithms import tree
from commrt.errors import UsageError
from commrt.membership.quorum import Outcome, Reduce, quorum_step
from commrt.membership.quorum_vote import QuorumVote, RankOperation
from commrt.membership.store_client import parse, require
from commrt.model.gate import Gate
from commrt.model.state import flatten, restore, unread_buffers
from commrt.recording import within_range
from commrt.replicas.engine import Cut, Engine
from commrt.replicas.report import Span, StepReport
from commrt.runtime.elastic import LOST
from commrt.threads.answer import Answer
from commrt.threads.lane import Result
from commrt.threads.streams import Mark
from commrt.transport.protocol import Moment
from commrt.wire.buckets import Bucket
from commrt.wire.ready import LaunchOrder
from commrt.wire.roster import Roster
from commrt.wire.row import Row
from commrt.wire.stamp import WIDTHS, Claim

__all__ = ["Backing"]

LOOK_S = 1.0


@dataclass(slots=True)
class _Pass:
    """What the thread that trains tells the lane of a backward pass."""

    settings: int
    ready: list[Answer[Mark]]
    """Of each bucket: it was taken, at that place of the stream."""
    ended: Answer[Mark]
    samples: int | None
    held: Result[Outcome] | None = None
    spans: list[Span] | None = None
    """Of the latest attempt."""
    seen: list[int] | None = None
    """In which order gradients became ready on the first member, if that is asked in this step."""


class Backing:
    """`begin` at the first gradient of a backward pass, `mark` for each, `finish` at its end.

    Between the first bucket that leaves and the end of `finish` all of it is the lane's.
    """

    def __init__(
        self, model: nn.Module, engine: Engine, gate: Gate, cut: Cut, needed: int, *, early: bool, with_buffers: bool
    ) -> None:
        self.version = 0
        """How many updates this rank's weights have seen."""
        self.order: list[int] | None = None
        """In which gradients become ready, as places among the parameters; None before the first step."""
        self.buffers = torch.empty(0, dtype=torch.uint8)
        """Those of the first member, as bytes, after the latest step that counted; where they are sent."""
        self.ballot: QuorumVote
        """To be set: steps that are done again after a checkpoint was loaded need a shelf of their own."""
        self._model, self._engine, self._gate, self._cut, self._needed = model, engine, gate, cut, needed
        self._early, self._world = early, engine.world
        self._with_buffers = with_buffers and any(True for _ in model.buffers())
        self._params = [named for bucket in engine.buckets for named in bucket.params]
        self._roster = Roster(model)
        self._attempts = (0, 0)  # a step that has still to be done, and how often that was tried
        self._pass: _Pass | None = None
        self._ready_s = self._late_s = 0.0
        self._arrange(engine.buckets)
        self.keep_buffers()

    def _arrange(self, buckets: Sequence[Bucket]) -> None:
        """Carry `buckets` from now on."""
        if buckets is not self._engine.buckets:
            self._engine.replace_buckets(buckets)
        self._launches = LaunchOrder([bucket.names for bucket in buckets])
        allocate = self._world.transport.allocate
        self._row = Row([*self._model.buffers()], allocate) if self._with_buffers else None
        self._room = self._world.elastic.room

    def go_on_at(self, version: int) -> None:
        """Weights of `version` were loaded; steps that this rank knew of are not those to come."""
        self.version, self._attempts = version, (0, 0)
        self.keep_buffers()

    def abandon(self, why: str) -> None:
        """The running pass will not end: let nobody wait for the rest of it."""
        running, self._pass = self._pass, None
        for told in [] if running is None else [*running.ready, running.ended]:
            if not told.given:
                told.fail(UsageError(why))

    def forget_pass(self) -> bool:
        """A backward pass was interrupted, by a loop that skips what does not fit into memory; False if it is known."""
        if self._pass is not None and self._pass.held is None:
            self._pass = None
            for bucket in self._engine.buckets:
                bucket.release()
            self._gate.drop()
        return self._pass is None

    def follow(self, order: Sequence[int] | None) -> None:
        """Cut buckets in the `order` in which gradients become ready, as the others do; between steps."""
        if order is not None and list(order) != self.order:
            self.order = list(order)
            self._arrange(self._cut(self._in_order()))

    def _in_order(self) -> list[Any]:
        return self._params if self.order is None else [self._params[i] for i in self.order]

    def keep_buffers(self) -> None:
        """What the buffers are now is what belongs to this version."""
        if any(True for _ in self._model.buffers()):
            self.buffers = flatten([*self._model.buffers()])

    def restore_buffers(self) -> None:
        """Become what belongs to this version."""
        if any(True for _ in self._model.buffers()):
            restore(self.buffers, [*self._model.buffers()], unread_buffers(self._model))

    def begin(self, samples: int | None) -> None:
        """The first gradient of a pass; raises `UsageError` if the model is not what was attached."""
        if change := self._roster.difference():
            raise UsageError(f"the model has changed since attach(), {change}: detach() and attach() again")
        self._launches.arm()
        self._gate.close()
        settings = self._gate.settings(self.version % (1 << WIDTHS.step))
        self._pass = _Pass(settings, [Answer() for _ in self._engine.buckets], Answer(), samples)

    def mark(self, name: str) -> None:
        """The gradient `name` is ready."""
        self._take(self._running(), self._launches.mark(name))

    def _running(self) -> _Pass:
        if self._pass is None:
            raise UsageError("a gradient outside of a backward pass: detach() and attach() again")
        return self._pass

    def _take(self, running: _Pass, indices: Iterable[int]) -> None:
        for index in indices:
            self._engine.buckets[index].take(self._claim(running, index), self._launches.is_ready)
            running.ready[index].give(self._world.lane.streams.mark())
            if self._early and running.held is None:
                running.held = self._world.lane.submit(lambda: self._hold(running))

    def _claim(self, running: _Pass, index: int) -> Claim:
        model = self._engine.buckets[index].model
        return Claim(0, model, self._gate.steps, self.version, index, running.settings)

    def finish(self) -> tuple[StepReport, Outcome]:
        """Wait for the end of the step; gradients are then the average, or zeros if this rank's came too late."""
        begin_s, running = perf_counter(), self._running()
        self._take(running, self._launches.rest())
        running.ended.give(self._world.lane.streams.mark())
        held = running.held or self._world.lane.submit(lambda: self._hold(running))
        with within_range(self._world.recorder, "wait", step=self.version):
            outcome = held.result()
        self._pass, step = None, self.version
        if outcome.counts:
            self._use(running)
        else:
            self.drop()
            self._attempts = (step, 0 if outcome.is_over else outcome.attempt)
        return self._report(running, outcome, step, perf_counter() - begin_s), outcome

    def _use(self, running: _Pass) -> None:
        for bucket in self._engine.buckets:
            bucket.settle()
        if self._row is not None:
            self._row.empty([*self._model.buffers()], unread_buffers(self._model))
        self.keep_buffers()
        self.version += 1
        self.follow(running.seen)
        self._gate.open()

    def drop(self) -> None:
        """Use nothing of the gradients at hand."""
        for bucket in self._engine.buckets:
            bucket.release()
        with torch.no_grad():
            for _, param in self._params:
                if param.grad is not None:
                    param.grad.zero_()
        self._gate.drop()

    def _report(self, running: _Pass, outcome: Outcome, step: int, exposed_s: float) -> StepReport:
        said = [parse("note on a gradient", note, _parts) for note in outcome.notes]
        samples = [count for count, _, _ in said if count is not None]
        closed_s = max((when for _, when, _ in said), default=0.0)
        late_s = max(self._ready_s - closed_s, 0.0) if closed_s and not outcome.counts else 0.0
        self._late_s = 0.0 if outcome.counts else self._late_s + late_s
        return StepReport(
            step,
            outcome.members,
            exposed_s,
            tuple(running.spans or ()),
            counted=outcome.counts,
            ended=not outcome.is_over,
            late_s=late_s,
            samples=sum(samples) if len(samples) == len(said) > 0 else None,
            dropped=tuple(rank for rank in range(self._world.size) if outcome.members and rank not in outcome.members),
            saved_s=max((late for _, _, late in said), default=0.0),
        )

    def _hold(self, running: _Pass) -> Outcome:
        """On the lane, all that follows."""
        elastic, step = self._world.elastic, self.version
        elastic.next_step, self._ready_s = step, time()
        generation = elastic.be_in(0)
        attempt = self._attempts[1] if self._attempts[0] == step else 0
        note = f"{'' if running.samples is None else running.samples}:{self._ready_s:.4f}:{self._late_s:.4f}"
        course = quorum_step(self._world.rank, generation, self._needed, step, attempt, note)
        try:
            outcome = self.ballot.run(course, generation, lambda wish: self._move(wish, running))
        finally:
            self._engine.members = tuple(self._world.members)
        if outcome.counts:
            self._unpack(outcome)
            elastic.progress()
        return outcome

    def _unpack(self, outcome: Outcome) -> None:
        with within_range(self._world.recorder, "unpack"):
            for bucket in self._engine.buckets:
                bucket.unpack()
        self.ballot.delete_old_steps(self.version, outcome.attempt + 1, is_first=outcome.members[0] == self._world.rank)

    def _move(self, wish: RankOperation, running: _Pass) -> bool | int | None:
        if isinstance(wish, Reduce):
            return self._reduce(wish, running)
        generation = self._world.elastic.be_in(wish.generation)
        return None if self.ballot.is_over else generation

    def _reduce(self, wish: Reduce, running: _Pass) -> bool:
        self._engine.members = wish.members
        if self._room != self._world.elastic.room:
            self._arrange_anew(running)
        try:
            running.spans = [self._gather(running, index, wish.step) for index in range(len(running.ready))]
            self._follow(running.ended)
            running.spans += self._broadcast(running, wish.step)
            self._world.transport.wait()
            self._tell_the_first(wish)
        except LOST as failure:
            self._world.elastic.let_go(failure)
            return False
        return True

    def _tell_the_first(self, wish: Reduce) -> None:
        """That this rank has the sum; the first member learns of all of them, or that one is gone."""
        flag = torch.ones(1, device="cpu")
        self._world.run_now(tree.reduce(len(wish.members)), flag, Moment(wish.step, "through"), wish.members)

    def _arrange_anew(self, running: _Pass) -> None:
        """In memory of the connections that there are now."""
        for ready in running.ready:
            self._follow(ready)
        launches = self._launches
        self._arrange(self._cut(self._in_order()))
        self._launches = launches
        for bucket in self._engine.buckets:
            bucket.take(self._claim(running, bucket.index), launches.is_ready)

    def _gather(self, running: _Pass, index: int, step: int) -> Span:
        self._follow(running.ready[index])
        return self._engine.gather_now(self._engine.buckets[index], step)

    def _follow(self, told: Answer[Mark]) -> None:
        """Wait until the thread that trains has come so far."""
        while not told.given:
            with suppress(TimeoutError):
                told.error(LOOK_S)
            self._world.elastic.require_open()
        self._world.lane.streams.follow(told.result())

    def _broadcast(self, running: _Pass, step: int) -> Iterable[Span]:
        """The first member's buffers, and in the first step its order of gradients."""
        if self._row is not None:
            self._row.fill([*self._model.buffers()])
            yield self._engine.broadcast_now(self._row.flat, step)
        if self.order is None:
            place = {name: i for i, (name, _) in enumerate(self._params)}
            seen = [place[name] for name in self._launches.seen]
            order = torch.tensor([*seen, *sorted(set(place.values()) - set(seen))], device="cpu")
            yield self._engine.broadcast_now(order, step)
            running.seen = order.tolist()


def _parts(note: bytes) -> tuple[int | None, float, float]:
    """How many samples, when all were there, and how late it had been; of what a rank says of its gradient."""
    count, when, late = note.decode().split(":")
    require(isfinite(float(when)) and isfinite(float(late)))
    return int(count) if count else None, float(when), float(late)
