# SPDX-License-Identifier: Apache-2.0
"""The result of a run, as one rank computes it with the others at the end."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch
from dataset import Images
from ddp_replica import DdpReplica
from gather import gather
from job import DDP, Job
from run_recorder import Part
from torch import nn

import commrt

__all__ = ["Result", "result_of"]


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one run; times are means over the steps of the first rank that is left."""

    algorithm: str
    recipe: str
    workers: int
    wire: str
    epochs: int
    steps: int
    test_accuracy: float
    disagreement: float
    """Relative distance of the farthest replica from the mean at the end, before they were made
    equal.
    """
    replicas_equal: bool
    images_per_second: float
    step_seconds: float
    exposed_comm_seconds: float
    comm_seconds: float | None
    bytes_sent_per_step: int | None
    fingerprint: str
    lost: tuple[int, ...]
    """Ranks that the others went on without."""
    late: dict[int, int]
    """By rank, gradients that came too late and were dropped."""
    saved_seconds: float
    """Seconds that all would have waited for late gradients;
    two late ones in one step count twice.
    """


def result_of(
    job: Job,
    world: commrt.World,
    replica: commrt.Replica | DdpReplica,
    model: nn.Module,
    test: Images,
    part: Part,
) -> Result:
    """Make all replicas equal, test the model, and return the result; collective."""
    steps = max(part.steps, 1)
    disagreement = replica.disagreement()
    replica.consolidate()
    stats = replica.stats()
    mark = fingerprint(model)
    knows = job.algorithm != DDP
    texts = gather(
        world, "told", json.dumps([stats.steps - stats.counted, stats.late_s, part.images])
    )
    told = {rank: json.loads(text) for rank, text in texts.items()}
    with torch.no_grad():
        right = model(test.pixels).argmax(dim=1) == test.digits
    return Result(
        algorithm=job.algorithm,
        recipe=job.recipe_name,
        workers=world.size,
        wire=job.wire,
        epochs=job.epochs,
        steps=replica.step,
        test_accuracy=float(right.float().mean()),
        disagreement=disagreement,
        replicas_equal=world.all_equal("trained model", mark),
        images_per_second=sum(images for _, _, images in told.values()) / part.seconds,
        step_seconds=part.seconds / steps,
        exposed_comm_seconds=stats.exposed_s / steps,
        comm_seconds=stats.comm_s / steps if knows else None,
        bytes_sent_per_step=stats.nbytes_sent // steps if knows else None,
        fingerprint=mark,
        lost=tuple(loss.rank for loss in world.lost),
        late={rank: late for rank, (late, _, _) in told.items()},
        saved_seconds=sum(late_s for _, late_s, _ in told.values()),
    )


def fingerprint(model: nn.Module) -> str:
    """Return a hash of all parameters and buffers: equal if these are bitwise equal."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()
