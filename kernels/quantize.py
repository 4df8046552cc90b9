# SPDX-License-Identifier: Apache-2.0
"""Values to codes and back, in plain torch. This defines the kernels of quantization, and runs on CPUs.

A code times its scale is exact in fp32 (8 bits times 8 bits), so dequantizing rounds nothing, fused or not. Other
results are rounded once per operation, as written here; the kernels for GPUs do the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from commrt.quantizer import STOCHASTIC, TILE_BLOCKS, Quantizer

__all__ = ["add_quantized", "dequantize", "key_of", "quantize", "uniform"]

PIECE_NUMEL = 1 << 18
"""Values that are quantized at once: few calls of torch, and 1 MiB that stays in a cache."""
SCALES_NBYTES = 2 * TILE_BLOCKS
INFINITY_BITS = 0x7F800000
NAN_SCALE = 0x7FC0
HUGE_BITS = 0x7E800000
"""2 ** 126: a block with such a value travels as infinities, or its dequantized values could be, and their loss too."""
LEAST_BITS = 0x0D800000
"""2 ** -100: a block of smaller values travels as zeros, so that no scale and no inverse leaves the normal floats."""
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEYS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
PHILOX_COUNTERS = 1 << 14
"""Counters at once: what is computed from them stays in a core's cache."""


class _Piece(NamedTuple):
    """Some tiles of a buffer."""

    values: Tensor
    """[numel] a part of the values; the last piece may end within a tile."""
    tiles: Tensor
    """uint8 [tiles, tile_nbytes]"""
    first: int
    """Number of its first tile."""
    floats: Tensor
    """fp32 [tiles, tile_numel] of memory that all pieces of a call share."""
    bytes: Tensor
    """int8 [tiles, tile_numel] of such memory."""

    @property
    def is_whole(self) -> bool:
        return self.values.numel() == self.floats.numel()


class _Scales(NamedTuple):
    """The scales of some blocks, rounded up, so that no code is too large."""

    bits: Tensor
    """int32 [blocks] of which 16 travel."""
    steps: Tensor
    """fp32 [blocks, 1]"""
    inverse: Tensor
    """fp32 [blocks, 1]: 0 for a block of zeros, and for one that is not finite."""
    infinite: Tensor | None
    """[blocks, 1] which blocks are not finite; None if there is none."""


def quantize(values: Tensor, codes: Tensor, quantizer: Quantizer, residual: Tensor | None = None, key: int = 0) -> None:
    """Write ``code(values + residual)`` to `codes`, and what that loses to `residual`.

    `values` and `residual` are fp32 [numel], `codes` uint8 [quantizer.nbytes(numel)]. A block with a value that is
    not finite, or of 2 ** 126 or more, becomes one of infinities or NaNs, and leaves no residual. `key` selects the
    random numbers.
    """
    for piece in _pieces(values if residual is None else residual, codes, quantizer):
        if residual is not None:
            begin = piece.first * quantizer.tile_numel
            piece.values.add_(values[begin : begin + len(piece.values)])
        _encode_piece(piece, quantizer, key, feedback=residual is not None)


def _encode_piece(piece: _Piece, quantizer: Quantizer, key: int, *, feedback: bool) -> None:
    """Code the values of `piece`, which with `feedback` become what that loses."""
    x = _padded(piece.values, quantizer)
    y = piece.floats.view_as(x)
    scales = _scales(x, quantizer)
    torch.mul(x, scales.inverse, out=y)
    _round(y, piece, quantizer, key)
    if scales.infinite is not None:
        y.masked_fill_(scales.infinite, 1.0)  # 1 times a scale that is not finite is not finite
    _scale_bits(piece.tiles).copy_(scales.bits.view(-1, TILE_BLOCKS))
    _pack(piece, quantizer)
    if feedback:
        _unpack(piece, quantizer)
        torch.sub(x, y.mul_(scales.steps), out=y)
        if scales.infinite is not None:
            y.masked_fill_(scales.infinite, 0.0)
        piece.values.copy_(y.view(-1)[: len(piece.values)])


def dequantize(codes: Tensor, values: Tensor, quantizer: Quantizer) -> None:
    """Write what `codes` stand for to `values`; shapes as for `encode`."""
    for piece in _pieces(values, codes, quantizer):
        if piece.is_whole:
            into = piece._replace(floats=piece.values.view_as(piece.floats))
            _unpack(into, quantizer)
            _blocks(into.floats, quantizer).mul_(_steps(piece.tiles))
        else:
            piece.values.copy_(_decoded(piece, quantizer))


