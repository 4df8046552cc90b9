# SPDX-License-Identifier: Apache-2.0
"""Train by gossip: after each optimizer step the weights go to one partner while the next forward pass runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from commrt.algorithms.gossip import Gossip
from commrt.buckets.weight_bucket import WeightBucket, build_weight_buckets, exchanged_tensors
from commrt.errors import UsageError
from commrt.training.after_step import AfterStepReplica
from commrt.training.gossip_exchange import GossipExchange
from commrt.training.hooks import ModuleHook
from commrt.training.optimizer_steps import are_stepping
from commrt.training.replica import Replica
from commrt.training.request import Request

__all__ = ["GossipReplica", "attach"]


def attach(request: Request) -> Replica:
    """Return a replica that exchanges its weights with one partner after each step. Collective."""
    world, algorithm = request.world, cast("Gossip", request.algorithm)
    exchange = GossipExchange(world, algorithm, world.attached)
    buckets = build_weight_buckets(
        exchanged_tensors(request.model),
        cast("torch.dtype | None", request.wire),  # quantized ones were refused
        request.cap_nbytes,
        algorithm.staleness + 1,
        world.transport.allocate_shared,
        watches=bool(request.optimizers),
    )
    if algorithm.within > 1 and any(bucket.rounds for bucket in buckets):
        raise UsageError(
            "wire= with within=: the weights of a row are summed on the wire, so each step would round them to it; "
            "leave wire out"
        )
    request.agree(request.claim(exchange.prove(), buckets))
    alone = request.is_alone("gossiping models")
    if world.size > 1:
        exchange.share(buckets)
    return request.begin(GossipReplica(request, exchange, buckets, alone=alone))


class GossipReplica(AfterStepReplica):
    """Train one replica by gossip; it stays close to the others, and waits for at most one of them at a time.

    At the end of a step parameters and running statistics are sent. Before a module next runs forward, what its
    partner sent is mixed into its parameters. If no optimizer steps, as under a `GradScaler` that met an infinity, the
    weights are sent before the forward pass.
    """

    IN_FLIGHT = (
        "{name} was written while its exchange was in flight, and not by a step of an optimizer given to attach(): "
        "call replica.drain() before you write weights"
    )
    WRITTEN = (
        "{name} was written after a backward pass, and not by a step of an optimizer given to attach(): put a pass "
        "such as SAM's first one into replica.no_sync(), and give attach() no optimizers if you update weights by hand"
    )

    _reports_all = False

    def __init__(
        self, request: Request, exchange: GossipExchange, buckets: Sequence[WeightBucket], *, alone: bool
    ) -> None:
        super().__init__(request, buckets, alone=alone)
        self.buckets = buckets
        """The buckets, in the order in which they are sent."""
        self._exchange, self._staleness = exchange, exchange.staleness
        self._hooked: set[int] = set()  # buckets whose modules have called a forward hook since the last step
        self._live([*self._register_on_modules(), *self._hooks()], request.optimizers)

    def _restart_at_step(self, step: int) -> None:
        self.drain()
        self._exchange.membership.restart_at_step(step)
        super()._restart_at_step(step)

    def _register_on_modules(self) -> Iterator[RemovableHandle]:
        modules: dict[int, tuple[nn.Module, set[int]]] = {}
        for bucket in self.buckets:
            for slot in bucket.held:
                modules.setdefault(id(slot.module), (slot.module, set()))[1].add(bucket.index)
        before_forward, drain = self._weakly(self._before_forward), ModuleHook(self._weakly(self._drain))
        for module, indices in modules.values():
            mix = ModuleHook(partial(before_forward, sorted(indices)))
            yield module.register_forward_pre_hook(mix, prepend=True)  # others compute weights: spectral_norm, prune
            yield module.register_load_state_dict_pre_hook(drain)  # type: ignore[no-untyped-call]
        yield self.model.register_state_dict_pre_hook(drain)  # type: ignore[no-untyped-call]

    def _before_forward(self, indices: Sequence[int], *_: Any) -> None:
        if self._passes > self._step and torch.is_grad_enabled() and self.model.training:
            self._refuse_moved_weights()
            self._end_steps(self._passes)  # an optimizer has not stepped
        self._hooked.update(indices)
        for index in indices:
            self._mix(self.buckets[index], self._staleness)

    def _advance(self) -> None:
        """Send the weights as they are now."""
        if self._world.size > 1:
            for bucket in self.buckets:
                self._mix(bucket, self._staleness)
            self._report(self._step - 1, self._exchange.members)
            for bucket in self.buckets:
                self._exchange.send(bucket, self._step)
                bucket.note()
            if self._progress is not None:
                self._progress.begin(self._step + 1)
            for bucket in self.buckets:
                if bucket.index not in self._hooked:  # compiled modules call no hooks, for instance
                    self._mix(bucket, self._staleness)
            self._hooked.clear()
        self._step += 1

    def _mix(self, bucket: WeightBucket, allowed: int) -> None:
        """Wait until at most `allowed` exchanges of `bucket` are in flight, and mix what the others brought."""
        while len(bucket.in_flight) > allowed:
            with self._waiting_for(bucket):
                span, _, sources = bucket.mix()
            self._spans.append(span)
            self._received_from.update(sources)

    def _refuse_moved_weights(self) -> None:
        """Raise `UsageError` if weights were written after a pass, and no optimizer has stepped."""
        if not (self._have_stepped or are_stepping(self._optimizers)):
            names = (bucket.written(anyway=True) for bucket in self.buckets if not bucket.in_flight)
            if name := next(filter(None, names), None):
                raise UsageError(self.WRITTEN.format(name=name))

    def _on_pass(self) -> None:
        for bucket in self.buckets:
            if not bucket.in_flight:
                bucket.note(anyway=True)

    def _drain(self, *_: Any) -> None:
        self._end_steps(self._passes)  # an optimizer has not stepped
        for bucket in self.buckets:
            self._mix(bucket, 0)
        self._report(self._step - 1, self._exchange.members)

    def drain(self) -> None:
        """Wait for all exchanges in flight and mix what they brought; not collective."""
        self._drain()

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
