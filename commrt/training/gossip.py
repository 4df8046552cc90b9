# SPDX-License-Identifier: Apache-2.0
"""Train by gossip: after each optimizer step the weights go to one partner while the next forward pass runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.algorithms.gossip import Gossip
from commrt.buckets.engine import Span
from commrt.buckets.layout import Header, Named
from commrt.buckets.weight_bucket import WeightBucket, build_weight_buckets, exchanged_tensors
from commrt.errors import UsageError
from commrt.runtime.recording import within_range
from commrt.training.after_step import AfterStepReplica
from commrt.training.gossip_exchange import GossipExchange
from commrt.training.hooks import ModuleHook
from commrt.training.replica import Replica, StepReport
from commrt.training.request import Request
from commrt.training.step_guard import are_stepping

__all__ = ["GossipReplica", "attach"]

IN_FLIGHT = (
    "{name} was written while its exchange was in flight, and not by a step of an optimizer given to attach(): call "
    "replica.drain() before you write weights"
)
MOVED = (
    "{name} was written after a backward pass, and not by a step of an optimizer given to attach(): put a pass such as "
    "SAM's first one into replica.no_sync(), and give attach() no optimizers if you update weights by hand"
)


def attach(request: Request) -> Replica:
    """Return a replica that exchanges its weights with one partner after each step. Collective."""
    world, algorithm = request.world, cast("Gossip", request.algorithm)
    exchange, held = GossipExchange(world, algorithm), exchanged_tensors(request.model)
    wire = cast("torch.dtype | None", request.wire)  # quantized ones were refused
    messages, allocate = algorithm.staleness + 1, world.transport.allocate_shared
    buckets = build_weight_buckets(held, wire, request.cap_nbytes, messages, allocate)
    if algorithm.within > 1 and any(bucket.rounds for bucket in buckets):
        raise UsageError(
            "wire= with within=: the weights of a row are summed on the wire, so each step would round them to it; "
            "leave wire out"
        )
    request.agree(request.claim(exchange.prove_all(), buckets))
    alone = request.is_alone("gossiping models")
    if world.size > 1:
        exchange.share(buckets)
    replica = GossipReplica(
        request.model, request.params, request.optimizers, exchange, buckets, world.attached, alone=alone
    )
    return request.begin(replica, exchange)


class GossipReplica(AfterStepReplica):
    """Train one replica by gossip; it stays close to the others, and waits for at most one of them at a time.

    At the end of a step parameters and running statistics are sent. Before a module next runs forward, what its
    partner sent is mixed into its parameters. If no optimizer steps, as under a `GradScaler` that met an infinity, the
    weights are sent before the forward pass.
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
        super().__init__(model, params, optimizers, exchange.algorithm, exchange, number, alone=alone)
        self.buckets = buckets
        """The buckets, in the order in which they are sent."""
        self._exchange = exchange
        self._hooked: set[int] = set()  # buckets whose modules have called a forward hook since the last step
        self._exposed_s = 0.0
        self._spans: list[Span] = []
        self._received_from: set[int] = set()
        self._live([*self._register_on_modules(), *self._hooks()], optimizers)

    def _restart_at_step(self, step: int) -> None:
        self.drain()
        self._exchange.membership.restart_at_step(step)
        super()._restart_at_step(step)

    def _register_on_modules(self) -> Iterator[RemovableHandle]:
        modules: dict[int, tuple[nn.Module, set[int]]] = {}
        for bucket in self.buckets:
            for held in bucket.held:
                modules.setdefault(id(held.module), (held.module, set()))[1].add(bucket.index)
        before_forward, drain = self._weakly(self._before_forward), self._weakly(self.drain)
        for module, indices in modules.values():
            ours = sorted(indices)
            mix = ModuleHook(lambda *_, ours=ours: before_forward(ours))
            yield module.register_forward_pre_hook(mix, prepend=True)  # others compute weights: spectral_norm, prune
            yield module.register_load_state_dict_pre_hook(ModuleHook(lambda *_: drain()))  # type: ignore[no-untyped-call]
        yield self.model.register_state_dict_pre_hook(ModuleHook(lambda *_: drain()))  # type: ignore[no-untyped-call]

    def _before_forward(self, indices: Sequence[int]) -> None:
        if self._passes_due and torch.is_grad_enabled() and self.model.training:
            self._refuse_moved_weights()
            self._end_steps(self._passes_due)  # an optimizer has not stepped
        self._hooked.update(indices)
        for index in indices:
            self._mix(self.buckets[index], self._exchange.algorithm.staleness)

    def _advance(self) -> None:
        """Send the weights as they are now."""
        world, staleness = self._world, self._exchange.algorithm.staleness
        if len(self._exchange.members) > 1:
            for bucket in self.buckets:
                self._mix(bucket, staleness)
            self._report()
            for bucket in self.buckets:
                header = Header(0, self._number, 0, self._step, bucket.index, 0)
                message = bucket.send(header, world.membership.memory_epoch, world.transport.allocate)
                message.answer = self._exchange.submit(message, bucket.index, self._step)
            self._note_writes()
            if self._progress is not None:
                self._progress.begin(self._step + 1)
            for bucket in self.buckets:
                if bucket.index not in self._hooked:  # compiled modules call no hooks, for instance
                    self._mix(bucket, staleness)
            self._hooked.clear()
        self._step += 1

    def _mix(self, bucket: WeightBucket, allowed: int) -> None:
        """Wait until at most `allowed` exchanges of `bucket` are in flight, and mix what the others brought."""
        while len(bucket.in_flight) > allowed:
            self._refuse_writes_to(bucket)
            begin_s = perf_counter()
            with within_range(self._world.recorder, "wait", number=bucket.index):
                span, received_from = bucket.mix()
            self._note_writes_to(bucket)
            self._exposed_s += perf_counter() - begin_s
            if span is not None:
                self._spans.append(span)
                self._received_from.update(received_from)

    @property
    def _knows_writers(self) -> bool:
        """True if all but optimizers that were given, and do not step now, may be taken for strangers."""
        return bool(self._optimizers) and not are_stepping(self._optimizers)

    def _refuse_writes(self) -> None:
        for bucket in self.buckets:
            self._refuse_writes_to(bucket)

    def _refuse_writes_to(self, bucket: WeightBucket) -> None:
        if bucket.in_flight and self._knows_writers and (name := bucket.watch.written(may_be_put_back=False)):
            raise UsageError(IN_FLIGHT.format(name=name))

    def _refuse_moved_weights(self) -> None:
        """Raise `UsageError` if weights were written after a pass, and no optimizer has stepped."""
        if self._stepped or not self._knows_writers:
            return
        names = (bucket.watch.written(may_be_put_back=True) for bucket in self.buckets if not bucket.in_flight)
        if name := next(filter(None, names), None):
            raise UsageError(MOVED.format(name=name))

    def _on_pass(self) -> None:
        for bucket in self.buckets if self._optimizers else ():
            if not bucket.in_flight:
                bucket.watch.note()

    def _note_writes(self) -> None:
        for bucket in self.buckets:
            self._note_writes_to(bucket)

    def _note_writes_to(self, bucket: WeightBucket) -> None:
        if bucket.in_flight and self._optimizers:
            bucket.watch.note()

    def _report(self) -> None:
        if self._spans:
            spans, received_from = tuple(self._spans), frozenset(self._received_from)
            self.last = StepReport(self._step - 1, self._exchange.members, self._exposed_s, spans, received_from)
            self._stats = self._stats.plus(self.last)
            self._spans, self._received_from, self._exposed_s = [], set(), 0.0

    def drain(self) -> None:
        """Wait for all exchanges in flight and mix what they brought; not collective."""
        self._end_steps(self._passes_due)  # an optimizer has not stepped
        for bucket in self.buckets:
            self._mix(bucket, 0)
        self._report()

    def overwrite_with_first(self) -> None:
        """Send parameters and buffers of rank 0 to all; what is in flight ends first. See `Replica`."""
        self.drain()
        super().overwrite_with_first()

    def sync_buffers(self) -> None:
        """Overwrite this rank's buffers with rank 0's; what is in flight ends first. See `Replica`."""
        self.drain()
        super().sync_buffers()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides model and optimizer; each rank saves a model of its own."""
        self.drain()
        return super().state_dict()

    def detach(self) -> None:
        """Remove all hooks, and drop exchanges that are in flight; not collective."""
        super().detach()
        for bucket in self.buckets:
            bucket.in_flight.clear()
        self._exchange.release()