def add_quantized(values: Tensor, received: Sequence[Tensor], quantizer: Quantizer) -> None:
    """Compute ``values += dequantized(received[0]) + ...`` from left to right; shapes as for `encode`."""
    rows = [_tiles(codes, quantizer) for codes in received]
    for piece in _pieces(values, received[0], quantizer):
        for tiles in rows:
            _add_piece(piece._replace(tiles=tiles[piece.first : piece.first + len(piece.tiles)]), quantizer)


def _add_piece(piece: _Piece, quantizer: Quantizer) -> None:
    if piece.is_whole:
        _unpack(piece, quantizer)
        q, steps = _blocks(piece.floats, quantizer), _steps(piece.tiles)
        _blocks(piece.values, quantizer).addcmul_(q, steps)  # exact products: rounded once
    else:
        piece.values.add_(_decoded(piece, quantizer))


def _decoded(piece: _Piece, quantizer: Quantizer) -> Tensor:
    _unpack(piece, quantizer)
    _blocks(piece.floats, quantizer).mul_(_steps(piece.tiles))
    return piece.floats.view(-1)[: len(piece.values)]


def _pieces(values: Tensor, codes: Tensor, quantizer: Quantizer) -> Iterator[_Piece]:
    tiles, most = _tiles(codes, quantizer), PIECE_NUMEL // quantizer.tile_numel
    shape = min(most, len(tiles)), quantizer.tile_numel
    floats = torch.empty(shape, device=values.device)
    memory = torch.empty(shape, dtype=torch.int8, device=values.device)
    for first in range(0, len(tiles), most):
        part = tiles[first : first + most]
        begin, end = (number * quantizer.tile_numel for number in (first, first + len(part)))
        yield _Piece(values[begin:end], part, first, floats[: len(part)], memory[: len(part)])


def _tiles(codes: Tensor, quantizer: Quantizer) -> Tensor:
    return codes.view(-1, quantizer.tile_nbytes)


def _padded(x: Tensor, quantizer: Quantizer) -> Tensor:
    """Return `x` as blocks, [blocks, block], with zeros up to a whole tile."""
    missing = -len(x) % quantizer.tile_numel
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).view(-1, quantizer.block)


def _blocks(x: Tensor, quantizer: Quantizer) -> Tensor:
    return x.view(-1, TILE_BLOCKS, quantizer.block)


def _scale_bits(tiles: Tensor) -> Tensor:
    return tiles[:, :SCALES_NBYTES].view(torch.int16)


def _steps(tiles: Tensor) -> Tensor:
    """Return the scales of `tiles`, [tiles, blocks, 1]."""
    return tiles[:, :SCALES_NBYTES].view(torch.bfloat16).float().unsqueeze(2)


def _scales(x: Tensor, quantizer: Quantizer) -> _Scales:
    """Return the scales of blocks `x`."""
    largest = torch.maximum(x.amax(dim=1), x.amin(dim=1).neg_()).abs_().view(torch.int32)  # NaN is above infinity
    least, most = (int(bits) for bits in torch.aminmax(largest))
    bits = (largest.view(torch.float32) * (1.0 / quantizer.largest)).view(torch.int32).add_(0xFFFF)
    bits.bitwise_right_shift_(16)
    if most >= HUGE_BITS:
        bits.masked_fill_(largest >= HUGE_BITS, INFINITY_BITS >> 16).masked_fill_(largest > INFINITY_BITS, NAN_SCALE)
    if least < LEAST_BITS:
        bits.masked_fill_(largest < LEAST_BITS, 0)
    steps = (bits << 16).view(torch.float32).unsqueeze(1)
    infinite = (largest >= HUGE_BITS).unsqueeze(1) if most >= HUGE_BITS else None
    inverse = steps.reciprocal()
    if infinite is not None or least < LEAST_BITS:
        inverse.masked_fill_(~inverse.isfinite(), 0.0)
    return _Scales(bits, steps, inverse, infinite)


def _round(y: Tensor, piece: _Piece, quantizer: Quantizer, key: int) -> None:
    """Round `y`, [blocks, block], to codes that are integers; leaves those that are floats."""
    if quantizer.rounding == STOCHASTIC:
        y.add_(uniform(key, piece.first, len(piece.tiles), quantizer).view(y.shape).to(y.device)).floor_()
        y.clamp_(-quantizer.most, quantizer.most)
    elif not quantizer.is_float:
        y.round_()


