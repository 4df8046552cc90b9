# SPDX-License-Identifier: Apache-2.0
"""What ``commrt train --recipe`` decides: optimizer, learning rate, loss, and how large batches are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import count
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DistributedSampler

from commrt.cli.mnist import TRAIN_IMAGES, Images
from commrt.errors import UsageError
from commrt.recipe import BatchSizeControl, Rate, lars

__all__ = ["LARGE", "PLAIN", "RECIPES", "Feed", "Recipe", "batches", "images_after", "require_fit", "steps"]


class Recipe(NamedTuple):
    """How to train."""

    lr: float
    """The highest learning rate, where none is given."""
    growth: int
    """How many times as large batches are after a third of the epochs."""
    smoothing: float
    """Of labels."""
    is_large: bool
    """LARS, whose rate rises for an epoch first; otherwise SGD."""

    def sizes(self, share: int, epochs: int) -> dict[int, int]:
        """From which epoch on a batch of a rank has how many samples."""
        return {0: share, max(1, epochs // 3): self.growth * share}

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """For all parameters of `model`."""
        return lars(model, lr) if self.is_large else SGD(model.parameters(), lr=lr, momentum=0.9)

    def rate(self, optimizer: Optimizer, control: BatchSizeControl, epochs: int) -> LRScheduler | Rate:
        """To be stepped after each update."""
        if self.is_large:
            return Rate(optimizer, control, epochs, warmup_epochs=min(1.0, epochs / 4))
        return CosineAnnealingLR(optimizer, steps(control, epochs))


PLAIN, LARGE = "plain", "large-batch"
RECIPES: Mapping[str, Recipe] = {
    PLAIN: Recipe(lr=0.05, growth=1, smoothing=0.0, is_large=False),
    LARGE: Recipe(lr=1.0, growth=4, smoothing=0.1, is_large=True),
}


def require_fit(name: str, batch_size: int, epochs: int) -> None:
    """Raise `UsageError` unless recipe `name` can be followed here."""
    recipe = RECIPES[name]
    largest = max(size for since, size in recipe.sizes(batch_size, epochs).items() if since < epochs)
    if largest > TRAIN_IMAGES:
        raise UsageError(
            f"--batch-size {batch_size} grows to {largest} with --recipe {name}, and there are {TRAIN_IMAGES} images "
            f"to train on: give at most {TRAIN_IMAGES // recipe.growth}"
        )
    if recipe.is_large and find_spec("pytorch_optimizer") is None:
        raise UsageError(f"--recipe {name} needs LARS, of pytorch-optimizer: pip install 'commrt[recipe]'")


def steps(control: BatchSizeControl, epochs: int) -> int:
    """Of all `epochs`."""
    return sum(control.steps_in(epoch) for epoch in range(epochs))


def images_after(control: BatchSizeControl, updates: int) -> int:
    """How many a rank has seen."""
    images = 0
    for epoch in count():
        here = min(updates, control.steps_in(epoch))
        images, updates = images + here * control.batch_in(epoch), updates - here
        if not updates:
            break
    return images


class Feed:
    """A rank's batches, as large as after so many updates: who was late goes on as the others do."""

    def __init__(self, images: Images, control: BatchSizeControl) -> None:
        self._images, self._control = images, control
        self._rest: Iterator[list[int]] = iter(())
        self._epoch = -1

    def batch(self, updates: int) -> tuple[Tensor, Tensor]:
        """Pixels and digits of the step after so many `updates`."""
        epoch = int(self._control.epochs_after(updates))
        mine = next(self._rest, None) if epoch == self._epoch else None
        if mine is None:
            self._epoch, mine = epoch, self._first_of(epoch)
        return self._images.pixels[mine], self._images.digits[mine]

    def _first_of(self, epoch: int) -> list[int]:
        self._control.set_epoch(epoch)
        self._rest = iter(self._control)
        return next(self._rest)


def batches(recipe: Recipe, place: tuple[int, int], share: int, epochs: int, seed: int = 0) -> BatchSizeControl:
    """Of the training images of rank, workers = `place`; first of `share` images."""
    rank, workers = place
    samples: DistributedSampler[int] = DistributedSampler(range(TRAIN_IMAGES), workers, rank, seed=seed, drop_last=True)  # type: ignore[arg-type]  # a range will do
    return BatchSizeControl(samples, recipe.sizes(share, epochs))
