# SPDX-License-Identifier: Apache-2.0
"""Train by gossip: after each optimizer step the weights go to one partner while the next forward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed import PrefixStore
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.buckets.engine import Span
from commrt.buckets.layout import Header, Named
from commrt.buckets.weight_bucket import WeightBucket
from commrt.errors import UsageError
from commrt.runtime.elastic import LOST
from commrt.runtime.recording import within_range
from commrt.training.admission import ParameterList, check_stateful
from commrt.training.broadcast_state import overwrite_states
from commrt.training.gossip_exchange import GossipExchange, Progress
from commrt.training.hooks import ModuleHook, on_gradient
from commrt.training.model_state import Stateful
from commrt.training.replica import Replica, StepReport

__all__ = ["GossipReplica"]


class GossipReplica(Replica):
    """Train one replica by gossip; it stays close to the others, and waits for at most one of them at a time.

    A step is a backward pass outside of `no_sync`. When all optimizers have stepped after it, parameters and floating
    point buffers are sent. Before a module next runs forward, what its partner sent is mixed into its parameters. If
    no optimizer steps, as under a `GradScaler` that met an infinity, the weights are sent before the forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[Named],
        optimizers: Sequence[Optimizer],
        exchange: GossipExchange,
        buckets: Sequence[WeightBucket],
        number: int,
        *,
        alone: bool,
    ) -> None:
        super().__init__(model, params, exchange.algorithm, exchange)
        self.buckets = buckets
        """The buckets, in the order in which they are sent."""
        self._exchange, self._optimizers, self._number = exchange, optimizers, number
        self._parameters = ParameterList(model)
        self._is_due = False  # a backward pass has ended, and its step was not sent yet
        self._waiting_for: set[int] = set()  # optimizers that have not stepped since the backward pass
        self._hooked: set[int] = set()  # buckets whose modules have called a forward hook since the last step
        self._progress: Progress | None = None  # inside join()
        self._joins = 0
        self._exposed_s = 0.0
        self._spans: list[Span] = []
        self._heard: set[int] = set()
        exchange.world.elastic.begin(self, number, alone=alone)
        self._live([*self._register_on_modules(), *self._register_on_gradients(), *self._register_on_optimizers()])

    def _restart_at_step(self, step: int) -> None:
        self.drain()
        self._world.elastic.restart_at_step(step)
        super()._restart_at_step(step)

    def _weakly(self, call: Callable[..., None]) -> Callable[..., None]:
        """Return `call` without a reference to this replica, which a hook would keep alive for ever."""
        weakly, function = ref(self), call.__func__  # type: ignore[attr-defined]

        def called(*args: Any) -> None:
            if (replica := weakly()) is not None:
                function(replica, *args)

        return called

    def _register_on_modules(self) -> Iterator[RemovableHandle]:
        modules: dict[int, tuple[nn.Module, set[int]]] = {}
        for bucket in self.buckets:
            for held in bucket.held:
                modules.setdefault(id(held.module), (held.module, set()))[1].add(bucket.index)
        before_forward, drain = self._weakly(self._before_forward), self._weakly(self.drain)
        for module, indices in modules.values():
            ours = sorted(indices)
            yield module.register_forward_pre_hook(ModuleHook(lambda *_, ours=ours: before_forward(ours)))
        yield self.model.register_state_dict_pre_hook(ModuleHook(lambda *_: drain()))  # type: ignore[no-untyped-call]

    def _register_on_gradients(self) -> Iterator[RemovableHandle]:
        end_of_pass = self._weakly(self._end_of_pass)
        return (on_gradient(param, end_of_pass) for _, param in self._params)

    def _register_on_optimizers(self) -> Iterator[RemovableHandle]:
        for optimizer in self._optimizers:
            yield optimizer.register_step_pre_hook(self._before_step)
            yield optimizer.register_step_post_hook(self._after_step)

    def _end_of_pass(self, *_: Any) -> None:
        """Note that a step is due once the optimizers have stepped; called for each gradient."""
        if self._is_synchronous and not self._is_due:
            self._is_due = True
            self._waiting_for = {id(optimizer) for optimizer in self._optimizers}

    def _before_step(self, *_: Any) -> None:
        if failure := self._world.unraised_failure:
            raise failure

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._waiting_for.discard(id(optimizer))
        if self._is_due and not self._waiting_for:
            self._send()

    def _before_forward(self, indices: Sequence[int]) -> None:
        if self._is_due and torch.is_grad_enabled() and self.model.training:
            self._send()  # no optimizer has stepped
        self._hooked.update(indices)
        for index in indices:
            self._mix(self.buckets[index], self._exchange.algorithm.staleness)

    def _send(self) -> None:
        """Send the weights as they are now; this ends a step."""
        self._is_due, world, staleness = False, self._world, self._exchange.algorithm.staleness
        self._parameters.require_unchanged()
        if len(self._exchange.members) > 1:
            for bucket in self.buckets:
                self._mix(bucket, staleness)
            self._report()
            for bucket in self.buckets:
                header = Header(0, self._number, 0, self._step, bucket.index, 0)
                message = bucket.send(header, world.elastic.memory_epoch, world.transport.allocate)
                message.answer = self._exchange.submit(message, bucket.index, self._step)
            if self._progress is not None:
                self._progress.begin(self._step + 1)
            for bucket in self.buckets:
                if bucket.index not in self._hooked:  # compiled modules call no hooks, for instance
                    self._mix(bucket, staleness)
            self._hooked.clear()
        self._step += 1

    def _mix(self, bucket: WeightBucket, allowed: int) -> None:
        """Wait until at most `allowed` exchanges of `bucket` are in flight, and mix what the others brought."""
        while len(bucket.under_way) > allowed:
            begin_s = perf_counter()
            with within_range(self._world.recorder, "wait", number=bucket.index):
                span, heard = bucket.mix()
            self._exposed_s += perf_counter() - begin_s
            if span is not None:
                self._spans.append(span)
                self._heard.update(heard)

    def _report(self) -> None:
        if self._spans:
            spans, heard = tuple(self._spans), frozenset(self._heard)
            self.last = StepReport(self._step - 1, self._exchange.members, self._exposed_s, spans, heard)
            self._stats = self._stats.plus(self.last)
            self._spans, self._heard, self._exposed_s = [], set(), 0.0

    def drain(self) -> None:
        """Wait for all exchanges in flight and mix what they brought; not collective."""
        if self._is_due:  # no optimizer has stepped
            self._send()
        for bucket in self.buckets:
            self._mix(bucket, 0)
        self._report()

    def average(self) -> None:
        """Exchange the weights as they are now, in place of a backward pass; collective."""
        if self._is_synchronous:
            self._send()

    @contextmanager
    def join(self, *also: Stateful) -> Iterator[None]:
        """Let ranks run out of data at different times; collective, around the whole loop.

        A rank that runs out early goes on exchanging weights, without training, until all ranks have run out. Then all
        replicas become equal at their mean. They take the state of the optimizers and of `also` from a rank that
        trained to the end. This costs one store operation per step. Raises `UsageError` inside another ``join()``.
        """
        world = self._world
        if world.joined is not None:
            raise UsageError("join() inside join(): join one model of a world at a time, around its loop")
        check_stateful(also)
        self._progress = progress = self._begin_join(also)
        world.joined = self
        try:
            yield
            if self._is_due:
                self._send()
            self._exchange_until_all_end(progress)
            world.joined = None
            with world.collective("the end of join()"):
                self.consolidate()
                world.elastic.together(lambda: self._take_states(progress.last(), also))
        finally:
            self._progress, world.joined = None, None

    def _begin_join(self, also: Sequence[Stateful]) -> Progress:
        world = self._world
        self._joins += 1
        prefix = PrefixStore(f"gossip {self._number} join {self._joins}", world.store)
        progress = Progress(prefix, world.rank, lambda: world.members, world.timeout_s, world.elastic.any_gone)
        progress.begin(self._step)
        world.agree("join", also=", ".join(type(owner).__name__ for owner in also), step=str(self._step))
        return progress

    def _exchange_until_all_end(self, progress: Progress) -> None:
        while True:
            try:
                for _ in progress.outlast(self._step):
                    self._send()
            except LOST as failure:
                self._world.elastic.recover_now(failure)
            else:
                return

    def _take_states(self, source: int, also: Sequence[Stateful]) -> None:
        self._exchange.source = source
        try:
            overwrite_states(self._exchange, [*self._optimizers, *also], self._step)
        finally:
            self._exchange.source = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides model and optimizer; each rank saves a model of its own."""
        self.drain()
        return super().state_dict()

    def detach(self) -> None:
        """Remove all hooks, and drop exchanges that are in flight; not collective."""
        super().detach()
        self._world.elastic.end(self)
        for bucket in self.buckets:
            bucket.under_way.clear()
        self._exchange.release()
