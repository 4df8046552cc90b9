# SPDX-License-Identifier: Apache-2.0
"""Connects ranks that will exchange, by one number to each peer. Writes nothing that stays.

On the communication thread.
"""

from __future__ import annotations

import torch

from commrt.program import member_program
from commrt.runtime.generation import Members
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag


def greet_peers_now(
    world: World, schedule: Schedule, members: Members, device: torch.device, step: int
) -> None:
    """Exchange one number with each peer of `schedule`, on the communication thread: NCCL connects
    two ranks when they first meet (NVIDIA/nccl#1487).
    """
    mine = member_program(schedule, members, world.rank, world.size)

    def messages(peers: set[int]) -> list[P2PMessage]:
        return [P2PMessage(peer, torch.zeros(1, device=device)) for peer in sorted(peers)]

    sends = messages({transfer.peer for hop in mine.hops for transfer in hop.sends})
    recvs = messages({transfer.peer for hop in mine.hops for transfer in hop.recvs})
    world.transport.bind(P2PGroup(sends, recvs))(Tag(step, "greeting"))
