# SPDX-License-Identifier: Apache-2.0
"""The checked arguments of `attach`, and what every way to train does with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from commrt.buckets.gradient_bucket import GradientBucket, build_buckets
from commrt.buckets.layout import Named
from commrt.buckets.weight_bucket import WeightBucket
from commrt.errors import UsageError
from commrt.runtime.wire import AnyWire
from commrt.runtime.world import World
from commrt.schedule import Algorithm, Schedule
from commrt.training.admission import describe_algorithm, describe_buffers, describe_optimizers, have_state
from commrt.training.broadcast_state import overwrite_states
from commrt.training.model_state import Stateful
from commrt.training.replica import Replica

__all__ = ["Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """The checked arguments of `attach`."""

    world: World
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
    """None where `attach` was not told."""

    def build_buckets(self, params: Sequence[Named]) -> list[GradientBucket]:
        """Return buckets for `params`, given in ready order."""
        world, allocate = self.world, self.world.transport.allocate_shared
        return build_buckets(params, self.wire, self.cap_nbytes, world.attached, allocate, kind=self.kind)

    def require_nobody_lost(self) -> None:
        """Raise `UsageError` in a world that has lost a rank."""
        if self.world.lost:
            raise UsageError(
                f"{self.world.lost[0]}: only gossip of weights goes on without it where a model is attached anew: "
                "start again"
            )

    def claim(self, schedule: Schedule, buckets: Sequence[GradientBucket | WeightBucket]) -> dict[str, str]:
        """Return what must be equal on all ranks and cannot change afterwards."""
        counts = ([len(group["params"]) for group in optimizer.param_groups] for optimizer in self.optimizers)
        pairs = zip(self.optimizers, counts, strict=True)
        return {
            "algorithm": describe_algorithm(self.algorithm),
            "schedule": schedule.digest(),
            "buckets": "; ".join(bucket.description() for bucket in buckets),
            "buffers": describe_buffers(self.model),
            "optimizers": ", ".join(f"{type(each).__name__} of {count} parameters" for each, count in pairs),
        }

    def agree(self, claim: dict[str, str]) -> None:
        """Raise `DisagreementError` unless all ranks come with the same `claim` and the same optimizers."""
        optimizer = describe_optimizers(self.optimizers, self.params)
        self.world.agree("attach", model=str(self.world.attached), optimizer=optimizer, **claim)

    def begin(self, replica: Replica, prepare: Callable[[], object] = int) -> Replica:
        """Give all ranks rank 0's state, and call `prepare`; detaches the replica if that fails."""
        try:
            replica.overwrite_with_first()
            if have_state(self.optimizers):
                self.world.membership.together(lambda: overwrite_states(self.world, self.optimizers, 0))
            prepare()
        except BaseException:
            replica.detach()
            raise
        return replica

    def is_alone(self, topic: str) -> bool:
        """Return True on all ranks if no other model depends on who is left in the world; `topic` names such models."""
        others = self.world.membership.others()
        return self.world.all_equal(topic, f"more on rank {self.world.rank}" if others else "0")
