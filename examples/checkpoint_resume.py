# SPDX-License-Identifier: Apache-2.0
"""Save checkpoints, and resume a killed run: it ends with the bits of a run without an
interruption.

::

    torchrun --nproc-per-node 2 examples/checkpoint_resume.py --folder run --die-at 50
    torchrun --nproc-per-node 2 examples/checkpoint_resume.py --folder run  # goes on after step 40

If replicas average gradients, they are equal, and rank 0 saves the weights for all. If they gossip,
each rank saves its own weights: to make them equal for a checkpoint would change the training. Each
rank saves its random state.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from mnist.dataset import Images, lenet, load
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import commrt
from commrt.algorithms.catalogue import by_name
from commrt.training.tensor_bytes import fingerprint

BATCH = 16


class Checkpoints:
    """A folder of checkpoints that all ranks can read. ``latest`` names the last complete one."""

    def __init__(self, folder: Path, world: commrt.World, *, each_its_own: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.latest = folder / "latest"
        self.world = world
        self.writer = world.rank if each_its_own else 0

    def path(self, step: int, what: str, rank: int) -> Path:
        """Return the path of one file of a checkpoint."""
        return self.latest.with_name(f"step{step}-{what}-{rank}-of-{self.world.size}.pt")

    def save(self, step: int, weights: dict[str, Any], own: dict[str, Any]) -> None:
        """Write new files, then change `latest` atomically: a kill at any time leaves a complete
        checkpoint.

        To outlive a power cut as well, the files need ``os.fsync`` before that.
        """
        rank = self.world.rank
        torch.save(own, self.path(step, "own", rank))
        if rank == self.writer:
            torch.save(weights, self.path(step, "weights", rank))
        self.world.agree("saved", step=str(step))  # returns when all ranks are here
        # gossip goes on without a lost rank, but its file would be missing
        if rank == 0 and not self.world.lost:
            new = self.latest.with_suffix(".new")
            new.write_text(str(step))
            new.replace(self.latest)
            self._drop_all_but(step)

    def _drop_all_but(self, step: int) -> None:
        for old in self.latest.parent.glob("step*.pt"):
            if not old.name.startswith(f"step{step}-"):
                old.unlink()

    def load(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return what `save` stored last, or None at the first start."""
        found = self.latest.read_text() if self.latest.exists() else "none"
        self.world.agree(f"{self.latest}, which all ranks must be able to read", found=found)
        if found == "none":
            return None
        if not self.path(int(found), "own", self.world.rank).exists():
            raise SystemExit(
                f"{self.latest} names a checkpoint of another number of ranks: resume it with as"
                " many"
            )
        paths = (
            self.path(int(found), "weights", self.writer),
            self.path(int(found), "own", self.world.rank),
        )
        weights, own = (torch.load(path, map_location="cpu", weights_only=True) for path in paths)
        return weights, own


def batch_of(train: Images, step: int, world: commrt.World) -> tuple[Tensor, Tensor]:
    """Return this rank's images of `step`.

    The step determines them, so a checkpoint need not hold the order.
    """
    epoch, number = divmod(step, len(train.digits) // (BATCH * world.size))
    order = torch.randperm(len(train.digits), generator=torch.Generator().manual_seed(epoch))
    mine = order[number * BATCH * world.size :][world.rank : BATCH * world.size : world.size]
    return train.pixels[mine], train.digits[mine]


def parsed() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument(
        "--algorithm",
        choices=["torus2d", "ring", "halving_doubling", "gossip"],
        default="torus2d",
        help="algorithm to train with",
    )
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--die-at", type=int, help="kill all ranks after this step")
    return parser.parse_args()


def main() -> None:
    """Train from the latest checkpoint to the end."""
    options = parsed()
    with commrt.init() as world:
        device = world.device
        # on a GPU, equal bits also need torch.use_deterministic_algorithms(True)

        train, test = load()
        model = nn.Sequential(nn.Dropout(0.1), lenet(seed=0)).to(device)
        dice = (
            torch.cuda.default_generators[device.index]
            if device.index is not None
            else torch.default_generator
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        replica = commrt.attach(model, optimizer, by_name(options.algorithm))
        parts = {"model": model, "optimizer": optimizer, "rate": rate, "replica": replica}
        torch.manual_seed(world.rank)  # different dropout on each rank

        checkpoints = Checkpoints(options.folder, world, each_its_own=options.algorithm == "gossip")
        # after attach, which copies the weights of rank 0
        if (saved := checkpoints.load()) is not None:
            weights, own = saved
            for name, part in parts.items():
                part.load_state_dict(weights[name])
            dice.set_state(own["dice"])
            print(f"rank {world.rank}: goes on after step {replica.step}", flush=True)

        while replica.step < options.steps:
            pixels, digits = batch_of(train, replica.step, world)
            optimizer.zero_grad()
            cross_entropy(model(pixels.to(device)), digits.to(device)).backward()
            optimizer.step()
            rate.step()
            if replica.step % options.every == 0:
                replica.drain()  # ends exchanges of gossip
                # on a GPU, errors of an exchange come up only here: do not save its result
                world.wait()
                weights = {name: part.state_dict() for name, part in parts.items()}
                checkpoints.save(replica.step, weights, {"dice": dice.get_state()})
            if replica.step == options.die_at:
                os.kill(os.getpid(), signal.SIGKILL)

        replica.drain()
        mark = fingerprint(model)[:16]
        model.eval()
        with torch.no_grad():
            right = (
                (model(test.pixels.to(device)).argmax(dim=1).cpu() == test.digits).float().mean()
            )
        print(
            f"rank {world.rank}: {right:.1%} of {len(test.digits):,} test images, weights {mark}",
            flush=True,
        )


if __name__ == "__main__":
    main()
