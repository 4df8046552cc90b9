# SPDX-License-Identifier: Apache-2.0
"""What the worker processes of test_detach run."""

from __future__ import annotations

from threading import Event

import torch

import commrt


def detached_first(_, algorithm, has_detached):
    """Rank 0, which holds the store, detaches and closes; after a while the others ask for a mean."""
    with commrt.init(timeout_s=10) as world:
        model = torch.nn.Linear(3, 1)
        replica = commrt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm, world=world)
        if world.rank:
            while not has_detached.exists():
                Event().wait(0.01)
            Event().wait(0.3)  # rank 0's process would have ended by then
            replica.disagreement()
        replica.detach()
        has_detached.touch()
