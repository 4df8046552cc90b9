# SPDX-License-Identifier: Apache-2.0
"""A replica that gossips: after each optimizer step its weights leave for one partner, under the next forward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.errors import UsageError
from commrt.membership.progress import Progress
from commrt.model.admission import check_stateful
from commrt.model.anchor import Hook
from commrt.model.autograd import on_gradient
from commrt.model.state import Stateful
from commrt.recording import within_range
from commrt.replicas.bundles import Bundle
from commrt.replicas.handover import overwrite_states
from commrt.replicas.replica import Replica
from commrt.replicas.report import Span, StepReport
from commrt.replicas.rounds import Rounds
from commrt.runtime.elastic import LOST
from commrt.wire.buckets import Named
from commrt.wire.roster import Roster
from commrt.wire.stamp import Claim

__all__ = ["Gossiping"]


class Gossiping(Replica):
    """Near the others, and never waiting for more than one of them.

    A step is a backward pass outside of `no_sync`. When all optimizers have stepped after it, the values of parameters
    and of floating point buffers leave; each module's come back mixed before it next runs forward. If no optimizer
    steps, as under a `GradScaler` that met an infinity, they leave before that.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[Named],
        optimizers: Sequence[Optimizer],
        rounds: Rounds,
        bundles: Sequence[Bundle],
        number: int,
        *,
        alone: bool,
    ) -> None:
        super().__init__(model, params, rounds.algorithm, rounds)
        self.bundles = bundles
        """In the order in which they leave."""
        self._rounds, self._optimizers, self._number = rounds, optimizers, number
        self._roster = Roster(model)
        self._step = 0
        self._is_due = False
        self._waiting_for: set[int] = set()  # optimizers that have not stepped since the backward pass
        self._awaited: set[int] = set()  # bundles whose modules have told of a forward pass since the last launch
        self._progress: Progress | None = None  # inside join()
        self._joins = 0
        self._exposed_s = 0.0
        self._spans: deque[Span] = deque()
        self._heard: set[int] = set()
        rounds.world.elastic.begin(self, number, alone=alone)
        self._live([*self._on_modules(), *self._on_parameters(), *self._on_optimizers()])

    @property
    def step(self) -> int:
        """Steps so far."""
        return self._step

    def _go_on_at(self, step: int) -> None:
        self.drain()
        self._rounds.world.elastic.go_on_at(step)
        self._step = step

    def _on_modules(self) -> Iterator[RemovableHandle]:
        weakly = ref(self)
        places = {id(held.module): (held.module, set[int]()) for bundle in self.bundles for held in bundle.held}
        for bundle in self.bundles:
            for held in bundle.held:
                places[id(held.module)][1].add(bundle.index)

        def before_forward(module: nn.Module, _: Any) -> None:
            replica = weakly()
            if replica is not None:
                replica._before_forward(sorted(places[id(module)][1]))  # noqa: SLF001  # its own

        def before_saving(*_: Any) -> None:
            replica = weakly()
            if replica is not None:
                replica.drain()

        for module, _ in places.values():
            yield module.register_forward_pre_hook(Hook(before_forward))
        yield self.model.register_state_dict_pre_hook(Hook(before_saving))  # type: ignore[no-untyped-call]

    def _on_parameters(self) -> Iterator[RemovableHandle]:
        weakly = ref(self)

        def ready(_: Tensor) -> None:
            replica = weakly()
            if replica is not None:
                replica._end_of_pass()  # noqa: SLF001  # its own

        return (on_gradient(param, ready) for _, param in self._params)

    def _on_optimizers(self) -> Iterator[RemovableHandle]:
        for optimizer in self._optimizers:
            yield optimizer.register_step_pre_hook(self._before_step)
            yield optimizer.register_step_post_hook(self._after_step)

    def _end_of_pass(self) -> None:
        """A gradient has come: what the step exchanges is due when the optimizers have stepped."""
        if self._is_synchronous and not self._is_due:
            self._is_due = True
            self._waiting_for = {id(optimizer) for optimizer in self._optimizers}

    def _before_step(self, *_: Any) -> None:
        if failure := self._rounds.world.untold:
            raise failure

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._waiting_for.discard(id(optimizer))
        if self._is_due and not self._waiting_for:
            self._launch()

    def _before_forward(self, indices: Sequence[int]) -> None:
        if self._is_due and torch.is_grad_enabled() and self.model.training:
            self._launch()  # no optimizer has stepped
        self._awaited.update(indices)
        for index in indices:
            self._mix(self.bundles[index], self._rounds.algorithm.staleness)

    def _launch(self) -> None:
        """Send the weights as they are."""
        self._is_due, world = False, self._rounds.world
        if change := self._roster.difference():
            raise UsageError(f"the model has changed since attach(), {change}: detach() and attach() again")
        if len(self._rounds.members) > 1:
            for bundle in self.bundles:
                self._mix(bundle, self._rounds.algorithm.staleness)
            self._report()
            for bundle in self.bundles:
                claim = Claim(0, self._number, 0, self._step, bundle.index, 0)
                message = bundle.send(claim, world.elastic.room, world.transport.allocate)
                message.answer = self._rounds.submit(message, bundle.index, self._step)
            if self._progress is not None:
                self._progress.begin(self._step + 1)
            self._mix_what_nobody_awaits()
        self._step += 1

    def _mix_what_nobody_awaits(self) -> None:
        """Compiled modules call no hooks, nor do those whose parameters others use."""
        for bundle in self.bundles:
            if bundle.index not in self._awaited:
                self._mix(bundle, self._rounds.algorithm.staleness)
        self._awaited.clear()

    def _mix(self, bundle: Bundle, allowed: int) -> None:
        """Take what has come, until no more than `allowed` exchanges are under way."""
        while len(bundle.under_way) > allowed:
            begin_s = perf_counter()
            with within_range(self._rounds.world.recorder, "wait", number=bundle.index):
                span, heard = bundle.mix()
            self._exposed_s += perf_counter() - begin_s
            if span is not None:
                self._spans.append(span)
                self._heard.update(heard)

    def _report(self) -> None:
        if self._spans:
            spans, self._spans = tuple(self._spans), deque()
            heard, self._heard = frozenset(self._heard), set()
            self.last = StepReport(self._step - 1, self._rounds.members, self._exposed_s, spans, heard)
            self._stats = self._stats.plus(self.last)
            self._exposed_s = 0.0

    def drain(self) -> None:
        """See `Replica.drain`."""
        if self._is_due:  # no optimizer has stepped
            self._launch()
        for bundle in self.bundles:
            self._mix(bundle, 0)
        self._report()

    def average(self) -> None:
        """See `Replica.average`: the weights as they are, now."""
        if self._is_synchronous:
            self._launch()

    @contextmanager
    def join(self, *also: Stateful) -> Iterator[None]:
        """See `Replica.join`: a rank that leaves early goes on exchanging, and learns nothing, until all have left.

        Then all replicas become equal at their mean, and take the optimizers' state and that of `also` from one that
        worked to the end. Costs one store operation per step, and nobody waits for more than a partner until the end.
        Raises `UsageError` inside another ``join()``.
        """
        world = self._rounds.world
        if world.joined is not None:
            raise UsageError("join() inside join(): one model of a world can be joined at a time, around its loop")
        check_stateful(also)
        self._progress = self._begun_together(also)
        world.joined = self
        try:
            yield
            self._outlast(self._progress, also)
        finally:
            self._progress, world.joined = None, None

    def _begun_together(self, also: Sequence[Stateful]) -> Progress:
        world = self._rounds.world
        self._joins += 1
        shelf = PrefixStore(f"gossip {self._number} join {self._joins}", world.store)
        progress = Progress(shelf, world.rank, lambda: world.members, world.timeout_s, world.elastic.any_gone)
        progress.begin(self._step)
        world.agree("join", also=", ".join(type(owner).__name__ for owner in also), step=str(self._step))
        return progress

    def _outlast(self, progress: Progress, also: Sequence[Stateful]) -> None:
        """Exchange as long as somebody does, then become as all."""
        if self._is_due:
            self._launch()
        self._answer_the_others(progress)
        self._rounds.world.joined = None
        self.consolidate()
        self._rounds.world.elastic.together(lambda: self._take_states(progress.last(), also))

    def _answer_the_others(self, progress: Progress) -> None:
        while True:
            try:
                for _ in progress.outlast(self._step):
                    self._launch()
            except LOST as failure:
                self._rounds.world.elastic.recover_now(failure)
            else:
                return

    def _take_states(self, first: int, also: Sequence[Stateful]) -> None:
        self._rounds.first = first
        try:
            overwrite_states(self._rounds, [*self._optimizers, *also], self._step)
        finally:
            self._rounds.first = None

    def state_dict(self) -> dict[str, int | str]:
        """See `Replica.state_dict`; waits for all that is under way. Each rank saves a model of its own."""
        self.drain()
        return super().state_dict()

    def detach(self) -> None:
        """See `Replica.detach`; what is under way is not mixed any more."""
        super().detach()
        self._rounds.world.elastic.end(self)
        for bundle in self.bundles:
            bundle.under_way.clear()
        self._rounds.release()
