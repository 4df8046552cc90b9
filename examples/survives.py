# SPDX-License-Identifier: Apache-2.0
r"""A job that survives: backup workers, replacement, checkpoints of torch.distributed.checkpoint,
and resuming.

::

    torchrun --standalone --nproc-per-node 4 --max-restarts 3 --no-python \
        examples/launch/replace.sh python examples/survives.py --folder run --kill-ranks 2

Each step uses the first N of N + b gradients, so that b ranks may be slow or die. Here ranks sleep
at random. Samples whose gradients came too late, or whose rank has died, come again: each is used
once per epoch.

`replace.sh` starts a process that died again, which takes its old place while the others train. If
more ranks are lost than there are backups, all exit with code 75: the launcher starts them again,
and they go on from the last checkpoint.

The first rank of a step's quorum writes the checkpoint, alone. It has the weights of that step, as
all that counted have, and nobody waits for it. If it dies meanwhile, its folder stays incomplete,
and the checkpoint before is the last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from random import Random
from time import sleep
from typing import Any
from uuid import uuid4

import torch
import torch.distributed.checkpoint as dcp
from mnist.dataset import lenet, load
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import commrt
from commrt.errors import DeadlineExceeded, PeerLost, QuorumLost, UsageError
from commrt.training.replica import Replica


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in order: those with the file `.metadata`, which is written
    at the end.
    """
    return sorted(file.parent for file in folder.glob("step*/.metadata"))


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint in a folder that no other process writes to, then drop all but it and the
    one before.
    """
    mine = folder / f"step{state['replica']['step']:09}-{uuid4().hex}"
    dcp.save(state, checkpoint_id=mine, no_dist=True)
    for old in [each for each in complete(folder) if each < mine][:-1]:
        shutil.rmtree(old, ignore_errors=True)


def state_of(
    model: nn.Module,
    optimizer: Optimizer,
    rate: CosineAnnealingLR,
    shares: commrt.Shares,
    replica: dict[str, Any],
) -> dict[str, Any]:
    """Return what a checkpoint holds."""
    weights, moments = get_state_dict(model, optimizer)
    # as a text, since lists in a checkpoint keep their length
    place = json.dumps(shares.state_dict())
    return {
        "model": weights,
        "optimizer": moments,
        "rate": rate.state_dict(),
        "shares": place,
        "replica": replica,
    }


def resume(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    rate: CosineAnnealingLR,
    shares: commrt.Shares,
) -> int:
    """Load the last complete checkpoint; return its step, 0 if there is none."""
    if not (found := complete(folder)):
        return 0
    state = state_of(model, optimizer, rate, shares, {"step": 0})
    dcp.load(state, checkpoint_id=found[-1], no_dist=True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    rate.load_state_dict(state["rate"])
    shares.load_state_dict(json.loads(state["shares"]))
    return int(state["replica"]["step"])


def done(folder: Path) -> Path:
    """Return the file that exists after the last step."""
    return folder / "done"


def batches(
    shares: commrt.Shares, loader: DataLoader[Any], replica: Replica
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's batches, epoch by epoch."""
    while True:
        yield from shares.batches(loader, replica)


def parsed() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="folder of the checkpoints, which all ranks can read",
    )
    parser.add_argument("--backups", type=int, default=1, help="b: fewer than half of the ranks")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument(
        "--slow", type=float, default=0.1, help="probability that a rank is slow in a step"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="how long a slow rank sleeps")
    parser.add_argument("--kill-ranks", type=int, nargs="*", default=[], help="kill these once")
    parser.add_argument("--at-step", type=int, default=30, help="the step in which they are killed")
    return parser.parse_args()


def train(options: argparse.Namespace, world: commrt.World) -> None:
    """Train to the end, from the last checkpoint or from the state of the others."""
    images, test = load()
    model = lenet(seed=0).to(world.device)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    rate = CosineAnnealingLR(optimizer, options.steps)
    is_first = not world.is_replacement  # which gets the state of the others
    samples = TensorDataset(images.pixels, images.digits)
    shares = commrt.Shares(samples, 32)
    loader = DataLoader(samples, batch_sampler=shares)
    # before attach, which hooks the optimizer
    found = resume(options.folder, model, optimizer, rate, shares) if is_first else 0
    replica = commrt.attach(
        model, optimizer, commrt.BackupWorkers(options.backups), also=[rate, shares]
    )
    if is_first:
        replica.load_state_dict({"step": found})  # an error if ranks found different checkpoints
    what = "begins" if is_first else "takes its place"
    print(f"rank {world.rank} {what} at step {replica.step}\n", end="", flush=True)

    chance = Random(world.rank)
    for pixels, digits in batches(shares, loader, replica):
        # of all ranks: a loop's own counter would fall behind on a late rank
        if replica.step >= options.steps:
            break
        if (
            is_first
            and world.rank in options.kill_ranks
            and found == 0
            and replica.step >= options.at_step
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = cross_entropy(model(pixels.to(world.device)), digits.to(world.device))
        if chance.random() < options.slow:
            sleep(options.seconds)
        loss.backward()  # the mean of the first N gradients, or nothing if this one came too late
        # does nothing then; this rank gets the weights before its next forward pass
        optimizer.step()
        rate.step()
        shares.done()  # this rank takes the position of the others, too
        report = replica.last
        if replica.step % options.every == 0 and report.counted and world.rank == report.members[0]:
            save(options.folder, state_of(model, optimizer, rate, shares, replica.state_dict()))

    replica.consolidate()  # brings late ranks up to date
    if world.rank == world.members[0]:
        save(options.folder, state_of(model, optimizer, rate, shares, replica.state_dict()))
        done(options.folder).touch()
        with torch.no_grad():
            right = (
                (model(test.pixels.to(world.device)).argmax(dim=1).cpu() == test.digits)
                .float()
                .mean()
            )
        print(
            f"{len(world.members)} ranks: {right:.1%} of {len(test.digits):,} test images",
            flush=True,
        )


def main() -> None:
    """Train, unless that has been done."""
    options = parsed()
    # a replacement that comes too late, or a job that was queued again
    if done(options.folder).exists():
        return
    is_replacement = False
    try:
        with commrt.init() as world:
            is_replacement = world.is_replacement
            train(options, world)
    except (QuorumLost, PeerLost, DeadlineExceeded, UsageError) as error:
        traceback.print_exc()
        # nobody has a state for a replacement
        is_over = isinstance(error, QuorumLost | PeerLost) or is_replacement
        # wrong options; a rank that others go on without
        alone = 2 if isinstance(error, UsageError) else 1
        sys.exit(os.EX_TEMPFAIL if is_over else alone)  # 75: start all ranks again


if __name__ == "__main__":
    main()
