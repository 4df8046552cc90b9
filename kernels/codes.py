# SPDX-License-Identifier: Apache-2.0
"""Values to codes and back, in plain torch. This defines the kernels of coding, and runs on CPUs.

A code times its scale is exact in fp32 (8 bits times 8 bits), so decoding rounds nothing, fused or not. Other results
are rounded once per operation, as written here; the kernels for GPUs do the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from commrt.coding import STOCHASTIC, TILE_BLOCKS, Coding

__all__ = ["add_codes", "decode", "encode", "key_of", "uniform"]

PIECE_TILES = 32
"""Tiles that are coded at once: 64 Ki values of 256 in a block stay in a core's cache."""
SCALES_NBYTES = 2 * TILE_BLOCKS
INFINITY_BITS = 0x7F800000
LEAST_BITS = 0x0D800000
"""2 ** -100: a block of smaller values travels as zeros, so that no scale and no inverse leaves the normal floats."""
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEYS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10


class _Piece(NamedTuple):
    """Some tiles of a buffer."""

    values: Tensor
    """[numel] a part of the values; the last piece may end within a tile."""
    tiles: Tensor
    """uint8 [tiles, tile_nbytes]"""
    first: int
    """Number of its first tile."""


def encode(values: Tensor, codes: Tensor, coding: Coding, residual: Tensor | None = None, key: int = 0) -> None:
    """Write ``code(values + residual)`` to `codes`, and what that loses to `residual`.

    `values` and `residual` are fp32 [numel], `codes` uint8 [coding.nbytes(numel)]. A block that holds a value that is
    not finite becomes one of infinities or NaNs, and leaves no residual. `key` selects the random numbers.
    """
    rest = [values] if residual is None else [values, residual]
    for piece, left in zip(_pieces(values, codes, coding), _pieces(rest[-1], codes, coding), strict=True):
        x = _padded(piece.values if residual is None else piece.values + left.values, coding)
        scales, steps = _scales(x, coding)
        finite = steps.isfinite()
        q = _codes(x, steps, finite, coding, key, piece.first)
        piece.tiles[:, :SCALES_NBYTES].view(torch.int16).copy_(scales.view(-1, TILE_BLOCKS))
        _pack(q, piece.tiles[:, SCALES_NBYTES:], coding)
        if residual is not None:
            x.sub_(q.to(torch.float32).mul_(steps))
            x.masked_fill_(~finite, 0.0)
            left.values.copy_(x.view(-1)[: len(left.values)])


def decode(codes: Tensor, values: Tensor, coding: Coding) -> None:
    """Write what `codes` stand for to `values`; shapes as for `encode`."""
    for piece in _pieces(values, codes, coding):
        piece.values.copy_(_decoded(piece.tiles, coding)[: len(piece.values)])


def add_codes(values: Tensor, received: Sequence[Tensor], coding: Coding) -> None:
    """Compute ``values += decoded(received[0]) + ...`` from left to right; shapes as for `encode`."""
    for pieces in zip(*(_pieces(values, codes, coding) for codes in received), strict=True):
        for piece in pieces:
            piece.values.add_(_decoded(piece.tiles, coding)[: len(piece.values)])


def _pieces(values: Tensor, codes: Tensor, coding: Coding) -> Iterator[_Piece]:
    tiles = codes.view(-1, coding.tile_nbytes)
    for first in range(0, len(tiles), PIECE_TILES):
        begin, end = (number * coding.tile_numel for number in (first, first + PIECE_TILES))
        yield _Piece(values[begin:end], tiles[first : first + PIECE_TILES], first)


def _padded(x: Tensor, coding: Coding) -> Tensor:
    """Return `x` as blocks, [blocks, block], with zeros up to a whole tile."""
    missing = -len(x) % coding.tile_numel
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).view(-1, coding.block)


