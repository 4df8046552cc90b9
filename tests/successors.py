# SPDX-License-Identifier: Apache-2.0
"""Workers of ``test_succession.py``: new processes import what they run."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from threading import Event

import torch

import commrt

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
from striking import Struck, backward, network

MORE = 8
MOST_S = 0.04
"""A step computes for so long at most: where all compute for as long, who fetches weights first is late again."""


def trained(tell, blows):
    """Until the weights have seen `MORE` updates since the successor counted; what was seen."""
    torch.set_num_threads(1)
    with commrt.init(15.0, start_timeout_s=60.0) as world:
        is_successor = world.charter is not None
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), bucket_cap_mb=0.01)
        if is_successor:  # a checkpoint that is loaded before the first step does no harm
            model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
            replica.load_state_dict({"step": 0})
        blow = Struck(tell, [] if is_successor else [blow for blow in blows if blow.rank == world.rank])
        blow.watch(replica._engine)
        model[2].weight.register_hook(lambda _: blow.at("backward", replica.step))
        used = {}
        while replica.step < (int(world.store.get("until")) if world.store.check(["until"]) else 1 << 30):
            version = at(replica)
            Event().wait(Random(f"{world.rank} {version}").uniform(0.0, MOST_S))
            backward(model, world.rank, version)
            optimizer.step()
            if replica.last.counted and is_successor and not used:
                world.store.set("until", str(replica.last.step + MORE))
            if replica.last.counted:
                used[replica.last.step] = replica.last.members
        return {
            "used": used,
            "equal": replica.replicas_equal(),
            "params": [param.detach().numpy() for param in model.parameters()],
            "lost": [loss.rank for loss in replica.lost],
        }


def at(replica):
    replica.drain()
    return replica.step
