# SPDX-License-Identifier: Apache-2.0
"""Attach a model: the entry point for custom training loops."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
from torch import nn
from torch.optim import Optimizer

from commrt.adaptive import Adaptive
from commrt.algorithms.backup import BackupWorkers
from commrt.algorithms.gossip import Gossip
from commrt.algorithms.local import LocalSGD
from commrt.algorithms.torus import Torus2D
from commrt.buckets.engine import Engine
from commrt.buckets.gradient_bucket import GradientBucket, build_buckets
from commrt.buckets.layout import MIB, Named
from commrt.buckets.view_bucket import ViewBucket
from commrt.buckets.weight_bucket import WeightBucket, build_weight_buckets, exchanged_tensors
from commrt.coding import Coding
from commrt.errors import UsageError
from commrt.membership.agreement import WorldConfig
from commrt.membership.launcher import chosen_transport
from commrt.runtime.init import current
from commrt.runtime.world import World
from commrt.schedule import Algorithm, Schedule
from commrt.training.admission import (
    check_attach,
    check_stateful,
    describe_algorithm,
    describe_buffers,
    describe_optimizers,
    have_state,
    require_read_only_forward,
    wants_views,
)
from commrt.training.backup_workers import BackupWorkersReplica
from commrt.training.broadcast_state import Broadcaster, WorldBroadcaster, overwrite_states
from commrt.training.fragment import cut_fragments
from commrt.training.fragment_exchange import FragmentExchange
from commrt.training.gossip import GossipReplica
from commrt.training.gossip_exchange import GossipExchange
from commrt.training.local import LocalReplica
from commrt.training.model_state import Stateful, dump, flatten, load
from commrt.training.replica import Replica, attached, attached_to
from commrt.training.synchronous import SynchronousReplica
from commrt.transport.channel import host_identity
from commrt.transport.protocol import Allocate

__all__ = ["attach"]

Optimizers = Optimizer | Sequence[Optimizer] | None


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
    optimizer: Optimizers = None,
    algorithm: Algorithm = Torus2D(),  # noqa: B008  # a frozen value
    *,
    world: World | None = None,
    wire: torch.dtype | Coding | Adaptive | None = None,
    bucket_cap_mb: float = 25.0,
    gradients: Literal["own", "views"] = "own",
    broadcast_buffers: bool = True,
    graphs: bool | None = None,
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
      wire at each hop, and replicas stay bitwise equal. Gradients of no wider dtype travel as they are. A coding such
      as ``commrt.Int4()`` sends fewer bits; it needs an algorithm that sums in one step, ``commrt.Direct()``.
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
    - `also`: with `BackupWorkers` a late rank takes the state of another. Name here what goes along with the
      optimizers, such as learning rate schedulers, a ``GradScaler``, an average of the weights.

    Raises `UsageError` for a model that cannot be averaged, `ScheduleError` for an algorithm that does not keep
    its promise, `DisagreementError` if ranks differ.
    """
    world = _checked(world)
    check_stateful(also, "attach(also=)")
    flags = {"broadcast_buffers": broadcast_buffers, "graphs": graphs}
    params, optimizers = check_attach(model, optimizer, algorithm, wire, bucket_cap_mb, **flags)
    if world.size > 1:
        require_read_only_forward(model)
    views = wants_views(gradients, params, algorithm, wire)
    for (name, _), taken in zip(params, attached(param for _, param in params), strict=True):
        if taken:
            raise UsageError(f"{name} is attached already: detach() the first replica before attaching again")
    if (device := params[0][1].device).type == "cuda":
        world.connect(device)
    world.attached += 1
    kind = ViewBucket if views else GradientBucket
    request = _Request(world, model, params, optimizers, wire, int(bucket_cap_mb * MIB), kind)
    if isinstance(algorithm, BackupWorkers):
        algorithm.needed(world.size)
        _require_nobody_lost(world)
        if graphs:
            raise UsageError("graphs=True with BackupWorkers: another quorum in each step leaves nothing to repeat")
        if world.size > 1:
            return _with_backup_workers(request, algorithm, also, broadcast_buffers)
        algorithm = algorithm.inner
    if isinstance(algorithm, Gossip) and algorithm.payload == "weights":
        return _gossiping(request, algorithm)
    _require_nobody_lost(world)
    if isinstance(algorithm, LocalSGD):
        return _locally(request, algorithm)
    wants_graphs = device.type == "cuda" if graphs is None else graphs
    by_graphs = wants_graphs and not isinstance(wire, Coding | Adaptive)
    return _synchronous(request, algorithm, broadcast_buffers and not isinstance(algorithm, Gossip), by_graphs)


