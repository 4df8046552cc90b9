# SPDX-License-Identifier: Apache-2.0
"""Compare growing batches with constant ones: ``python studies/large_batches/growing_batches.py``.

LeNet trains on MNIST at one learning rate: with a small batch, with a large one, and with the small one for a third of
the training and then the large one. The output is the accuracy of each, and its number of updates.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

import commrt
from commrt.data.large_batch import BatchSizeControl, Rate

sys.path.append(str(Path(__file__).parents[1] / "mnist"))  # as a program it finds only its own folder

from mnist_images import Images, lenet, load

EPOCHS, SMALL, LARGE, LR, MOST = 12, 32, 512, 0.05, 128
WAYS: Mapping[str, Mapping[int, int]] = {
    f"{SMALL}": {0: SMALL},
    f"{SMALL}, then {LARGE}": {0: SMALL, EPOCHS // 3: LARGE},
    f"{LARGE}": {0: LARGE},
}


@dataclass(frozen=True)
class Run:
    """One training run."""

    way: str
    seed: int
    updates: list[int]
    """Updates since the start, after each epoch."""
    accuracy: list[float]
    """Accuracy after each epoch, on 1,000 test images."""


def trained(way: str, seed: int, data: tuple[Images, Images], smoothing: float) -> Run:
    """Train on one rank, with the batch that all ranks have together."""
    train, test = data
    with commrt.init() as world:
        model = lenet(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        replica = commrt.attach(model, optimizer, commrt.Ring(), world=world)
        samples: DistributedSampler[int] = DistributedSampler(range(len(train.digits)), 1, 0, seed=seed)  # type: ignore[arg-type]  # only its length counts
        control = BatchSizeControl(samples, WAYS[way], most=MOST)
        rate = Rate(optimizer, control, EPOCHS, warmup_epochs=1.0, power=1.0)
        run = Run(way, seed, [], [])
        for epoch in range(EPOCHS):
            control.set_epoch(epoch)
            for places in control:
                with control.part(replica) as part:
                    guesses, digits = model(train.pixels[places]), train.digits[places]
                    (part.share * cross_entropy(guesses, digits, label_smoothing=smoothing)).backward()
                if part.is_last:
                    optimizer.step()
                    optimizer.zero_grad()
                    rate.step()
            run.updates.append(replica.step)
            run.accuracy.append(_accuracy(model, test))
    return run


def _accuracy(model: torch.nn.Module, test: Images) -> float:
    with torch.no_grad():
        return (model(test.pixels).argmax(1) == test.digits).float().mean().item()


def draw(runs: Sequence[Run], out: str) -> None:
    """Draw accuracy against updates: each seed, and their mean."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # only for this

    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for number, way in enumerate(WAYS):
        these = [run for run in runs if run.way == way]
        colour, updates = f"C{number}", these[0].updates
        for run in these:
            axes.plot(updates, [100 * each for each in run.accuracy], color=colour, lw=0.6, alpha=0.4)
        means = [100 * mean(each) for each in zip(*(run.accuracy for run in these), strict=True)]
        axes.plot(updates, means, "o-", color=colour, ms=4, label=f"batch {way}")
    axes.set_ylim(70, 100)
    axes.set_xlim(left=0)
    axes.set_xlabel("updates")
    axes.set_ylabel("test accuracy after each epoch, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"LeNet on MNIST, {EPOCHS} epochs, the same learning rate, {len(runs) // len(WAYS)} seeds", fontsize=11
    )
    figure.savefig(out, dpi=150)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--images", type=int, help="train on so many images, all 4,000 by default")
    parser.add_argument("--smoothing", type=float, default=0.0, help="label smoothing")
    parser.add_argument("--out", help="draw a picture into this file")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, test = load()
    data = Images(train.pixels[: options.images], train.digits[: options.images]), test
    runs = [trained(way, seed, data, options.smoothing) for seed in range(options.seeds) for way in WAYS]
    if options.json:
        print(json.dumps([asdict(run) for run in runs]))
    else:
        for way in WAYS:
            last = [100 * run.accuracy[-1] for run in runs if run.way == way]
            updates = next(run.updates[-1] for run in runs if run.way == way)
            spread = stdev(last) if len(last) > 1 else 0.0
            print(f"batch {way}: {mean(last):.1f} +- {spread:.1f} % after {updates:,} updates")
    if options.out:
        draw(runs, options.out)


if __name__ == "__main__":
    main()
