# SPDX-License-Identifier: Apache-2.0
"""A vote of all ranks of a world: which of them have a flag. Keeps and changes nothing."""

from __future__ import annotations

import torch

from commrt.algorithms import halving_doubling
from commrt.runtime.generation import Members
from commrt.runtime.world import World
from commrt.transport.protocol import Tag


def ranks_with_flag_now(world: World, mine: bool, tag: Tag) -> Members:
    """Return the ranks that come with True as `mine`. Collective, on the communication thread."""
    flags = torch.zeros(world.size, device="cpu")
    flags[world.rank] = float(mine)
    world.run_now(halving_doubling.all_reduce(world.size), flags, tag)
    return tuple(flags.nonzero().flatten().tolist())
