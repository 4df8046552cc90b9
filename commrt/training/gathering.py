# SPDX-License-Identifier: Apache-2.0
"""Means, sums and single numbers of all members of a world, as results that all of them get.

Collective, on the thread that trains; the communication thread sends. Each is done once, among
those who are members then, and fails if one is lost. Overwrites nothing that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commrt.algorithms import halving_doubling
from commrt.runtime.world import World
from commrt.transport.protocol import Tag


def mean(world: World, tensors: Sequence[Tensor], step: int) -> list[Tensor]:
    """Return the mean of all members' `tensors`, fp32 (fp64 for fp64), the same bits on all."""
    members = tuple(world.members)
    wide = [
        tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors
    ]
    return _sum(world, [tensor / len(members) for tensor in wide], step, members)


def total_of(world: World, tensors: Sequence[Tensor], step: int) -> list[Tensor]:
    """Return the sum of all members' `tensors`, of one dtype, the same bits on all of them."""
    return _sum(world, tensors, step, tuple(world.members))


def _sum(
    world: World, tensors: Sequence[Tensor], step: int, members: Sequence[int]
) -> list[Tensor]:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    schedule = halving_doubling.all_reduce(len(members))
    world.membership.submit(
        lambda: world.run_now(schedule, flat, Tag(step, "mean"), members)
    ).result()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(like.shape) for part, like in zip(parts, tensors, strict=True)]


def gather_values(world: World, value: float, step: int) -> dict[int, float]:
    """Return the `value` of each rank that was a member when the values were sent."""
    own = torch.zeros((2, world.size), dtype=torch.float64, device="cpu")
    own[0, world.rank], own[1, world.rank] = value, 1
    values, shares = mean(world, [own], step)[0]
    return {
        rank: float(values[rank] / shares[rank]) for rank in range(world.size) if shares[rank] > 0
    }


def gather_integers(world: World, number: int, step: int) -> dict[int, int]:
    """Return the `number` of each rank that was a member when the numbers were sent."""
    return {rank: round(each) for rank, each in gather_values(world, number, step).items()}
