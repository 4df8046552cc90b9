# SPDX-License-Identifier: Apache-2.0
"""Make a plain PyTorch training loop data-parallel with two lines: ``init`` and ``attach``.

::

    torchrun --nproc-per-node 4 examples/custom_loop.py  # or mpirun, srun, or alone

It trains a small CNN on 4,000 MNIST images and tests it on 1,000 others, a share of them on each
rank.
"""

from __future__ import annotations

import argparse

import torch
from mnist.dataset import lenet, load
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import commrt


def main() -> None:
    """Train, then print the accuracy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3, help="epochs to train")
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all ranks")
    options = parser.parse_args()

    with commrt.init() as world:  # after an error, it tells the other ranks at once
        device = world.device
        train, test = load()
        data = TensorDataset(train.pixels, train.digits)
        # different images on each rank, as many on all
        sampler = DistributedSampler(data, world.size, world.rank)
        loader = DataLoader(data, batch_size=max(1, options.batch // world.size), sampler=sampler)
        model = lenet(seed=0).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        commrt.attach(model, optimizer, commrt.Torus2D())  # copies rank 0's weights to all ranks

        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for pixels, digits in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(pixels.to(device)), digits.to(device))
                loss.backward()  # returns with gradients averaged over all ranks
                optimizer.step()

        mine = slice(world.rank, None, world.size)
        with torch.no_grad():
            guesses = model(test.pixels[mine].to(device)).argmax(dim=1).cpu()
        right = (guesses == test.digits[mine]).sum()
        world.all_reduce(right, "sum")  # sums over all ranks, in place
        if world.rank == 0:
            print(
                f"{world.size} ranks: {right.item() / len(test.digits):.1%} of {len(test.digits):,}"
                " test images"
            )


if __name__ == "__main__":
    main()
