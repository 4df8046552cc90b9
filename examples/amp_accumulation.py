# SPDX-License-Identifier: Apache-2.0
"""Train with mixed precision, accumulation, clipping and a learning rate schedule, in the right
order.

::

    torchrun --nproc-per-node 4 examples/amp_accumulation.py --accumulate 4

It uses bf16 on a CPU, and fp16 with a ``GradScaler`` on a GPU, also for gradients on the wire. It
trains a small CNN on MNIST images.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from itertools import islice

import torch
from mnist.dataset import Images, lenet, load
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import commrt

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@torch.no_grad()
def accuracy(model: nn.Module, test: Images, device: torch.device) -> float:
    """Return the share of test images with the right digit."""
    return (model(test.pixels.to(device)).argmax(dim=1).cpu() == test.digits).float().mean().item()


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3, help="epochs to train")
    parser.add_argument("--images", type=int, default=4000, help="training images")
    parser.add_argument("--batch", type=int, default=16, help="images per pass and rank")
    parser.add_argument("--accumulate", type=int, default=2, help="passes per step")
    parser.add_argument(
        "--amp",
        choices=DTYPES,
        default="fp16" if torch.cuda.is_available() else "bf16",
        help="dtype of the passes",
    )
    return parser.parse_args()


def main() -> None:
    """Train, then print the accuracy."""
    options = parse_options()
    dtype = DTYPES[options.amp]

    with commrt.init() as world:
        device = world.device
        train, test = load()
        data = TensorDataset(train.pixels[: options.images], train.digits[: options.images])
        sampler = DistributedSampler(data, world.size, world.rank)
        loader = DataLoader(data, batch_size=options.batch, sampler=sampler)
        # the rest makes no whole step
        passes = len(loader) // options.accumulate * options.accumulate
        steps = options.epochs * passes // options.accumulate
        model = lenet(seed=0).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        # bf16 has the range of fp32
        scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
        replica = commrt.attach(model, optimizer, wire=dtype)

        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for number, (pixels, digits) in enumerate(islice(loader, passes), start=1):
                # Passes before the last one of a step add to this rank's gradients only: one
                # exchange per step. All ranks have the same number of batches, so is_last is the
                # same on all of them.
                is_last = number % options.accumulate == 0
                with nullcontext() if is_last else replica.no_sync():
                    with torch.autocast(device.type, dtype):
                        loss = (
                            cross_entropy(model(pixels.to(device)), digits.to(device))
                            / options.accumulate
                        )
                    # outside of autocast; the last pass averages all gradients
                    scaler.scale(loss).backward()
                if not is_last:
                    continue
                # Clip after the exchange, so that all ranks clip alike, and after unscaling, so
                # that sizes are real. A gradient that overflowed on one rank is infinite on all
                # ranks now, so all skip the same step.
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), max_norm=1.0)
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() >= scale:  # the scale shrinks after a skipped step
                    rate.step()
                optimizer.zero_grad()

        if world.rank == 0:  # replicas are bitwise equal, so one rank is enough
            right = accuracy(model, test, device)
            told = f"{right:.1%} of {len(test.digits):,} test images after {steps} steps"
            print(f"{world.size} ranks, {options.amp}: {told}")


if __name__ == "__main__":
    main()
