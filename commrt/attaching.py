# SPDX-License-Identifier: Apache-2.0
"""The door for custom training loops: a model becomes one replica of a world."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from commrt.algorithms.backup import BackupWorkers
from commrt.algorithms.gossip import Gossip
from commrt.algorithms.torus import Torus2D
from commrt.errors import UsageError
from commrt.membership.launcher import chosen_transport
from commrt.membership.world_config import WorldConfig
from commrt.model.admission import (
    check_cap,
    check_flags,
    check_kinds,
    check_model,
    check_optimizers,
    check_stateful,
    check_wire,
    describe,
    describe_buffers,
    describe_optimizers,
    have_state,
    listed,
)
from commrt.model.state import Stateful, dump, flatten, load
from commrt.replicas.backed import Backed
from commrt.replicas.bundles import Bundle, build_bundles, held_by
from commrt.replicas.engine import Engine
from commrt.replicas.gossiping import Gossiping
from commrt.replicas.handover import Broadcasting, Gathering, overwrite_states
from commrt.replicas.replica import Replica, attached, attached_to
from commrt.replicas.rounds import Rounds
from commrt.replicas.synchronous import Synchronous
from commrt.runtime.opening import current
from commrt.runtime.world import World
from commrt.schedule import Algorithm, Schedule
from commrt.transport.meeting import host_identity
from commrt.wire.buckets import MIB, Bucket, Named, build_buckets

__all__ = ["attach"]

Optimizers = Optimizer | Sequence[Optimizer] | None


@contextmanager
def _without_collector() -> Iterator[None]:
    """What is made meanwhile stays, and looking through all of it again and again took a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_collector()
