# SPDX-License-Identifier: Apache-2.0
"""Let Ray Train's workers average by a commrt schedule.

Run ``pip install 'ray[train]'`` and ``python examples/ray_train.py``.
Ray starts the workers and opens their ``torch.distributed`` group, which `commrt.init` uses. Do not
wrap the model with Ray's ``prepare_model``: its DDP would average a second time.
"""

from __future__ import annotations

import argparse

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

import commrt


def train_loop_per_worker() -> None:
    """Learn to add ten numbers; each rank trains on its own numbers."""
    with commrt.init() as world:
        model = torch.nn.Linear(10, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        commrt.attach(model, optimizer, commrt.Torus2D())
        mine = torch.Generator().manual_seed(world.rank)
        for _ in range(200):
            x = torch.randn(16, 10, generator=mine)
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
        if world.rank == 0:
            print(
                f"{world.size} ranks over {world.transport.kind}, loss {loss.item():.1e}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2, help="number of workers")
    options = parser.parse_args()
    TorchTrainer(
        train_loop_per_worker, scaling_config=ScalingConfig(num_workers=options.workers)
    ).fit()
