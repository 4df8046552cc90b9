# SPDX-License-Identifier: Apache-2.0
"""The checked arguments of `attach`, and how every way to train makes its replica of them.

Ranks agree, then begin with rank 0's state: model, optimizers and `also` are overwritten. Where
processes may come later, the store learns what they must have. On the thread that trains, but for
`Request._own_settings`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import nn
from torch.optim import Optimizer

from commrt.algorithm import Algorithm
from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.plan import build_buckets
from commrt.buckets.tensors import Named
from commrt.runtime.wire import AnyWire
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.store.addresses import host_identity
from commrt.store.world_config import WorldConfig
from commrt.training.comparable_text import comparable, describe_buffers, describe_optimizers
from commrt.training.loss_scale import LossScales
from commrt.training.model_collectives import overwrite_states
from commrt.training.stateful import Stateful
from commrt.training.weight_copies import WeightCopies
from commrt.transport.names import chosen_transport

NO_FLAGS: Mapping[str, object] = {}
_log = logging.getLogger("commrt")


class _Described(Protocol):
    @property
    def nbytes(self) -> int: ...

    def description(self) -> str: ...


class _Replica(Protocol):
    def overwrite_with_first(self) -> None: ...

    def detach(self) -> None: ...


R = TypeVar("R", bound=_Replica)


@dataclass(frozen=True, slots=True)
class Request:
    """The checked arguments of `attach`, and what it made of them: `scales` and `copies`.

    Each bucket that it builds takes the text of the settings from it, for errors.
    """

    world: World
    number: int
    """The number of the model, among all that were attached to the world."""
    model: nn.Module
    params: Sequence[Named]
    optimizers: Sequence[Optimizer]
    also: Sequence[Stateful]
    algorithm: Algorithm
    wire: AnyWire | None
    cap_nbytes: int
    kind: type[GradientBucket]
    broadcast_buffers: bool
    graphs: bool | None
    same_bits: bool
    watch: bool
    scales: LossScales
    """Learns of scalers in optimizers' steps (`StepGuard`)."""
    copies: WeightCopies
    """Looks for more after optimizers' steps, where a replica says so."""

    def build_buckets(self, params: Sequence[Named]) -> list[GradientBucket]:
        """Return buckets for `params`, given in ready order."""
        world = self.world
        buckets = build_buckets(
            params,
            self.wire,
            self.cap_nbytes,
            self.number,
            world.transport.allocate_shared,
            kind=self.kind,
            riding=(world.rank, world.size),
        )
        for bucket in buckets:
            bucket.own_settings = self._own_settings
        return buckets

    def _own_settings(self) -> str:
        """Return rates and scales, for an error on the thread that unpacks."""
        rates = [
            f"lr={group['lr']:g}"
            for each in self.optimizers
            for group in each.param_groups
            if "lr" in group
        ]
        return ", ".join([*rates, str(self.scales)] if self.scales.known else rates)

    def open(
        self,
        schedule: Schedule,
        buckets: Iterable[_Described],
        make: Callable[[], R],
        *,
        flags: Mapping[str, object] = NO_FLAGS,
        prepare: Callable[[], object] | None = None,
        come: Callable[[R], R] | None = None,
        unsent: Callable[[], dict[str, str]] = dict,
    ) -> R:
        """Return the replica that `make` returns. Collective, but in a process that comes later.

        All ranks must have the same `schedule`, `buckets` and `flags`. Once they have agreed, they
        `prepare` what travels, and begin with rank 0's state. If there is `come`, processes may
        come later, and it makes the replica of such a process a member. `unsent` describes what it
        must have already, as nobody sends it.
        """
        buckets = [*buckets]
        claim = self._claim(schedule, buckets)
        for name, flag in flags.items():
            claim[name] = str(flag)
        world = self.world
        if come is not None and world.config is not None:
            world.config.require_same(world.rank, self.number, claim | unsent())
            return come(make())
        self._agree(claim)
        if prepare is not None:
            prepare()
        replica = make()
        self._begin(replica)
        if come is not None:
            self._publish(claim | unsent())  # of weights that are rank 0's now
        self._log_begin(schedule, buckets)
        return replica

    def _log_begin(self, schedule: Schedule, buckets: Sequence[_Described]) -> None:
        """Say in one line what trains, and how; one rank does."""
        world = self.world
        members = world.members
        if world.rank != members[0]:
            return
        params = [param for _, param in self.params]
        _log.info(
            "commrt: attached %s: %d ranks, %d on this host, over %s; %s, its schedule %s;"
            " %d tensors of %.3g MB in %d buckets; wire %s; memory of buckets %.3g MB",
            type(self.model).__name__,
            len(members),
            world.transport.per_host,
            world.transport.kind,
            self.algorithm,
            schedule.name,
            len(params),
            sum(param.nbytes for param in params) / 1e6,
            len(buckets),
            self.wire or "as they are",
            sum(bucket.nbytes for bucket in buckets) / 1e6,
        )

    def _claim(self, schedule: Schedule, buckets: Iterable[_Described]) -> dict[str, str]:
        """Return what must be equal on all ranks and cannot change afterwards."""
        optimizers = []
        for each in self.optimizers:
            count = [len(group["params"]) for group in each.param_groups]
            optimizers.append(f"{type(each).__name__} of {count} parameters")
        return {
            "algorithm": comparable(repr(self.algorithm)),
            "schedule": schedule.digest(),
            "buckets": "; ".join(bucket.description() for bucket in buckets),
            "buffers": describe_buffers(self.model),
            "optimizers": ", ".join(optimizers),
            "kinds in also=": ", ".join(type(each).__name__ for each in self.also),
            "second copies of weights": f"{len(self.copies.found)} in the optimizers",
            "watch": str(self.watch),
        }

    def _agree(self, claim: Mapping[str, str]) -> None:
        """Raise `DisagreementError` unless all ranks come with equal `claim` and optimizers."""
        optimizer = describe_optimizers(self.optimizers, self.params)
        self.world.agree("attach", model=str(self.number), optimizer=optimizer, **claim)

    def _begin(self, replica: _Replica) -> None:
        """Give all ranks rank 0's state; detaches the replica if that fails."""
        try:
            replica.overwrite_with_first()
            owners = [*self.also]
            if self._have_state():  # the same ones on all ranks, as they have agreed
                owners = [*self.optimizers, *self.also]
            self.world.membership.together(lambda: overwrite_states(self.world, owners, 0))
        except BaseException:
            replica.detach()
            raise

    def _have_state(self) -> bool:
        """Return True if an optimizer has state, as after steps before `attach`."""
        return any(
            param in each.state
            for each in self.optimizers
            for group in each.param_groups
            for param in group["params"]
        )

    def _publish(self, claim: dict[str, str]) -> None:
        """Let later processes come to this model, if they make the same `claim`."""
        world = self.world
        host = host_identity() if world.transport.one_host else None
        config = WorldConfig(
            world.founders, world.size, host, self.number, claim, chosen_transport()
        )
        config.publish(world.store)