def attach(  # noqa: PLR0913  # each says one thing, and has its default
    model: nn.Module,
    optimizer: Optimizers = None,
    algorithm: Algorithm = Torus2D(),  # noqa: B008  # a frozen value
    *,
    world: World | None = None,
    wire: torch.dtype | None = None,
    bucket_cap_mb: float = 25.0,
    broadcast_buffers: bool = True,
    graphs: bool = False,
    also: Sequence[Stateful] = (),
) -> Replica:
    """Make `model` one replica of a world: from now on ``backward()`` averages its gradients over all ranks.

    Parameters and buffers are overwritten with rank 0's. During each backward pass buckets leave on the
    world's lane as their gradients become ready; ``backward()`` returns when all are averaged, in place in
    ``param.grad``; until then they must be left alone. With `optimizer` (one, or all that step this model), ``step``
    refuses gradients that were never averaged, settings are compared between ranks, now and in each step, and
    state that is there already is overwritten with rank 0's.

    - `wire` is the dtype that travels (bfloat16 or float16 halve the bytes; sums are formed in fp32 and rounded
      to the wire at each hop; replicas stay bitwise equal); gradients of no wider dtype travel as they are.
    - `bucket_cap_mb` is the size of a bucket in MiB: gradients that travel together.
    - `broadcast_buffers` sends rank 0's buffers to all at the end of each synchronous step; a graph that was built with
      other values and has not run backward yet then ends in torch's own error (not BatchNorm's in training, which does
      not read them).
    - With `graphs`, not yet tried on a GPU (docs/nccl.md), a device remembers what it does for a bucket after two steps
      with a schedule, and repeats it by one launch; `Replica.why_not_graphs` says where it does not.
    - With `BackupWorkers` a rank that was late takes the state of another: name in `also` what goes along with the
      optimizers, such as learning rate schedulers, a ``GradScaler``, an average of the weights.

    Collective. The hooks live as long as the model, or until `Replica.detach`.

    Raises `UsageError` for a model that cannot be averaged, `ScheduleError` for an algorithm that does not keep
    its promise, `DisagreementError` if ranks differ.
    """
    world = _checked(world)
    world.require_all_ranks("attach()")
    _require_room(world)
    check_kinds(model, algorithm)
    optimizers = listed(optimizer)
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    check_wire(wire)
    check_cap(bucket_cap_mb)
    check_flags(broadcast_buffers=broadcast_buffers, graphs=graphs)
    check_stateful(also, "attach(also=)")
    check_model(model, params)
    check_optimizers(optimizers, params)
    _require_unattached(params)
    if (device := params[0][1].device).type == "cuda":
        world.connect(device)
    world.attached += 1
    chosen = _Chosen(world, model, params, optimizers, wire, int(bucket_cap_mb * MIB))
    if isinstance(algorithm, BackupWorkers):
        algorithm.needed(world.size)
        _require_nobody_lost(world)
        if graphs:
            raise UsageError("graphs=True with BackupWorkers: another quorum in each step leaves nothing to repeat")
        if world.size > 1:
            return _backed(chosen, algorithm, also, broadcast_buffers)
        algorithm = algorithm.inner
    if isinstance(algorithm, Gossip) and algorithm.payload == "weights":
        return _gossiping(chosen, algorithm)
    _require_nobody_lost(world)
    return _synchronous(chosen, algorithm, broadcast_buffers and not isinstance(algorithm, Gossip), graphs)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What was given to `attach`, checked."""

    world: World
    model: nn.Module
    params: Sequence[Named]
    optimizers: Sequence[Optimizer]
    wire: torch.dtype | None
    cap_nbytes: int

    def agree(self, algorithm: Algorithm, schedule: Schedule, buckets: Sequence[Described], **more: str) -> None:
        """Invariant 1: what runs was verified, and is the same everywhere."""
        optimizer = describe_optimizers(self.optimizers, self.params)
        claim = self.claim(algorithm, schedule, buckets)
        self.world.agree("attach", model=str(self.world.attached), optimizer=optimizer, **claim, **more)

    def claim(self, algorithm: Algorithm, schedule: Schedule, buckets: Sequence[Described]) -> dict[str, str]:
        """What cannot change afterwards."""
        return {
            "algorithm": describe(repr(algorithm)),
            "schedule": schedule.digest(),
            "buckets": "; ".join(bucket.description() for bucket in buckets),
            "buffers": describe_buffers(self.model),
            "optimizers": ", ".join(map(_kind, self.optimizers)),
        }

    def begin(self, replica: Replica, lane: Broadcasting, prepare: Callable[[], object]) -> Replica:
        """All begin where rank 0 is."""
        try:
            replica.overwrite_with_first()
            if have_state(self.optimizers):
                self.world.elastic.together(lambda: overwrite_states(lane, self.optimizers, 0))
            prepare()
        except BaseException:
            replica.detach()
            raise
        return replica


class Described(Protocol):
    """A bucket or a bundle."""

    def description(self) -> str:
        """All that must agree between ranks, as text."""
        ...


def _synchronous(chosen: _Chosen, algorithm: Algorithm, broadcast_buffers: bool, graphs: bool) -> Replica:
    world, params = chosen.world, chosen.params
    cut = partial(
        build_buckets,
        wire=chosen.wire,
        cap_nbytes=chosen.cap_nbytes,
        model=world.attached,
        allocate=world.transport.allocate,
    )
    engine = Engine(world, algorithm, cut(params[::-1]), graphs=graphs)
    chosen.agree(algorithm, engine.schedule(0), engine.buckets, broadcast_buffers=str(broadcast_buffers))
    replica = Synchronous(chosen.model, chosen.optimizers, engine, cut, broadcast_buffers=broadcast_buffers)
    return chosen.begin(replica, engine, lambda: engine.submit_preparation(0).result())


def _backed(chosen: _Chosen, algorithm: BackupWorkers, also: Sequence[Stateful], broadcast_buffers: bool) -> Replica:
    world, needed = chosen.world, algorithm.needed(chosen.world.size)
    _check_for_backups(chosen, also)

    def cut(params: Sequence[Named]) -> list[Bucket]:
        return build_buckets(params, chosen.wire, chosen.cap_nbytes, world.attached, allocate=world.transport.allocate)

    engine = Engine(world, algorithm.inner, cut(chosen.params[::-1]), players=needed)
    more = {
        "broadcast_buffers": str(broadcast_buffers),
        "kinds in also=": ", ".join(type(one).__name__ for one in also),
    }
    claim = chosen.claim(algorithm, engine.schedule(0), engine.buckets) | more
    make = partial(Backed, chosen.model, chosen.optimizers, also, algorithm, engine, cut)
    if world.config is not None:
        claim |= {"frozen parameters": _frozen(chosen.model)}
        world.config.require_same(world.rank, world.attached, claim)
        return _in_place(world, make(broadcast_buffers=broadcast_buffers))
    chosen.agree(algorithm, engine.schedule(0), engine.buckets, **more)
    replica = chosen.begin(make(broadcast_buffers=broadcast_buffers), Gathering(world), int)
    host = host_identity() if world.transport.kind == "shared" else None
    claim |= {"frozen parameters": _frozen(chosen.model)}  # they are rank 0's now
    WorldConfig(world.size, host, world.attached, claim, chosen_transport()).publish(world.store)
    return replica


def _frozen(model: nn.Module) -> str:
    """What no rank hands over later, as it does not change."""
    frozen = [param for param in model.parameters() if not param.requires_grad]
    return hashlib.sha256(flatten(frozen).cpu().numpy().tobytes()).hexdigest() if frozen else "none"


def _kind(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__name__} of {[len(group['params']) for group in optimizer.param_groups]} parameters"


def _in_place(world: World, replica: Backed) -> Replica:
    """It takes the place of a rank that is gone."""
    try:
        replica.succeed()
        world.config = None  # this rank is as any other
    except BaseException as error:
        world.elastic.depart(f"it was not let in: {error}")
        replica.withdraw()
        raise
    return replica


def _check_for_backups(chosen: _Chosen, also: Sequence[Stateful]) -> None:
    if not chosen.optimizers:
        raise UsageError("BackupWorkers needs the optimizers that step the model: attach(model, optimizer, ...)")
    load(dump([*chosen.optimizers, *also]), [*chosen.optimizers, *also])  # raises where others could not
    if chosen.world.config is not None:  # and comes to the first model, or is refused
        return
    own = f"more on rank {chosen.world.rank}" if attached_to(chosen.world) else "0"
    if not chosen.world.all_equal("other models", own) or own != "0":
        raise UsageError(
            "another model is attached to this world, and with BackupWorkers ranks do different numbers of steps: "
            "attach them as one, in an nn.ModuleList, or detach() the other"
        )


def _gossiping(chosen: _Chosen, algorithm: Gossip) -> Replica:
    world = chosen.world
    rounds = Rounds(world, algorithm)
    bundles = build_bundles(
        held_by(chosen.model), chosen.wire, chosen.cap_nbytes, algorithm.staleness + 1, world.transport.allocate
    )
    _check_wire_of_rows(algorithm, bundles)
    chosen.agree(algorithm, rounds.schedule(0), bundles)
    alone = world.all_equal("gossiping models", "0" if not world.elastic.others() else f"more on rank {world.rank}")
    replica = Gossiping(chosen.model, chosen.params, chosen.optimizers, rounds, bundles, world.attached, alone=alone)
    return chosen.begin(replica, rounds, int)


def _check_wire_of_rows(algorithm: Gossip, bundles: Sequence[Bundle]) -> None:
    if algorithm.within > 1 and any(bundle.rounds for bundle in bundles):
        raise UsageError(
            "wire= with within=: the weights of a row are summed on the wire, so each step would round them to it; "
            "leave wire out"
        )


def _require_room(world: World) -> None:
    if world.elastic.needed:
        raise UsageError(
            "a model with BackupWorkers is attached to this world, whose ranks do different numbers of steps: attach "
            "both as one, in an nn.ModuleList, or detach() it first"
        )


def _require_nobody_lost(world: World) -> None:
    if world.lost:
        raise UsageError(
            f"{world.lost[0]}: only gossip of weights goes on without it where a model is attached anew: start again"
        )


def _checked(world: World | None) -> World:
    if world is not None and not isinstance(world, World):
        raise UsageError(f"world={world!r} is no world: pass what commrt.init() returned, or leave it out")
    return current() if world is None else world


def _require_unattached(params: Sequence[Named]) -> None:
    for (name, _), taken in zip(params, attached(param for _, param in params), strict=True):
        if taken:
            raise UsageError(f"{name} is attached already: detach() the first replica before attaching again")
