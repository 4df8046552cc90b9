# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch training loop, and the two lines that make it data-parallel: ``init`` and ``attach``.

::

    torchrun --nproc-per-node 4 examples/custom_loop.py    # or mpirun -n 4 python ..., srun -n 4 python ..., or alone

Trains a small CNN on 4,000 MNIST images, and counts how many of 1,000 others it gets right, a share on each rank.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import commrt
from commrt.cli.mnist import lenet, load


def main() -> None:
    """Train, then say how well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="images per step, of all ranks together")
    options = parser.parse_args()

    with commrt.init() as world:  # left by an error, it tells the other ranks at once
        device = world.device
        train, test = load()
        data = TensorDataset(train.pixels, train.digits)
        sampler = DistributedSampler(data, world.size, world.rank)  # other images on each rank, as many on all
        loader = DataLoader(data, batch_size=max(1, options.batch // world.size), sampler=sampler)
        model = lenet(seed=0).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        commrt.attach(model, optimizer, commrt.Torus2D())  # weights become rank 0's

        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for pixels, digits in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(pixels.to(device)), digits.to(device))
                loss.backward()  # gradients are averaged over all ranks when this returns
                optimizer.step()

        mine = slice(world.rank, None, world.size)
        with torch.no_grad():
            guesses = model(test.pixels[mine].to(device)).argmax(dim=1).cpu()
        right = (guesses == test.digits[mine]).sum()
        world.all_reduce(right, "sum")  # over all ranks, in place
        if world.rank == 0:
            print(f"{world.size} ranks: {right.item() / len(test.digits):.1%} of {len(test.digits):,} test images")


if __name__ == "__main__":
    main()