def _pack(piece: _Piece, quantizer: Quantizer) -> None:
    """Write the codes in `floats`, plane after plane: the k-th byte of a plane has codes that lie apart."""
    begin, shift = SCALES_NBYTES, quantizer.bits
    if quantizer.bits == 8:
        piece.tiles[:, begin:].view(torch.float8_e4m3fn if quantizer.is_float else torch.int8).copy_(piece.floats)
        return
    rows = piece.bytes.copy_(piece.floats).view(torch.uint8)
    for width in quantizer.planes:
        shift -= width
        end = begin + rows.shape[1] * width // 8
        parts = rows.view(len(rows), 8 // width, -1)
        plane = parts[:, -1] >> shift
        for number in reversed(range(8 // width - 1)):
            plane <<= width
            plane |= (parts[:, number] >> shift) & ((1 << width) - 1)
        piece.tiles[:, begin:end].copy_(plane)
        begin = end


def _unpack(piece: _Piece, quantizer: Quantizer) -> None:
    """Write the codes of `tiles` to `floats`."""
    if quantizer.is_float:
        # In the order of fp16, whose exponent counts 8 more. No code is NaN: what is not finite is so by its scale.
        halves = (piece.tiles[:, SCALES_NBYTES:].view(torch.int8).to(torch.int16) << 7).bitwise_and_(0xBF80 - (1 << 16))
        piece.floats.copy_(halves.view(torch.float16)).mul_(256.0)
    elif quantizer.bits == 8:
        piece.floats.copy_(piece.tiles[:, SCALES_NBYTES:].view(torch.int8))
    else:
        piece.floats.copy_(_unpack_planes(piece.tiles.view(torch.int8), piece.bytes, quantizer))


def _unpack_planes(tiles: Tensor, codes: Tensor, quantizer: Quantizer) -> Tensor:
    """Write the codes of `tiles` to `codes`, int8 [tiles, tile_numel]; shifts to the right keep the sign."""
    begin = SCALES_NBYTES
    for width in quantizer.planes:
        end = begin + quantizer.tile_numel * width // 8
        plane, parts = tiles[:, begin:end], codes.view(len(codes), 8 // width, -1)
        for number in range(8 // width):
            if begin == SCALES_NBYTES:
                torch.bitwise_right_shift(plane << (8 - width * (number + 1)), 8 - width, out=parts[:, number])
            else:
                parts[:, number].bitwise_left_shift_(width).bitwise_or_(
                    (plane >> (width * number)) & ((1 << width) - 1)
                )
        begin = end
    return codes


def key_of(seed: int, step: int, bucket: int, rank: int) -> int:
    """Return 64 bits that select the random numbers of one step, bucket and rank."""
    mixed = (
        seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + bucket * 0x94D049BB133111EB + rank * 0xD6E8FEB86659FD93
    )
    mixed &= 2**64 - 1
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return mixed ^ (mixed >> 31)


def uniform(key: int, first: int, tiles: int, quantizer: Quantizer) -> Tensor:
    """Return numbers from [0, 1) for so many `tiles` from number `first` on, fp32 [tiles, tile_numel]: Philox 4x32-10.

    A counter gives four numbers, for values that lie a quarter of a tile apart.
    """
    quarter = quantizer.tile_numel // 4
    numbers = np.empty((tiles, 4, quarter), np.float32)
    at_once = max(1, PHILOX_COUNTERS // quarter)
    for begin in range(0, tiles, at_once):
        part = numbers[begin : begin + at_once]
        counters = np.arange((first + begin) * quarter, (first + begin + len(part)) * quarter, dtype=np.uint64)
        for number, words in enumerate(_philox(key, counters)):
            whole = np.right_shift(words, np.uint64(8), out=words).reshape(len(part), quarter)
            np.multiply(whole, 2.0**-24, out=part[:, number], casting="unsafe")
    return torch.from_numpy(numbers.reshape(tiles, -1))


def _philox(key: int, counters: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return four arrays of 32 random bits each for all `counters`, which count modulo 2 ** 32."""
    mask, half, keys = np.uint64(0xFFFFFFFF), np.uint64(32), [key & 0xFFFFFFFF, key >> 32]
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
