# SPDX-License-Identifier: Apache-2.0
"""Attach a model with backup workers; or take the place of a rank that is gone while the others train."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from typing import cast

from torch import nn

from commrt.algorithms.backup import BackupWorkers
from commrt.backup_workers.backup_replica import BackupWorkersReplica
from commrt.buckets.engine import Engine
from commrt.errors import UsageError
from commrt.runtime.world import World
from commrt.store.agreement import WorldConfig
from commrt.store.launcher import chosen_transport
from commrt.store.rendezvous import host_identity
from commrt.training import synchronous
from commrt.training.attach import Request
from commrt.training.model_state import dump, flatten, load
from commrt.training.replica import Replica, attached_to

__all__ = ["attach"]


def attach(request: Request) -> Replica:
    """Return a replica whose gradient counts if it is among the first. Collective, but for a replacement."""
    world, algorithm = request.world, cast("BackupWorkers", request.algorithm)
    needed = algorithm.needed(world.size)
    request.require_nobody_lost()
    if world.size == 1:
        return synchronous.attach(replace(request, algorithm=algorithm.inner))
    _check_for_backups(request)
    engine = Engine(world, algorithm.inner, request.build_buckets(request.params[::-1]), ranks=needed)
    claim = request.claim(engine.schedule(0), engine.buckets) | {
        "broadcast_buffers": str(request.broadcast_buffers),
        "kinds in also=": ", ".join(type(one).__name__ for one in request.also),
    }
    own = request.model, request.optimizers, request.also, algorithm, engine, request.build_buckets
    make = partial(BackupWorkersReplica, *own, broadcast_buffers=request.broadcast_buffers)
    if world.config is not None:
        frozen = {"frozen parameters": _frozen_digest(request.model)}
        world.config.require_same(world.rank, world.attached, claim | frozen)
        return _join_as_replacement(world, make())
    request.agree(claim)
    replica = request.begin(make())
    host = host_identity() if world.transport.one_host else None
    claim |= {"frozen parameters": _frozen_digest(request.model)}  # they are rank 0's now
    WorldConfig(world.size, host, world.attached, claim, chosen_transport()).publish(world.store)
    return replica


def _check_for_backups(request: Request) -> None:
    owners = [*request.optimizers, *request.also]
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
        world.membership.depart(f"it was not let in: {error}")
        replica.detach()
        raise
    return replica