def _checked(world: World | None) -> World:
    if world is not None and not isinstance(world, World):
        raise UsageError(f"world={world!r} is no world: pass what commrt.init() returned, or leave it out")
    world = current() if world is None else world
    world.require_all_ranks("attach()")
    if world.elastic.needed:
        raise UsageError(
            "a model with BackupWorkers is attached to this world, whose ranks do different numbers of steps: attach "
            "both as one, in an nn.ModuleList, or detach() it first"
        )
    return world


def _require_nobody_lost(world: World) -> None:
    if world.lost:
        raise UsageError(
            f"{world.lost[0]}: only gossip of weights goes on without it where a model is attached anew: start again"
        )


@dataclass(frozen=True, slots=True)
class _Request:
    """The checked arguments of `attach`."""

    world: World
    model: nn.Module
    params: Sequence[Named]
    optimizers: Sequence[Optimizer]
    wire: torch.dtype | Coding | Adaptive | None
    cap_nbytes: int
    kind: type[GradientBucket]

    def build_buckets(self, params: Sequence[Named]) -> list[GradientBucket]:
        """Return buckets for `params`, given in ready order."""
        world, allocate = self.world, self.world.transport.allocate_shared
        return build_buckets(params, self.wire, self.cap_nbytes, world.attached, allocate, kind=self.kind)

    def claim(
        self, algorithm: Algorithm, schedule: Schedule, buckets: Sequence[GradientBucket | WeightBucket]
    ) -> dict[str, str]:
        """Return what must be equal on all ranks and cannot change afterwards."""
        counts = ([len(group["params"]) for group in optimizer.param_groups] for optimizer in self.optimizers)
        pairs = zip(self.optimizers, counts, strict=True)
        return {
            "algorithm": describe_algorithm(algorithm),
            "schedule": schedule.digest(),
            "buckets": "; ".join(bucket.description() for bucket in buckets),
            "buffers": describe_buffers(self.model),
            "optimizers": ", ".join(f"{type(each).__name__} of {count} parameters" for each, count in pairs),
        }

    def agree(self, claim: dict[str, str]) -> None:
        """Raise `DisagreementError` unless all ranks come with the same `claim` and the same optimizers."""
        optimizer = describe_optimizers(self.optimizers, self.params)
        self.world.agree("attach", model=str(self.world.attached), optimizer=optimizer, **claim)

    def begin(self, replica: Replica, broadcaster: Broadcaster, prepare: Callable[[], object] = int) -> Replica:
        """Give all ranks rank 0's state, and call `prepare`; detaches the replica if that fails."""
        try:
            replica.overwrite_with_first()
            if have_state(self.optimizers):
                self.world.elastic.together(lambda: overwrite_states(broadcaster, self.optimizers, 0))
            prepare()
        except BaseException:
            replica.detach()
            raise
        return replica


def _synchronous(request: _Request, algorithm: Algorithm, broadcast_buffers: bool, graphs: bool) -> Replica:
    engine = Engine(request.world, algorithm, request.build_buckets(request.params[::-1]), graphs=graphs, unpacks=True)
    claim = request.claim(algorithm, engine.schedule(0), engine.buckets)
    request.agree({**claim, "broadcast_buffers": str(broadcast_buffers), "graphs": str(graphs)})
    replica = SynchronousReplica(
        request.model, request.optimizers, engine, request.build_buckets, broadcast_buffers=broadcast_buffers
    )
    return request.begin(replica, engine, lambda: engine.submit_preparation(0).result())


def _gossiping(request: _Request, algorithm: Gossip) -> Replica:
    world, rounds = request.world, GossipExchange(request.world, algorithm)
    held, messages = exchanged_tensors(request.model), algorithm.staleness + 1
    wire = cast("torch.dtype | None", request.wire)  # codings were refused
    buckets = build_weight_buckets(held, wire, request.cap_nbytes, messages, world.transport.allocate_shared)
    if algorithm.within > 1 and any(bucket.rounds for bucket in buckets):
        raise UsageError(
            "wire= with within=: the weights of a row are summed on the wire, so each step would round them to it; "
            "leave wire out"
        )
    request.agree(request.claim(algorithm, rounds.prove_all(), buckets))
    alone = world.all_equal("gossiping models", "0" if not world.elastic.others() else f"more on rank {world.rank}")
    if world.size > 1:
        rounds.share(buckets)
    replica = GossipReplica(
        request.model, request.params, request.optimizers, rounds, buckets, world.attached, alone=alone
    )
    return request.begin(replica, rounds)


