# SPDX-License-Identifier: Apache-2.0
r"""DDP that goes on: a killed rank costs one step, and a new process joins (torch 2.14 and later).

::

    torchrun --standalone --nproc-per-node 3 --no-python \
        examples/launch/replace.sh python examples/ddp_survives.py --kill-rank 2

torchrun alone would start all ranks again after a death. `replace.sh` only starts the dead process
again. It joins as any new process does: start more of them, with torchrun's `MASTER_ADDR` and
`MASTER_PORT` and another `RANK`. The ranks agree over torchrun's store, see `meeting.py`.

Each sample is used once per epoch. A death ends the step of all ranks in an error, so nobody counts
its samples: `Shares` deals them anew. If some ranks had finished that step, the step counts, and
the others take weights, optimizer and place in the data from one that has.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from meeting import Meeting
from mnist.dataset import lenet, load
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import commrt.c10d


def parsed() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8, help="passes over all images")
    parser.add_argument(
        "--grace", type=float, default=10.0, help="seconds to wait for a rank that is silent"
    )
    parser.add_argument("--kill-rank", type=int, help="kill this process once")
    parser.add_argument("--at-step", type=int, default=40, help="the step in which it is killed")
    return parser.parse_args()


def batches(
    shares: commrt.Shares, loader: DataLoader, epochs: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's batches of all epochs."""
    while shares.epoch < epochs:
        yield from shares.batches(loader)


def take_moments(model: nn.Module, optimizer: Optimizer) -> None:
    """Copy the optimizer's state of rank 0."""
    optimizer.zero_grad()  # else torch adds no moments before the first step
    moments = get_optimizer_state_dict(model, optimizer) if dist.get_rank() == 0 else {}
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, moments, options=from_rank_0)


def main() -> None:
    """Train, then print the accuracy."""
    options = parsed()
    number = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    # no ranks yet
    dist.init_process_group("commrt", timeout=timedelta(seconds=60), enable_reconfigure=True)
    meeting = Meeting(number, size, options.grace)
    images, test = load()
    samples = TensorDataset(images.pixels, images.digits)
    shares = commrt.Shares(samples, 16, place=lambda: (dist.get_rank(), dist.get_world_size()))
    loader = DataLoader(samples, batch_sampler=shares)
    model = lenet(seed=0)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    steps = 0

    while meeting.hold(steps, shares.state_dict()):
        try:
            # copies the weights of rank 0, which has most steps
            ddp = DistributedDataParallel(model)
            take_moments(model, optimizer)
            steps = meeting.members[0].steps
            shares.load_state_dict(meeting.members[0].about)
            meeting.loaded()
            place = f"rank {dist.get_rank()} of {dist.get_world_size()}"
            print(f"process {number}: {place} from step {steps}\n", end="", flush=True)

            for pixels, digits in batches(shares, loader, options.epochs):
                if meeting.is_called():  # a new process waits
                    break
                if (number, steps, meeting.turn) == (options.kill_rank, options.at_step, 0):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                cross_entropy(ddp(pixels), digits).backward()  # raises if a rank has died
                optimizer.step()
                shares.done()
                steps += 1
            else:
                dist.barrier()  # nobody leaves before all have the last step
                meeting.end()
                break
        except dist.DistBackendError as error:
            print(f"process {number}: step {steps} again: {error}\n", end="", flush=True)

    with torch.no_grad():
        right = (model(test.pixels).argmax(1) == test.digits).float().mean().item()
    if meeting.turn >= 0 and dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks, {steps} steps: {right:.1%} of 1,000 test images",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
