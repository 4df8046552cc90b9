# SPDX-License-Identifier: Apache-2.0
"""What ``--recipe`` names: an optimizer, its learning rate over the epochs, and the sizes of
batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import NamedTuple

from dataset import TRAIN_IMAGES
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DistributedSampler

from commrt.data.large_batch import BatchSizeControl, Rate
from commrt.errors import UsageError

__all__ = ["PLAIN", "RECIPES", "Recipe", "batches", "require_fit"]


class Recipe(NamedTuple):
    """How to train."""

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
        if not self.is_large:
            return SGD(model.parameters(), lr=lr, momentum=0.9)
        from pytorch_optimizer import LARS  # noqa: PLC0415  # an extra, see `require_fit`

        large: Optimizer = LARS(
            model.parameters(), lr, momentum=0.9, weight_decay=5e-5, trust_coefficient=0.01
        )
        return large

    def rate(
        self, optimizer: Optimizer, control: BatchSizeControl, epochs: int
    ) -> LRScheduler | Rate:
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
    """Raise `UsageError` if recipe `name` needs more images than there are,
    or a missing package.
    """
    recipe = RECIPES[name]
    largest = max(
        size for since, size in recipe.sizes(batch_size, epochs).items() if since < epochs
    )
    if largest > TRAIN_IMAGES:
        raise UsageError(
            f"--batch-size {batch_size} grows to {largest} with --recipe {name}, but there are only"
            f" {TRAIN_IMAGES} training images: give at most {TRAIN_IMAGES // recipe.growth}"
        )
    if recipe.is_large and find_spec("pytorch_optimizer") is None:
        raise UsageError(
            f"--recipe {name} needs LARS from pytorch-optimizer: pip install 'commrt[recipe]'"
        )


def batches(
    recipe: Recipe, place: tuple[int, int], share: int, epochs: int, seed: int = 0
) -> BatchSizeControl:
    """Return the batches of `place` = (rank, workers); the first ones have `share` images."""
    rank, workers = place
    samples: DistributedSampler[int] = DistributedSampler(
        range(TRAIN_IMAGES), workers, rank, seed=seed, drop_last=True
    )
    return BatchSizeControl(samples, recipe.sizes(share, epochs))
