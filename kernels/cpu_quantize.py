# SPDX-License-Identifier: Apache-2.0
"""Codes on CPUs, by Numba: the same bits as `commrt.kernels.quantize`, in one pass over memory.

A tile (drawn there) fits a core's nearest cache, so it is loaded, scaled, rounded and packed in
that. Functions run without Python's lock. The compiler may not fuse or reorder operations on floats
here, so each is rounded as the definition says. It can use wide registers only in loops whose index
cannot be negative: hence the many functions of whole slices. They write to the memory they are
given, on the calling thread: `x` are a tile's values, `y` those in units of their scales, and `q`
the codes, a byte each.

Numba's cache sees changes of this file only: after a change of a constant that is imported here,
touch this file. Importing this raises `RuntimeError` where Numba may write no cache: compiling
takes 6 seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import njit, uint32, uint64
from torch import Tensor

from commrt.kernels.philox import PHILOX_KEYS, PHILOX_MULTIPLIERS, PHILOX_ROUNDS
from commrt.kernels.quantize import (
    HUGE_BITS,
    INFINITY_BITS,
    LEAST_BITS,
    NAN_SCALE,
    SCALES_NBYTES,
)
from commrt.quantizer import STOCHASTIC, TILE_BLOCKS, Quantizer

Array = Any
"""An array of numpy, of the dtype that Numba infers, or a number of it."""
compiled = njit(nogil=True, cache=True, error_model="numpy")
MULTIPLIER_0, MULTIPLIER_1 = (np.uint64(each) for each in PHILOX_MULTIPLIERS)
BUMP_0, BUMP_1 = (np.uint32(each) for each in PHILOX_KEYS)
PIECE_NUMEL = 1 << 16
"""Values that all rows are added to before the next ones: they stay in a core's cache."""
ABSOLUTE = np.int32(0x7FFFFFFF)
LEAST_NORMAL = np.int32(0x3C800000)
"""2 ** -6, the least of e4m3 with all its bits, as fp32."""
WHOLE = np.float32(1.5 * 2**23)
"""Added to a small number, and subtracted again, it leaves the nearest integer."""
EXPONENTS = np.int32(120 << 23)
"""What exponents of fp32 count more than those of e4m3."""


def quantize_call(
    values: Tensor, codes: Tensor, quantizer: Quantizer, residual: Tensor | None
) -> Callable[[int], None]:
    """Return a function of a key that codes `values`; see `quantize.quantize`."""
    tiles = _tiles(codes, quantizer)
    x = values.numpy()
    is_stochastic = quantizer.rounding == STOCHASTIC
    left = np.empty(0, np.float32) if residual is None else residual.numpy()
    form = (
        quantizer.block,
        quantizer.bits,
        np.float32(quantizer.largest),
        quantizer.is_float,
        is_stochastic,
    )
    # compiles it, before anybody waits for this rank
    _encode(x[:0], left[:0], tiles[:0], np.uint64(0), form)
    return lambda key: _encode(x, left, tiles, np.uint64(key), form)


def sum_call(
    received: Sequence[Tensor], values: Tensor, quantizer: Quantizer, *, is_added: bool
) -> Callable[[], None]:
    """Return a function that adds what `received` stand for, or writes it; see `add_quantized`."""
    out = values.numpy()
    form = (quantizer.block, quantizer.bits, quantizer.is_float, is_added)
    _sum(out[:0], _tiles(received[0], quantizer)[:0], *form)
    at_once = PIECE_NUMEL // quantizer.tile_numel

    def run() -> None:
        # not kept: a transport may lend the senders' memory
        rows = [_tiles(each, quantizer) for each in received]
        for first in range(0, len(rows[0]), at_once):
            piece = out[first * quantizer.tile_numel : (first + at_once) * quantizer.tile_numel]
            for tiles in rows:
                _sum(piece, tiles[first : first + at_once], *form)

    return run


def _tiles(codes: Tensor, quantizer: Quantizer) -> Array:
    return codes.view(-1, quantizer.tile_nbytes).numpy()