def _locally(request: _Request, algorithm: LocalSGD) -> Replica:
    world, number, wire = (
        request.world,
        request.world.attached,
        request.wire if algorithm.wire is None else algorithm.wire,
    )
    held = [slot for slot in exchanged_tensors(request.model) if not (slot.is_buffer and isinstance(wire, Coding))]
    fragments = cut_fragments(held, algorithm)  # codes would make a variance of BatchNorm negative

    def build(parcels: Sequence[Named], first: int, allocate: Allocate) -> list[GradientBucket]:
        return build_buckets(parcels, wire, request.cap_nbytes, number, allocate, first)

    exchange = FragmentExchange(world, algorithm, fragments, build, number)
    engine = exchange.engine
    request.agree(request.claim(algorithm, engine.schedule(0), engine.buckets))
    alone = world.all_equal(
        "models that train alone", "0" if not world.elastic.others() else f"more on rank {world.rank}"
    )
    engine.submit_preparation(0).result()  # before the replica: from then on the world goes on without lost ranks
    replica = LocalReplica(request.model, request.params, request.optimizers, exchange, number, alone=alone)
    return request.begin(replica, exchange)


def _with_backup_workers(
    request: _Request, algorithm: BackupWorkers, also: Sequence[Stateful], broadcast_buffers: bool
) -> Replica:
    world, model, optimizers = request.world, request.model, request.optimizers
    _check_for_backups(request, also)
    buckets = request.build_buckets(request.params[::-1])
    engine = Engine(world, algorithm.inner, buckets, players=algorithm.needed(world.size))
    claim = request.claim(algorithm, engine.schedule(0), engine.buckets) | {
        "broadcast_buffers": str(broadcast_buffers),
        "kinds in also=": ", ".join(type(one).__name__ for one in also),
    }
    make = partial(BackupWorkersReplica, model, optimizers, also, algorithm, engine, request.build_buckets)
    if world.config is not None:
        world.config.require_same(world.rank, world.attached, claim | {"frozen parameters": _frozen_digest(model)})
        return _join_as_replacement(world, make(broadcast_buffers=broadcast_buffers))
    request.agree(claim)
    replica = request.begin(make(broadcast_buffers=broadcast_buffers), WorldBroadcaster(world))
    host = host_identity() if world.transport.kind == "shared" else None
    claim |= {"frozen parameters": _frozen_digest(model)}  # they are rank 0's now
    WorldConfig(world.size, host, world.attached, claim, chosen_transport()).publish(world.store)
    return replica


def _check_for_backups(request: _Request, also: Sequence[Stateful]) -> None:
    if not request.optimizers:
        raise UsageError("BackupWorkers needs the optimizers that step the model: attach(model, optimizer, ...)")
    owners = [*request.optimizers, *also]
    load(dump(owners), owners)  # raises for a state that other ranks could not load
    if request.world.config is not None:  # this rank takes another's place, with the first model, or is refused
        return
    own = f"more on rank {request.world.rank}" if attached_to(request.world) else "0"
    if not request.world.all_equal("other models", own) or own != "0":
        raise UsageError(
            "another model is attached to this world, and with BackupWorkers ranks do different numbers of steps: "
            "attach them as one, in an nn.ModuleList, or detach() the other"
        )


def _frozen_digest(model: nn.Module) -> str:
    """Return a digest of the frozen parameters, which ranks do not send each other later, as they do not change."""
    frozen = [param for param in model.parameters() if not param.requires_grad]
    return hashlib.sha256(flatten(frozen).cpu().numpy().tobytes()).hexdigest() if frozen else "none"


def _join_as_replacement(world: World, replica: BackupWorkersReplica) -> Replica:
    """Take the place of a rank that is gone."""
    try:
        replica.join_as_replacement()
        world.config = None  # this rank is as any other
    except BaseException as error:
        world.elastic.depart(f"it was not let in: {error}")
        replica.detach()
        raise
    return replica
