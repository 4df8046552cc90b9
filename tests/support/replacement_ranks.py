# SPDX-License-Identifier: Apache-2.0
"""Worker processes of test_replacement: another process takes the place of a dead rank."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from threading import Event

import torch

import commrt

sys.path.insert(0, str(Path(__file__).parents[1] / "audits"))
from fault_cost import backward, drained, network


def _backed(world, backups):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return commrt.attach(model, optimizer, commrt.BackupWorkers(backups), world=world, bucket_cap_mb=0.01), optimizer


def _step(replica, optimizer, rank, version, most_s=0.04):
    Event().wait(Random(f"{rank} {version}").uniform(0, most_s))
    backward(replica.model, rank, version)
    optimizer.step()


def ends_early(tell, batches, timeout_s=2.0):
    """Rank 0, which holds the store, has few batches; the others take many times the deadline."""
    with commrt.init(timeout_s, start_timeout_s=60.0) as world:
        replica, optimizer = _backed(world, 1)
        for number in range(5 if world.rank == 0 else batches):
            replica.drain()
            _step(replica, optimizer, world.rank, number, most_s=0.2)
        return replica.step


def collectives_at(tell, goals, timeout_s=8.0):
    """Make a collective after each of `goals` updates; a replacement makes those after its first step."""
    with commrt.init(timeout_s, start_timeout_s=60.0) as world:
        replica, optimizer = _backed(world, 1)
        made, equal = replica.step if world.is_replacement else 0, []
        for goal in (goal for goal in goals if goal > made):
            while (version := drained(replica).step) < goal:
                if world.rank == 2 and not world.is_replacement and version >= goals[0] - 2:
                    tell("replace")
                    Event().wait(60.0)
                _step(replica, optimizer, world.rank, version)
            equal.append((goal, replica.replicas_equal()))
        return equal