@compiled
def _encode(
    values: Array, residual: Array, tiles: Array, key: Array, form: tuple[Any, ...]
) -> None:
    """Code `values` and their `residual`, if it is not empty, which then has what is lost."""
    # a named tuple, and functions of it, take Numba more time
    block, bits, largest, is_float, is_stochastic = form
    numel = TILE_BLOCKS * block
    x = np.zeros(numel, np.float32)
    y = np.empty(numel, np.float32)
    numbers = np.empty(numel, np.float32)
    q = np.empty(numel, np.uint8)
    most = np.empty(TILE_BLOCKS, np.int32)
    scales = np.empty(TILE_BLOCKS, np.float32)
    for tile in range(len(tiles)):
        given = values[tile * numel : (tile + 1) * numel]
        left = residual[tile * numel : (tile + 1) * numel]
        _load(x, given, left)
        _set_scales(tiles[tile], x, block, largest, most, scales)
        if is_stochastic:
            _uniform(numbers, key, tile)
        for each in range(TILE_BLOCKS):
            part = slice(each * block, (each + 1) * block)
            inverse = _inverse(scales[each])
            if is_float:
                _round_floats(x[part], inverse, q[part], y[part])
            elif is_stochastic:
                _round_at_random(x[part], inverse, numbers[part], largest, q[part], y[part])
            else:
                _round(x[part], inverse, q[part], y[part])
            if most[each] >= HUGE_BITS:
                # 1 times a scale that is not finite
                q[part] = np.uint8(0x38) if is_float else np.uint8(1)
        _pack(tiles[tile], q, bits)
        for each in range(TILE_BLOCKS if len(left) else 0):
            part = slice(each * block, (each + 1) * block)
            if most[each] >= HUGE_BITS:
                left[part] = 0  # what is not finite leaves nothing
            else:
                _subtract(left[part], x[part], y[part], scales[each])


@compiled
def _load(x: Array, values: Array, residual: Array) -> None:
    for i in range(len(values)):
        x[i] = values[i]
    for i in range(len(residual)):
        x[i] += residual[i]
    x[len(values) :] = 0


@compiled
def _inverse(scale: Array) -> Array:
    inverse = np.float32(1) / scale
    return inverse if np.isfinite(inverse) and np.isfinite(scale) else np.float32(0)


@compiled
def _set_scales(
    tile: Array, x: Array, block: int, largest: Array, most: Array, scales: Array
) -> None:
    """Write scales, rounded up, to `tile` and `scales`; each block's largest value to `most`."""
    magnitudes = x.view(np.int32)
    for each in range(TILE_BLOCKS):
        most[each] = _largest(magnitudes[each * block : (each + 1) * block])
    share = np.float32(1.0 / largest)
    sent = tile[:SCALES_NBYTES].view(np.uint16)
    kept = scales.view(np.int32)
    for each in range(TILE_BLOCKS):
        scales[each] = most.view(np.float32)[each] * share
        bits = (kept[each] + 0xFFFF) >> 16
        if most[each] >= HUGE_BITS:
            bits = NAN_SCALE if most[each] > INFINITY_BITS else INFINITY_BITS >> 16
        if most[each] < LEAST_BITS:
            bits = 0
        sent[each] = bits
        kept[each] = bits << 16


@compiled
def _largest(signed: Array) -> Array:
    top = np.int32(0)
    for i in range(len(signed)):
        top = max(top, np.int32(signed[i] & ABSOLUTE))  # NaN is above infinity
    return top


@compiled
def _round(x: Array, inverse: Array, q: Array, y: Array) -> None:
    for i in range(len(x)):
        y[i] = np.rint(x[i] * inverse)
        q[i] = np.uint8(np.int32(y[i]))


@compiled
def _round_at_random(
    x: Array, inverse: Array, numbers: Array, largest: Array, q: Array, y: Array
) -> None:
    for i in range(len(x)):
        y[i] = min(max(np.floor(x[i] * inverse + numbers[i]), -largest), largest)
        q[i] = np.uint8(np.int32(y[i]))


@compiled
def _round_floats(x: Array, inverse: Array, q: Array, y: Array) -> None:
    """Round to e4m3 by integers: to nearest, ties to even."""
    for i in range(len(x)):
        y[i] = x[i] * inverse
    bits = y.view(np.int32)
    for i in range(len(x)):
        size = np.int32(bits[i] & ABSOLUTE)
        normal = np.int32(size - EXPONENTS + 0x7FFFF + ((size >> 20) & 1)) >> 20
        small = np.int32(np.abs(y[i]) * np.float32(512) + WHOLE - WHOLE)
        code = small if size < LEAST_NORMAL else normal
        q[i] = np.uint8(code | ((bits[i] >> 24) & 0x80))
    _floats(q, y)


@compiled
def _floats(q: Array, y: Array) -> None:
    """Write the values of e4m3 codes. No code is NaN: what is not finite is so by its scale."""
    bits = y.view(np.int32)
    for i in range(len(q)):
        bits[i] = ((np.int32(q[i]) & 0x7F) << 20) | ((np.int32(q[i]) & 0x80) << 24)
    for i in range(len(q)):
        y[i] *= np.float32(2.0**120)


@compiled
def _subtract(residual: Array, x: Array, y: Array, scale: Array) -> None:
    for i in range(len(residual)):
        residual[i] = x[i] - y[i] * scale


