# SPDX-License-Identifier: Apache-2.0
"""MNIST for the learning studies: its images, also of 14x14 pixels, and the batches of all ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

sys.path.append(str(Path(__file__).parents[2] / "examples" / "mnist"))  # the demo has the images

from dataset import Images, lenet, load

__all__ = ["BATCH", "FEEDS", "SIDE", "Images", "batches", "dealt", "kept", "lenet", "load", "shards", "small_images"]

BATCH, SIDE = 16, 14


@cache
def small_images() -> tuple[Images, Images]:
    """Return the images to train on and to test with, [n, 1, 14, 14]: means of 2x2 pixels."""
    train, test = (Images(avg_pool2d(images.pixels, 2), images.digits) for images in load())
    return train, test


def shards(images: Images, ranks: int, seed: int, sorted_by_class: bool = False) -> tuple[Tensor, Tensor]:
    """Return the shards: [ranks, n, pixels] and [ranks, n] digits, with one n for all ranks."""
    order = torch.randperm(len(images.digits), generator=torch.Generator().manual_seed(seed))
    if sorted_by_class:
        order = order[images.digits[order].argsort(stable=True)]
    order = order[: len(order) // ranks * ranks].view(ranks, -1)
    return images.pixels.flatten(1)[order], images.digits[order]


def batches(rows: int, ranks: int, seed: int, steps: int) -> Iterator[Tensor]:
    """Yield batches: [ranks, BATCH] places in each rank's shard of `rows` images, pass after pass."""
    generator = torch.Generator().manual_seed(1_000_003 * seed)
    while steps > 0:
        order = torch.stack([torch.randperm(rows, generator=generator) for _ in range(ranks)])
        yield from order[:, : rows // BATCH * BATCH].split(BATCH, dim=1)[:steps]
        steps -= rows // BATCH


def dealt(seed: int, steps: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of all ranks, [ranks, BATCH, ...]: each pass deals all images anew, as a `DistributedSampler`."""
    pixels, digits = small_images()[0].pixels, small_images()[0].digits
    generator = torch.Generator().manual_seed(seed)
    each = len(digits) // ranks // BATCH * BATCH
    while steps > 0:
        order = torch.randperm(len(digits), generator=generator)[: ranks * each].view(ranks, -1)
        for rows in order.split(BATCH, dim=1)[:steps]:
            yield pixels[rows], digits[rows]
        steps -= each // BATCH


def kept(seed: int, steps: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of all ranks, [ranks, BATCH, ...]: each rank has its own images for the whole run."""
    x, y = shards(small_images()[0], ranks, seed)
    every = torch.arange(ranks)[:, None]
    for rows in batches(x.shape[1], ranks, seed, steps):
        yield x[every, rows].view(ranks, BATCH, 1, SIDE, SIDE), y[every, rows]


FEEDS = {"dealt": dealt, "kept": kept}
