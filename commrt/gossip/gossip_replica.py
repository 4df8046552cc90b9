# SPDX-License-Identifier: Apache-2.0
"""A replica that trains by gossip: when its weights leave, and when what came is mixed in.

`attach` makes it. It also passes on the wish to stop. `weight_bucket` changes weights,
`gossip_exchange` sends. On the thread that trains; hooks of gradients run on that of the backward
pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from commrt.algorithms.gossip import Gossip
from commrt.buckets.plan import plan_buckets
from commrt.buckets.riders import Riders
from commrt.buckets.tensors import exchanged_tensors
from commrt.errors import UsageError
from commrt.gossip.gossip_exchange import GossipExchange
from commrt.gossip.stop import NO_STOP, Stop
from commrt.gossip.weight_bucket import WeightBucket
from commrt.training.after_step import AfterStepReplica
from commrt.training.replica import Replica
from commrt.training.request import Request
from commrt.training.riding_rules import NOT_ADDED_UP, RidingRules
from commrt.training.uncopied import ModuleHook


def attach(request: Request) -> Replica:
    """Return a replica that exchanges its weights with one partner after each step. Collective."""
    world = request.world
    algorithm = cast("Gossip", request.algorithm)
    exchange = GossipExchange(world, algorithm, request.number)
    held = exchanged_tensors(request.model)
    wire = cast("torch.dtype | None", request.wire)  # else it was refused
    messages = algorithm.staleness + 1
    watches = bool(request.optimizers)
    plan = plan_buckets(
        ((slot.tensor().nbytes, slot.tensor().dtype) for slot in held), request.cap_nbytes
    )
    buckets = [
        WeightBucket(
            index,
            [held[i] for i in places],
            wire,
            messages,
            world,
            watches=watches,
            has_digests=request.watch,
        )
        for index, places in enumerate(plan)
    ]
    if algorithm.within > 1 and any(bucket.rounds for bucket in buckets):
        raise UsageError(
            "wire= with within=: the weights of a row are summed on the wire, so each step would"
            " round them to it; leave wire out"
        )
    return request.open(
        exchange.schedule(0),
        buckets,
        partial(GossipReplica, request, exchange, buckets),
        prepare=partial(exchange.share, buckets),
        come=GossipReplica.come if world.size > world.founders else None,
    )


class GossipReplica(AfterStepReplica):
    """Train one replica by gossip; it stays close to the others, and waits for at most one of them.

    At the end of a step parameters and running statistics are sent. Before a module next runs
    forward, what its partner sent is mixed into its parameters. If no optimizer steps, as under a
    `GradScaler` that met an infinity, the weights are sent before the forward pass.

    It replaces `AfterStepReplica._on_pass`, called in each backward pass that counts, and
    `_advance`, called where a step ends; `_restart_at_step`, called where a state is loaded;
    `_record` and `_follow`, for a rank that comes; `_take_from_first`, for calls that send rank
    0's weights; and methods that users call. Of its parents' fields it writes `_spans` and
    `_received_from`, and of buckets `in_flight`, in `detach`.
    """

    def __init__(
        self, request: Request, exchange: GossipExchange, buckets: Sequence[WeightBucket]
    ) -> None:
        super().__init__(request, buckets, RidingRules(NOT_ADDED_UP))
        self._can_stop = cast("Gossip", request.algorithm).within == 1
        self._asked = False
        self._stop = NO_STOP
        self._heard: Riders | None = None  # what came with the latest message of the first bucket
        self.buckets = buckets
        """In the order in which they are sent."""
        self._exchange = exchange
        self._staleness = cast("Gossip", request.algorithm).staleness
        # buckets whose modules have called a forward hook since the last step
        self._hooked: set[int] = set()
        self._live_with([*self._register_on_modules(), *self._hooks()])

    def _restart_at_step(self, step: int) -> None:
        self.drain()
        self._world.membership.restart_at_step(step)
        super()._restart_at_step(step)

    def _record(self) -> dict[str, Any]:
        return super()._record() | {"stop": [*self._stop]}

    def _follow(self, record: Mapping[str, Any]) -> None:
        super()._follow(record)
        self._stop = Stop(*map(int, record["stop"]))

    def _register_on_modules(self) -> Iterator[RemovableHandle]:
        modules: dict[int, tuple[nn.Module, set[int]]] = {}
        for bucket in self.buckets:
            for slot in bucket.held:
                modules.setdefault(id(slot.module), (slot.module, set()))[1].add(bucket.index)
        before_state = ModuleHook(lambda *_: self.drain())
        for module, indices in modules.values():
            mix = ModuleHook(partial(self._before_forward, sorted(indices)))
            # others compute weights: spectral_norm, prune
            yield module.register_forward_pre_hook(mix, prepend=True)
            yield module.register_load_state_dict_pre_hook(before_state)  # type: ignore[no-untyped-call]
        yield self.model.register_state_dict_pre_hook(before_state)  # type: ignore[no-untyped-call]

    def _before_forward(self, indices: Sequence[int], *_: Any) -> None:
        clock = self._clock
        if clock.passes > clock.step and torch.is_grad_enabled() and self.model.training:
            if not (clock.is_used or self._steps.running):
                for bucket in self.buckets:
                    if not bucket.in_flight:
                        bucket.require_unwritten(anyway=True)
            self._end_all_steps()  # an optimizer has not stepped
        self._hooked.update(indices)
        for index in indices:
            self._mix(self.buckets[index], self._staleness)

    def _advance(self) -> None:
        """Send the weights as they are now."""
        step = self._clock.step
        if self._world.size > 1:
            for bucket in self.buckets:
                self._mix(bucket, self._staleness)
            if self._spans:  # of the step before
                self._close_report(step - 1, self._world.membership.ranks)
            for bucket in self.buckets:
                self._exchange.send(bucket, step, self._stop)
                bucket.note()
            for bucket in self.buckets:
                if bucket.index not in self._hooked:  # compiled modules call no hooks, for instance
                    self._mix(bucket, self._staleness)
            self._hooked.clear()
        else:
            self._close_report(step, (self._world.rank,))
        self._clock.end_step()

    def _mix(self, bucket: WeightBucket, allowed: int) -> None:
        """Wait until at most `allowed` exchanges of `bucket` are in flight, and mix what came."""
        while len(bucket.in_flight) > allowed:
            with self._waiting_for(bucket):
                self._heard = bucket.in_flight[0].heard if bucket.index == 0 else self._heard
                span, _, sources = bucket.mix(self._world.membership.outwait)
            self._spans.append(span)
            self._received_from.update(sources)

    def _on_pass(self) -> None:
        for bucket in self.buckets:
            if not bucket.in_flight:
                bucket.note(anyway=True)

    def stop(self) -> None:
        """See `Replica.stop`: ranks hear of it one by one, and stop after the same later step."""
        if not self._can_stop:
            raise UsageError(
                f"stop() with {self._algorithm}: messages of rows are added up; use within=1"
            )
        self._asked = True

    @property
    def stopping(self) -> tuple[int, ...]:
        """See `Replica.stopping`; read it in each step, as ranks pass on what they have read.

        It takes over what came, and fixes the step at which all stop if this rank has asked.
        """
        if self._heard is not None:
            (wish,) = self._heard.read()
            self._heard = None
            if wish["stop_at"]:
                self._stop = min(self._stop, Stop(int(wish["stop_at"]), int(wish["asker"])))
        if self._asked and self._stop == NO_STOP:
            self._stop = Stop(self._clock.passes + self._exchange.steps_to_all(), self._world.rank)
        return (self._stop.asker,) if self._clock.passes >= self._stop.step else ()

    def drain(self) -> None:
        """Wait for all exchanges in flight and mix what they brought; not collective."""
        self._end_all_steps()  # an optimizer has not stepped
        for bucket in self.buckets:
            self._mix(bucket, 0)
        if self._spans:
            self._close_report(self._clock.step - 1, self._world.membership.ranks)

    def _take_from_first(self, *, buffers_only: bool = False) -> None:
        self.drain()
        super()._take_from_first(buffers_only=buffers_only)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides optimizer and this rank's own model."""
        self.drain()
        return super().state_dict()

    def detach(self) -> None:
        """See `Replica.detach`; drops exchanges that are in flight."""
        super().detach()
        for bucket in self.buckets:
            bucket.in_flight.clear()
        self._exchange.release()
