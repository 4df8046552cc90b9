# SPDX-License-Identifier: Apache-2.0
"""Keep DistributedDataParallel, and choose how its gradients travel.

``torchrun --nproc-per-node 4 examples/keep_ddp.py``. Only two lines are new: the state and the
hook. The same two lines fit Accelerate (on the result of ``prepare``) and Lightning (on
``trainer.strategy.model``, in ``on_train_start``).
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from mnist.dataset import lenet, load
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import commrt
from commrt.algorithms.catalogue import by_name


def main() -> None:
    """Train, then print the accuracy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=3, help="passes over all images")
    parser.add_argument(
        "--algorithm", default="torus2d", help="torus2d, ring, halving_doubling, ..."
    )
    parser.add_argument("--bf16", action="store_true", help="send bfloat16: half of the bytes")
    options = parser.parse_args()

    dist.init_process_group()
    world = commrt.init()  # the group's ranks
    images, test = load()
    samples = TensorDataset(images.pixels, images.digits)
    sampler = DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=16, sampler=sampler)

    model = DistributedDataParallel(lenet(seed=0).to(world.device))
    state = commrt.DDPState(
        by_name(options.algorithm), wire=torch.bfloat16 if options.bf16 else None
    )
    model.register_comm_hook(state, commrt.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    for number in range(options.passes):
        sampler.set_epoch(number)
        for pixels, digits in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(pixels.to(world.device)), digits.to(world.device))
            loss.backward()  # exchanges gradients while it runs
            optimizer.step()

    with torch.no_grad():
        right = (
            (model.module(test.pixels.to(world.device)).argmax(1).cpu() == test.digits)
            .float()
            .mean()
            .item()
        )
    if world.rank == 0:
        print(f"{world.size} ranks, {state.step + 1} steps: {right:.1%} of 1,000 test images")
    world.close()  # before the group is destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