@compiled
def _sum(
    values: Array, tiles: Array, block: int, bits: int, is_float: bool, is_added: bool
) -> None:
    """Write what `tiles` stand for to `values`, or add it."""
    numel = TILE_BLOCKS * block
    q = np.empty(numel, np.uint8)
    y = np.empty(numel, np.float32)
    scales = np.empty(TILE_BLOCKS, np.float32)
    share = np.float32(2.0 ** (bits - 8))  # exact: codes are in the highest bits
    for tile in range(len(tiles)):
        out = values[tile * numel : (tile + 1) * numel]
        sent = tiles[tile][:SCALES_NBYTES].view(np.uint16)
        _unpack(tiles[tile], q, bits)
        if is_float:
            _floats(q, y)
        else:
            _integers(q.view(np.int8), y)
        for each in range(TILE_BLOCKS):
            part = slice(each * block, (each + 1) * block)
            scales.view(np.uint32)[each] = np.uint32(sent[each]) << np.uint32(16)
            if is_added:
                _add_scaled(out[part], y[part], scales[each] * share)
            else:
                _write_scaled(out[part], y[part], scales[each] * share)


@compiled
def _integers(q: Array, y: Array) -> None:
    for i in range(len(q)):
        y[i] = q[i]


@compiled
def _write_scaled(out: Array, y: Array, scale: Array) -> None:
    for i in range(len(out)):
        out[i] = y[i] * scale


@compiled
def _add_scaled(out: Array, y: Array, scale: Array) -> None:
    for i in range(len(out)):
        out[i] += y[i] * scale  # exact products: rounded once


@compiled
def _pack(tile: Array, q: Array, bits: int) -> None:
    """Write the lowest `bits` of each code, plane after plane; a byte has codes that lie apart.

    Eight codes are moved at once, as the bytes of a word.
    """
    begin = SCALES_NBYTES
    shift = bits
    for width in (8, 4, 2, 1):
        if bits & width:
            shift -= width
            plane = tile[begin : begin + len(q) * width // 8]
            begin += len(plane)
            plane[:] = 0
            for number in range(8 // width):
                part = q[number * len(plane) : (number + 1) * len(plane)]
                _move(part.view(np.uint64), plane.view(np.uint64), width, shift, width * number)


@compiled
def _unpack(tile: Array, q: Array, bits: int) -> None:
    """Write a tile's codes to the highest bits of `q`, so that signs are where int8 has them."""
    q[:] = 0
    begin = SCALES_NBYTES
    shift = 8
    for width in (8, 4, 2, 1):
        if bits & width:
            shift -= width
            plane = tile[begin : begin + len(q) * width // 8]
            begin += len(plane)
            for number in range(8 // width):
                part = q[number * len(plane) : (number + 1) * len(plane)]
                _move(plane.view(np.uint64), part.view(np.uint64), width, width * number, shift)


@compiled
def _move(source: Array, target: Array, width: int, down: int, up: int) -> None:
    """Add to each byte of `target`, `up` bits up, the `width` bits `down` bits up in `source`."""
    mask = uint64(0x0101010101010101) * uint64((1 << width) - 1)
    low = uint64(down)
    high = uint64(up)
    for k in range(len(source)):
        target[k] |= ((source[k] >> low) & mask) << high


@compiled
def _uniform(numbers: Array, key: Array, tile: int) -> None:
    """Write numbers from [0, 1); see `philox.uniform`."""
    quarter = len(numbers) // 4
    for k in range(quarter):
        w0, w1, w2, w3 = _philox(uint32(uint64(tile) * uint64(quarter) + uint64(k)), key)
        numbers[k] = np.float32(w0 >> uint32(8)) * np.float32(2.0**-24)
        numbers[quarter + k] = np.float32(w1 >> uint32(8)) * np.float32(2.0**-24)
        numbers[2 * quarter + k] = np.float32(w2 >> uint32(8)) * np.float32(2.0**-24)
        numbers[3 * quarter + k] = np.float32(w3 >> uint32(8)) * np.float32(2.0**-24)


@compiled
def _philox(counter: Array, key: Array) -> tuple[Array, Array, Array, Array]:
    k0 = uint32(key)
    k1 = uint32(key >> uint64(32))
    w0 = counter
    w1 = uint32(0)
    w2 = uint32(0)
    w3 = uint32(0)
    for _ in range(PHILOX_ROUNDS):
        a = uint64(w0) * MULTIPLIER_0
        b = uint64(w2) * MULTIPLIER_1
        w0 = uint32(b >> uint64(32)) ^ w1 ^ k0
        w2 = uint32(a >> uint64(32)) ^ w3 ^ k1
        w1 = uint32(b)
        w3 = uint32(a)
        k0 = uint32(k0 + BUMP_0)
        k1 = uint32(k1 + BUMP_1)
    return w0, w1, w2, w3
