# SPDX-License-Identifier: Apache-2.0
"""Values to codes of few bits and back, as `commrt.kernels.quantize` defines; a program per tile.

That module draws a tile. A thread takes the same 4 columns of all 8 blocks of it. Bits that share a
byte lie whole blocks apart, and so do values that share a counter of random numbers, so threads
exchange nothing but the largest value of each block. A program writes to its own tile of `codes`,
`values` or `residual`; `numel` counts all values, and `device.variants` compiles for the arguments
in capitals.
"""

from __future__ import annotations

import triton
import triton.language as tl

from commrt.kernels.layout import GRANULE
from commrt.kernels.quantize import HUGE_BITS, INFINITY_BITS, LEAST_BITS, SCALES_NBYTES
from commrt.quantizer import TILE_BLOCKS

BLOCKS = tl.constexpr(TILE_BLOCKS)
SCALES = tl.constexpr(SCALES_NBYTES)
GRAIN = tl.constexpr(GRANULE)
VECTOR = tl.constexpr(4)
"""Numbers of fp32 in 16 bytes."""
INFINITY = tl.constexpr(INFINITY_BITS)
HUGE = tl.constexpr(HUGE_BITS)
LEAST = tl.constexpr(LEAST_BITS)
WHOLE = tl.constexpr(1.5 * 2**23)
"""Added to a small number, it leaves the nearest integer in the lowest bits."""
SUBNORMAL = tl.constexpr(2.0**14)
"""Added, it leaves the nearest multiple of 2 ** -9, the least of e4m3, in the lowest bits."""
SUBNORMAL_BITS = tl.constexpr(0x46800000)
LEAST_NORMAL_BITS = tl.constexpr(0x3C800000)
"""2 ** -6, the least of e4m3 with all its bits."""
EXPONENTS = tl.constexpr(120 << 23)
"""What exponents of fp32 count more than those of e4m3."""


@triton.jit
def quantize_kernel(
    values,
    residual,
    codes,
    numel,
    key,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    FEEDBACK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """A tile of ``codes = code(values + residual)``, and of what that loses, for `residual`."""
    first, count = _span(numel, BLOCK)
    x = _read(values + first, count, BLOCK)
    if FEEDBACK:
        x += _read(residual + first, count, BLOCK)
    most: tl.constexpr = 448.0 if IS_FLOAT else float((1 << (BITS - 1)) - 1)
    bits, step = _scales(x, most)
    finite = bits < (INFINITY >> 16)
    usable = finite & (bits > 0)
    y = x * tl.where(usable, tl.div_rn(1.0, tl.where(usable, step, 1.0)), 0.0)[:, None]
    if IS_FLOAT:
        # 1 times a scale that is not finite is not finite
        code = tl.where(finite[:, None], _to_float8(y), 0x38)
        q = _from_float8(code)
    else:
        if STOCHASTIC:
            y = tl.clamp(tl.floor(y + _uniform(key, BLOCK)), -most, most)
        whole = tl.where(finite[:, None], y, 1.0) + WHOLE
        code = whole.to(tl.int32, bitcast=True)
        q = whole - WHOLE
    target = _tile(codes, BLOCK, BITS)
    tl.store(_as_scales(target) + tl.arange(0, BLOCKS), bits.to(tl.int16))
    _pack(target + SCALES, code, BLOCK, BITS)
    if FEEDBACK:
        left = tl.where(finite[:, None], x - q * step[:, None], 0.0)
        _write(residual + first, left, count, BLOCK)


@triton.jit
def dequantize_kernel(
    codes, values, numel, BLOCK: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr
):
    """A tile of ``values = dequantized(codes)``."""
    first, count = _span(numel, BLOCK)
    _write(values + first, _decoded(_tile(codes, BLOCK, BITS), BLOCK, BITS, IS_FLOAT), count, BLOCK)


@triton.jit
def add_quantized_kernel(
    values,
    received,
    stride,
    rows,
    numel,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
):
    """A tile of ``values += dequantized(received[0]) + ...``; `rows`, `stride` granules apart."""
    first, count = _span(numel, BLOCK)
    total = _read(values + first, count, BLOCK)
    source = _tile(received, BLOCK, BITS)
    number = 0
    while number < rows:  # the interpreter cannot count to an argument
        row = tl.multiple_of(source + number * (stride * GRAIN), GRAIN)
        total += _decoded(row, BLOCK, BITS, IS_FLOAT)
        number += 1
    _write(values + first, total, count, BLOCK)


@triton.jit
def _span(numel, BLOCK: tl.constexpr):
    """The first value of this program's tile, and how many it has."""
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK)
    return first, tl.minimum(numel - first, BLOCKS * BLOCK).to(tl.int32)