def _scales(x: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """Return each block's scale: its 16 bits, and its value [blocks, 1]; rounded up, so that no code is too large."""
    largest = (x.view(torch.int32) & 0x7FFFFFFF).amax(dim=1)  # as integers, NaN is above infinity
    scale = largest.view(torch.float32) * (1.0 / coding.largest)
    bits = scale.view(torch.int32).add(0xFFFF).bitwise_right_shift(16)
    bits = torch.where(largest >= INFINITY_BITS, largest.clamp(max=INFINITY_BITS + 0x400000) >> 16, bits)
    bits = torch.where(largest < LEAST_BITS, 0, bits)
    return bits.to(torch.int16), (bits << 16).view(torch.float32).unsqueeze(1)


def _codes(x: Tensor, steps: Tensor, finite: Tensor, coding: Coding, key: int, first: int) -> Tensor:
    """Return the codes of `x`, [blocks, block]: int8, or float8 for codes that are floats."""
    inverse = torch.where(finite & (steps > 0), 1.0 / steps, 0.0)
    y = x * inverse
    if coding.rounding == STOCHASTIC:
        y.add_(uniform(key, first, len(x) // TILE_BLOCKS, coding).view(x.shape).to(x.device)).floor_()
        y.clamp_(-coding.most, coding.most)
    elif not coding.is_float:
        y.round_()
    if not bool(finite.all()):
        y = torch.where(finite, y, 1.0)  # 1 times a scale that is not finite is not finite
    return y.to(torch.float8_e4m3fn if coding.is_float else torch.int8)


def _pack(q: Tensor, target: Tensor, coding: Coding) -> None:
    """Write codes to `target` [tiles, bytes], plane after plane: the k-th byte of a plane has codes that lie apart."""
    rows, begin, shift = q.view(torch.uint8).view(len(target), -1), 0, coding.bits
    for width in coding.planes:
        shift -= width
        end = begin + rows.shape[1] * width // 8
        if width == 8:  # a whole byte
            target.copy_(rows)
            return
        parts = ((rows >> shift) & ((1 << width) - 1)).view(len(rows), 8 // width, -1)
        plane = target[:, begin:end]
        plane.copy_(parts[:, 0])
        for number in range(1, 8 // width):
            plane |= parts[:, number] << (width * number)
        begin = end


def _unpacked(tiles: Tensor, coding: Coding) -> Tensor:
    """Return the codes of `tiles`, [tiles, tile_numel]: int8, or float8."""
    source, begin = tiles[:, SCALES_NBYTES:], 0
    if coding.bits == 8:
        return source.view(torch.float8_e4m3fn if coding.is_float else torch.int8)
    bits = torch.zeros(len(tiles), coding.tile_numel, dtype=torch.uint8, device=tiles.device)
    for width in coding.planes:
        end = begin + coding.tile_numel * width // 8
        parts = bits.view(len(tiles), 8 // width, -1)
        for number in range(8 // width):
            parts[:, number] = (parts[:, number] << width) | (
                (source[:, begin:end] >> (width * number)) & ((1 << width) - 1)
            )
        begin = end
    sign = 1 << (coding.bits - 1)
    return (bits ^ sign).view(torch.int8) - sign


def _decoded(tiles: Tensor, coding: Coding) -> Tensor:
    """Return the values of `tiles`, [numel]."""
    steps = (tiles[:, :SCALES_NBYTES].view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    values = _unpacked(tiles, coding).to(torch.float32).view(len(tiles), TILE_BLOCKS, coding.block)
    return values.mul_(steps.unsqueeze(2)).view(-1)


def key_of(seed: int, step: int, bucket: int, rank: int) -> int:
    """Return 64 bits that select the random numbers of one step, bucket and rank."""
    mixed = (
        seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + bucket * 0x94D049BB133111EB + rank * 0xD6E8FEB86659FD93
    )
    mixed &= 2**64 - 1
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return mixed ^ (mixed >> 31)


def uniform(key: int, first: int, tiles: int, coding: Coding) -> Tensor:
    """Return numbers from [0, 1) for so many `tiles` from number `first` on, fp32 [tiles, tile_numel]: Philox 4x32-10.

    A counter gives four numbers, for values that lie a quarter of a tile apart.
    """
    quarter = coding.tile_numel // 4
    counter = np.arange(first * quarter, (first + tiles) * quarter, dtype=np.uint64).reshape(tiles, 1, quarter)
    words = np.concatenate(_philox(key, counter), axis=1)  # [tiles, 4, quarter]
    return torch.from_numpy(((words >> np.uint64(8)).astype(np.float32) * np.float32(2**-24)).reshape(tiles, -1))


def _philox(key: int, counter: np.ndarray) -> list[np.ndarray]:
    """Return four arrays of 32 random bits each for every `counter` below 2 ** 32."""
    mask = np.uint64(0xFFFFFFFF)
    zero = np.zeros_like(counter)
    words, keys = [counter & mask, zero, zero, zero], [key & 0xFFFFFFFF, key >> 32]
    for _ in range(PHILOX_ROUNDS):
        a, b = words[0] * np.uint64(PHILOX_MULTIPLIERS[0]), words[2] * np.uint64(PHILOX_MULTIPLIERS[1])
        k0, k1 = map(np.uint64, keys)
        words = [(b >> np.uint64(32)) ^ words[1] ^ k0, b & mask, (a >> np.uint64(32)) ^ words[3] ^ k1, a & mask]
        keys = [(k + bump) & 0xFFFFFFFF for k, bump in zip(keys, PHILOX_KEYS, strict=True)]
    return words
