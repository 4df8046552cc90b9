# SPDX-License-Identifier: Apache-2.0
"""The random numbers of stochastic rounding: Philox 4x32-10 in numpy, and its keys.

Pure functions. Numbers depend on a key and a place only, so every back end draws the same ones, in
any order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from commrt.quantizer import Quantizer

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEYS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
PHILOX_COUNTERS = 1 << 14
"""Counters at once: what is computed from them stays in a core's cache."""


def key_of(seed: int, step: int, bucket: int, rank: int) -> int:
    """Return 64 bits that select the random numbers of one step, bucket and rank."""
    mixed = (
        seed * 0x9E3779B97F4A7C15
        + step * 0xBF58476D1CE4E5B9
        + bucket * 0x94D049BB133111EB
        + rank * 0xD6E8FEB86659FD93
    )
    mixed &= 2**64 - 1
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return mixed ^ (mixed >> 31)


def uniform(key: int, first: int, tiles: int, quantizer: Quantizer) -> Tensor:
    """Return numbers from [0, 1) for `tiles` from number `first` on, fp32 [tiles, tile_numel].

    They are Philox 4x32-10. A counter gives four, for values that lie a quarter of a tile apart.
    """
    quarter = quantizer.tile_numel // 4
    numbers = np.empty((tiles, 4, quarter), np.float32)
    at_once = max(1, PHILOX_COUNTERS // quarter)
    for begin in range(0, tiles, at_once):
        part = numbers[begin : begin + at_once]
        counters = np.arange(
            (first + begin) * quarter, (first + begin + len(part)) * quarter, dtype=np.uint64
        )
        for number, words in enumerate(_philox(key, counters)):
            whole = np.right_shift(words, np.uint64(8), out=words).reshape(len(part), quarter)
            np.multiply(whole, 2.0**-24, out=part[:, number], casting="unsafe")
    return torch.from_numpy(numbers.reshape(tiles, -1))


def _philox(key: int, counters: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return four arrays of 32 random bits each for all `counters`, which count modulo 2 ** 32."""
    mask = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    keys = [key & 0xFFFFFFFF, key >> 32]
    first, second = map(np.uint64, PHILOX_MULTIPLIERS)
    w0, (w1, w2, w3) = counters & mask, np.zeros((3, len(counters)), np.uint64)
    a, b = np.empty((2, len(counters)), np.uint64)
    for _ in range(PHILOX_ROUNDS):
        k0, k1 = map(np.uint64, keys)
        np.multiply(w0, first, out=a)
        np.multiply(w2, second, out=b)
        np.right_shift(b, half, out=w0)
        np.right_shift(a, half, out=w2)
        w0 ^= w1
        w0 ^= k0
        w2 ^= w3
        w2 ^= k1
        np.bitwise_and(b, mask, out=w1)
        np.bitwise_and(a, mask, out=w3)
        keys = [(k + bump) & 0xFFFFFFFF for k, bump in zip(keys, PHILOX_KEYS, strict=True)]
    return w0, w1, w2, w3
