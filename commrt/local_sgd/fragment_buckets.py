# SPDX-License-Identifier: Apache-2.0
"""The buckets in which fragments travel, and the memory that several of them share.

Made when a model is attached, and anew after a rank was lost. On the thread that trains, while the
communication thread carries none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.plan import build_buckets
from commrt.local_sgd.fragment import Fragment
from commrt.local_sgd.policy import LocalSGD
from commrt.training.request import Request
from commrt.transport.protocol import Allocate


def fragment_buckets(request: Request, fragments: Sequence[Fragment]) -> list[list[GradientBucket]]:
    """Return new buckets of each fragment.

    Fragments that are never in flight at the same time share memory: of four, of which one leaves
    at a time, a quarter of what the whole model would need to travel.
    """
    algorithm = cast("LocalSGD", request.algorithm)
    world = request.world
    found: list[list[GradientBucket]] = []
    pieces: list[list[Tensor]] = [[] for _ in range(algorithm.at_once)]
    for fragment in fragments:
        pool = pieces[fragment.index % len(pieces)]
        own = _allocate_from(pool, world.transport.allocate_shared)
        kind = request.wire, request.cap_nbytes, request.number
        riding = None if algorithm.is_gossip else (world.rank, world.size)
        first = sum(map(len, found))
        buckets = build_buckets(fragment.outgoing, *kind, own, first=first, riding=riding)
        if riding is not None:
            # all may have skipped the steps of a period
            buckets[0].may_weigh_nothing = True
        found.append(buckets)
    return found


def _allocate_from(pieces: list[Tensor], allocate: Allocate) -> Allocate:
    """Return a function that gives out `pieces` once more, and adds to them where none has room."""
    free = [*pieces]

    def again(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        for i, piece in enumerate(free):
            if piece.dtype == dtype and numel <= len(piece):
                free[i] = piece[numel:]
                return piece[:numel]
        pieces.append(allocate(numel, dtype, device))
        return pieces[-1]

    return again
