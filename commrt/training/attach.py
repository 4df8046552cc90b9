# SPDX-License-Identifier: Apache-2.0
"""Attach a model: the entry point for custom training loops, and what every way to train does with a request."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, Protocol, cast

from torch import nn
from torch.optim import Optimizer

from commrt.algorithms.torus import Torus2D
from commrt.buckets.gradient_bucket import GradientBucket, build_buckets
from commrt.buckets.layout import MIB, Named
from commrt.buckets.view_bucket import ViewBucket
from commrt.errors import UsageError
from commrt.runtime.init import current
from commrt.runtime.wire import AnyWire
from commrt.runtime.world import World
from commrt.schedule import SYNCHRONOUS, Algorithm, Schedule
from commrt.training.admission import (
    check_attach,
    check_stateful,
    comparable,
    describe_buffers,
    describe_optimizers,
    require_read_only_forward,
    wants_views,
)
from commrt.training.model_state import Stateful, overwrite_states
from commrt.training.replica import Replica, attached

__all__ = ["Request", "attach"]


class _Described(Protocol):
    def description(self) -> str: ...


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
    same_bits: bool

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

    def claim(self, schedule: Schedule, buckets: Iterable[_Described]) -> dict[str, str]:
        """Return what must be equal on all ranks and cannot change afterwards."""
        counts = [(each, [len(group["params"]) for group in each.param_groups]) for each in self.optimizers]
        return {
            "algorithm": comparable(repr(self.algorithm)),
            "schedule": schedule.digest(),
            "buckets": "; ".join(bucket.description() for bucket in buckets),
            "buffers": describe_buffers(self.model),
            "optimizers": ", ".join(f"{type(each).__name__} of {count} parameters" for each, count in counts),
        }

    def agree(self, claim: dict[str, str]) -> None:
        """Raise `DisagreementError` unless all ranks come with the same `claim` and the same optimizers."""
        optimizer = describe_optimizers(self.optimizers, self.params)
        self.world.agree("attach", model=str(self.world.attached), optimizer=optimizer, **claim)

    def begin(self, replica: Replica) -> Replica:
        """Give all ranks rank 0's state; detaches the replica if that fails."""
        try:
            replica.overwrite_with_first()
            groups = [(each, group) for each in self.optimizers for group in each.param_groups]
            if any(param in each.state for each, group in groups for param in group["params"]):  # ranks have agreed so
                self.world.membership.together(lambda: overwrite_states(self.world, self.optimizers, 0))
        except BaseException:
            replica.detach()
            raise
        return replica


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the collector: all that `attach` makes stays, and scanning it again took a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_garbage_collection()
def attach(  # noqa: PLR0913  # each has its default
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    algorithm: Algorithm = Torus2D(),  # noqa: B008  # a frozen value
    *,
    world: World | None = None,
    wire: AnyWire | None = None,
    bucket_cap_mb: float = 25.0,
    gradients: Literal["own", "views"] = "own",
    broadcast_buffers: bool = True,
    graphs: bool | None = None,
    same_bits: bool = False,
    also: Sequence[Stateful] = (),
) -> Replica:
    """Make `model` one replica of a world: from now on ``backward()`` averages its gradients over all ranks.

    Collective. All ranks begin with rank 0's parameters, buffers and optimizer state. During each backward pass
    buckets leave on the communication thread as their gradients become ready. ``backward()`` returns when all are
    averaged, in place in ``param.grad``; leave them alone until then. The hooks live as long as the model, or until
    `Replica.detach`.

    - `optimizer`: one, or all that step this model. ``step`` then refuses gradients that were never averaged, and ranks
      compare the optimizers' settings, now and in each step.
    - `wire`: the dtype that travels. bfloat16 or float16 halve the bytes; sums are formed in fp32 and rounded to the
      wire at each hop, and replicas stay bitwise equal. Gradients of no wider dtype travel as they are. A quantizer
      such as ``commrt.quantization.Int4()`` sends fewer bits; it needs an algorithm that sums in one step,
      ``commrt.Direct()``.
    - `bucket_cap_mb`: the size of a bucket, in MiB of gradients that travel together.
    - `gradients`: ``"views"`` keeps them in the buffers that travel, which saves the time of a copy and, on CPUs, its
      memory. ``param.grad`` is then the same memory in every step: clone what must outlive the next one. What views
      cannot do is refused (docs/integrations.md).
    - `broadcast_buffers`: send rank 0's buffers to all at the end of each synchronous step. A graph that was built with
      other values and has not run backward yet then ends in torch's own error. BatchNorm in training does not read its
      buffers, so this does not concern it.
    - `graphs`: after two steps with a schedule, a GPU captures what it does for a bucket, and replays it by one launch
      (docs/nccl.md). `Replica.why_not_graphs` says where it does not. False turns it off; True refuses what graphs
      cannot do.
    - `same_bits`: refuse an algorithm unless it adds all elements in one order, as `Direct` does. An average then has
      the same bits however gradients are cut into buckets (docs/same_bits.md).
    - `also`: with `BackupWorkers` a late rank takes the state of another. Name here what goes along with the
      optimizers, such as learning rate schedulers, a ``GradScaler``, an average of the weights.

    Raises `UsageError` for a model that cannot be averaged, `ScheduleError` for an algorithm that does not keep
    its promise, `DisagreementError` if ranks differ.
    """
    world = _checked(world)
    check_stateful(also, "attach(also=)")
    flags = {"broadcast_buffers": broadcast_buffers, "graphs": graphs, "same_bits": same_bits}
    params, optimizers, wire = check_attach(model, optimizer, algorithm, wire, bucket_cap_mb, gradients, flags)
    if world.size > 1:
        require_read_only_forward(model)
    kind = ViewBucket if wants_views(gradients, params, wire) else GradientBucket
    for (name, _), taken in zip(params, attached(param for _, param in params), strict=True):
        if taken:
            raise UsageError(f"{name} is attached already: detach() the first replica before attaching again")
    if (device := params[0][1].device).type == "cuda":
        world.connect(device)
    world.attached += 1
    chosen = int(bucket_cap_mb * MIB), kind, broadcast_buffers, graphs, same_bits
    request = Request(world, model, params, optimizers, also, algorithm, wire, *chosen)
    trained_by = getattr(algorithm, "trained_by", SYNCHRONOUS)  # an all-reduce says nothing
    return cast("Replica", import_module(trained_by).attach(request))


def _checked(world: World | None) -> World:
    if world is not None and not isinstance(world, World):
        raise UsageError(f"world={world!r} is no world: pass what commrt.init() returned, or leave it out")
    world = current() if world is None else world
    world.require_all_ranks("attach()")
    if world.membership.needed:
        raise UsageError(
            "a model with BackupWorkers is attached to this world, whose ranks do different numbers of steps: attach "
            "both as one, in an nn.ModuleList, or detach() it first"
        )
    return world
