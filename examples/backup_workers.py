# SPDX-License-Identifier: Apache-2.0
"""Train with backup workers: each step uses the first N of N + b gradients, so that b ranks may be slow or die.

::

    torchrun --nproc-per-node 4 examples/backup_workers.py    # or mpirun, srun, or one process

    (export WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511    # without torchrun, which ends all when one dies
     for rank in 0 1 2 3; do RANK=$rank python examples/backup_workers.py --kill-rank 2 --at-step 40 & done; wait)

Ranks sleep at random, so that they are late. Their batches are given out again, so that no image is lost.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from random import Random
from time import sleep

import torch
from mnist.dataset import Images, lenet, load
from torch import Tensor
from torch.nn.functional import cross_entropy

import commrt


def batches(train: Images, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random batches of all images. With shards, nobody would see those of a rank that is always late."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(train.digits), (size,), generator=draw)
        yield train.pixels[chosen], train.digits[chosen]


def main() -> None:
    """Train with slow and dying ranks, then print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backups", type=int, default=1, help="b: fewer than half of the ranks")
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--slow", type=float, default=0.1, help="probability that a rank is slow in a step")
    parser.add_argument("--seconds", type=float, default=0.2, help="how long a slow rank sleeps")
    parser.add_argument("--kill-rank", type=int, help="kill this rank")
    parser.add_argument("--at-step", type=int, default=40, help="the step in which it is killed")
    options = parser.parse_args()

    with commrt.init() as world:
        device = world.device
        train, test = load()
        model = lenet(seed=0).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        algorithm = commrt.BackupWorkers(options.backups, inner=commrt.Torus2D())
        replica = commrt.attach(model, optimizer, algorithm, also=[rate])  # a late rank also gets the state of the rate

        chance = Random(world.rank)
        for pixels, digits in commrt.backup_workers.reissued(batches(train, size=32, seed=world.rank), replica):
            iter_num = replica.step  # of all ranks: a loop's own counter would fall behind on a late rank
            if world.rank == options.kill_rank and iter_num >= options.at_step:
                os.kill(os.getpid(), signal.SIGKILL)
            if iter_num >= options.steps:
                break
            optimizer.zero_grad()
            loss = cross_entropy(model(pixels.to(device)), digits.to(device))
            if chance.random() < options.slow:
                sleep(options.seconds)
            loss.backward()  # the mean of the first N gradients, or nothing if this one came too late
            optimizer.step()  # does nothing then; this rank gets the weights before its next forward pass
            rate.step()
            report = replica.last
            if report.step % 10 == 0 and report.counted and world.rank == report.members[0]:
                print(f"step {report.step}: ranks {report.members} counted, {report.dropped} did not", flush=True)

        replica.consolidate()  # brings late ranks up to date
        stats = replica.stats()
        late = stats.steps - stats.counted
        print(f"rank {world.rank}: {stats.counted} gradients counted, {late} came too late: reissued", flush=True)
        if world.rank == world.members[0]:  # rank 0, unless it was lost
            with torch.no_grad():
                right = (model(test.pixels.to(device)).argmax(dim=1).cpu() == test.digits).float().mean()
            lost = f", without {', '.join(f'rank {loss.rank}' for loss in world.lost)}" if world.lost else ""
            print(f"{world.size} ranks{lost}: {right:.1%} of {len(test.digits):,} test images", flush=True)


if __name__ == "__main__":
    main()
