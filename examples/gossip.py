# SPDX-License-Identifier: Apache-2.0
"""Train with GossipGraD: in each step a rank exchanges weights with one partner and passes its
images on.

::

    torchrun --nproc-per-node 4 examples/gossip.py    # or mpirun, srun, or one process

Each rank has a shard of 4,000 MNIST images, sorted by class. The partner changes in each step, and
each batch that a rank used moves on to the next rank.
"""

from __future__ import annotations

import argparse

import torch
from mnist.dataset import lenet, load
from torch.nn.functional import cross_entropy

import commrt


def main() -> None:
    """Train, then print the accuracy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=10, help="passes over each rank's shard")
    parser.add_argument(
        "--staleness", type=int, default=0, help="1: do not wait for a slow partner"
    )
    options = parser.parse_args()

    with commrt.init() as world:
        device = world.device
        train, test = load()
        by_class = train.digits.argsort(stable=True)[: len(train.digits) // world.size * world.size]
        mine = by_class.view(world.size, -1)[world.rank]
        model = lenet(seed=0).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        replica = commrt.attach(model, optimizer, commrt.Gossip(staleness=options.staleness))
        ring = commrt.RingShuffle((train.pixels[mine], train.digits[mine]), batch_size=16)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.passes * len(ring))

        for _ in range(options.passes):
            for pixels, digits in ring:
                optimizer.zero_grad()
                cross_entropy(model(pixels.to(device)), digits.to(device)).backward()
                # sends weights; mixed ones arrive before each layer's next forward pass
                optimizer.step()
                decay.step()

        apart = replica.disagreement()
        replica.consolidate()
        ring.drain()
        if world.rank == world.members[0]:  # rank 0, unless it was lost
            with torch.no_grad():
                right = (
                    (model(test.pixels.to(device)).argmax(dim=1).cpu() == test.digits)
                    .float()
                    .mean()
                )
            print(
                f"{world.size} ranks: {right:.1%} of 1,000 test images, replicas were apart by"
                f" {apart:.1e}"
            )


if __name__ == "__main__":
    main()