@triton.jit
def _tile(codes, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """A pointer to the first byte of this program's tile of codes."""
    nbytes: tl.constexpr = SCALES + BLOCKS * BLOCK * BITS // 8
    return tl.multiple_of(codes + tl.program_id(0).to(tl.int64) * nbytes, GRAIN)


@triton.jit
def _as_scales(tile):
    """A pointer to the scales of a tile."""
    return tl.multiple_of(tile.to(tl.pointer_type(tl.int16)), GRAIN)


@triton.jit
def _offsets(ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, BLOCK] offsets, of which a thread takes `VECTOR` at once."""
    column = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)
    return (tl.arange(0, ROWS) * BLOCK)[:, None] + column[None, :]


@triton.jit
def _read(source, count, BLOCK: tl.constexpr):
    """The `count` values of a tile, and zeros."""
    offset = _offsets(BLOCKS, BLOCK)
    whole = (count // VECTOR) * VECTOR  # the compiler can tell: accesses stay wide
    x = tl.load(source + offset, mask=offset < whole, other=0.0)
    if whole < count:
        lane = tl.arange(0, VECTOR)
        tail = tl.load(source + whole + lane, mask=whole + lane < count, other=0.0)[None, None, :]
        tail = tl.reshape(tl.broadcast_to(tail, [BLOCKS, BLOCK // VECTOR, VECTOR]), [BLOCKS, BLOCK])
        x = tl.where((offset >= whole) & (offset < whole + VECTOR), tail, x)
    return x


@triton.jit
def _write(target, x, count, BLOCK: tl.constexpr):
    """Store the first `count` values of a tile."""
    offset = _offsets(BLOCKS, BLOCK)
    whole = (count // VECTOR) * VECTOR
    tl.store(target + offset, x, mask=offset < whole)
    if whole < count:
        tl.store(target + offset, x, mask=(offset >= whole) & (offset < count))


@triton.jit
def _scales(x, MOST: tl.constexpr):
    """Each block's scale, rounded up: its 16 bits, and its value."""
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scale = largest.to(tl.float32, bitcast=True) * (1.0 / MOST)
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    bits = tl.where(largest >= HUGE, tl.where(largest > INFINITY, 0x7FC0, 0x7F80), bits)
    bits = tl.where(largest < LEAST, 0, bits)
    return bits, (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _uniform(key, BLOCK: tl.constexpr):
    """Numbers from [0, 1); number j of counter k of a tile is for value k of its quarter j."""
    counter = (
        tl.program_id(0) * (2 * BLOCK)
        + (tl.arange(0, 2) * BLOCK)[:, None]
        + tl.arange(0, BLOCK)[None, :]
    )
    zero = counter * 0
    a, b, c, d = tl.philox(key, counter, zero, zero, zero)
    # [a b, c d] of [2, BLOCK]
    words = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), [2, 3, 0, 1])
    words = tl.reshape(words, [BLOCKS, BLOCK])
    return (words >> 8).to(tl.int32).to(tl.float32) * 2.0**-24


@triton.jit
def _to_float8(y):
    """The e4m3 of values up to 448, by integers: to nearest, ties to even."""
    signed = y.to(tl.int32, bitcast=True)
    bits = signed & 0x7FFFFFFF
    normal = (bits - EXPONENTS + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    small = (bits.to(tl.float32, bitcast=True) + SUBNORMAL).to(
        tl.int32, bitcast=True
    ) - SUBNORMAL_BITS
    return tl.where(bits < LEAST_NORMAL_BITS, small, normal) | ((signed >> 24) & 0x80)


@triton.jit
def _from_float8(code):
    """The value of an e4m3; no code is NaN: what is not finite is so by its scale."""
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def _pack(target, code, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Store the lowest `BITS` bits of each code, plane after plane, highest bits first."""
    for number in tl.static_range(4):
        if BITS & (8 >> number):
            _pack_plane(target, code, 8 >> number, BLOCK, BITS)


@triton.jit
def _pack_plane(target, code, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Store the `WIDTH` bits of each code that its plane of this width has."""
    part = (code >> (BITS & (WIDTH - 1))) & ((1 << WIDTH) - 1)
    if WIDTH < 8:
        shift = (tl.arange(0, 8 // WIDTH) * WIDTH)[:, None, None]
        part = tl.sum(tl.reshape(part, [8 // WIDTH, WIDTH, BLOCK]) << shift, axis=0)
    tl.store(_plane(target, WIDTH, BLOCK, BITS), part.to(tl.uint8))


@triton.jit
def _plane(codes, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Pointers to bytes with `WIDTH` bits of each code, [WIDTH, BLOCK]; wider planes come first."""
    return codes + BLOCK * (BITS & (16 - 2 * WIDTH)) + _offsets(WIDTH, BLOCK)


@triton.jit
def _unpacked(source, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """The codes, [8, BLOCK] of int32, above which all bits are 0."""
    code = tl.zeros([BLOCKS, BLOCK], tl.int32)
    for number in tl.static_range(4):
        if BITS & (8 >> number):
            code |= _unpacked_plane(source, 8 >> number, BLOCK, BITS)
    return code


@triton.jit
def _unpacked_plane(source, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """The bits of each code that its plane of this width has, in their place in the code."""
    part = tl.load(_plane(source, WIDTH, BLOCK, BITS)).to(tl.int32)
    if WIDTH < 8:
        shift = (tl.arange(0, 8 // WIDTH) * WIDTH)[:, None, None]
        part = tl.reshape((part[None, :, :] >> shift) & ((1 << WIDTH) - 1), [BLOCKS, BLOCK])
    return part << (BITS & (WIDTH - 1))


@triton.jit
def _decoded(tile, BLOCK: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr):
    """The values of a tile of codes, [8, BLOCK]."""
    bits = tl.load(_as_scales(tile) + tl.arange(0, BLOCKS)).to(tl.int32)
    step = (bits << 16).to(tl.float32, bitcast=True)
    code = _unpacked(tile + SCALES, BLOCK, BITS)
    if IS_FLOAT:
        q = _from_float8(code)
    else:
        sign: tl.constexpr = 1 << (BITS - 1)
        q = ((code ^ sign) - sign).to(tl.float32)
    return q * step[:, None]
