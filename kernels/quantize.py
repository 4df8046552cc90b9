# SPDX-License-Identifier: Apache-2.0
"""Values to codes and back, in plain torch: defines the kernels, and runs on CPUs.

A *tile* is 8 blocks of values with a scale each. Its codes begin with the scales, rounded to bf16.
Then come planes, the widest first, which have the highest bits of each code:

    | scales, 16 bytes | plane of 4 bits per code | plane of 2 bits | plane of 1 bit |

Codes of 7 bits have these three, codes of 6 bits two of them, codes of 8 bits one plane of their
own (`Quantizer.planes`). Byte i of a plane of n bytes has bits of the codes i, i + n, i + 2 n, ...
of the tile, the first in its lowest bits. Values that the last tile lacks are coded as zeros.

A code times its scale is exact in fp32 (8 bits times 8 bits), so dequantizing rounds nothing, fused
or not. Other results are rounded once per operation, as written here; the kernels for GPUs do the
same operations in the same order. Functions write to what they are given, and keep nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from commrt.kernels.philox import uniform
from commrt.quantizer import STOCHASTIC, TILE_BLOCKS, Quantizer

PIECE_NUMEL = 1 << 18
"""Values that are quantized at once: few calls of torch, and 1 MiB that stays in a cache."""
SCALES_NBYTES = 2 * TILE_BLOCKS
"""Bytes of the scales at the begin of a tile."""
INFINITY_BITS = 0x7F800000
NAN_SCALE = 0x7FC0
"""The scale, as bf16, of a block with a value that is not a number."""
HUGE_BITS = 0x7E800000
"""2 ** 126: a block with such a value travels as infinities: its values or their loss could be."""
LEAST_BITS = 0x0D800000
"""2 ** -100: a block of smaller values travels as zeros: scales and inverses stay normal floats."""


def quantize(
    values: Tensor,
    codes: Tensor,
    quantizer: Quantizer,
    residual: Tensor | None = None,
    key: int = 0,
) -> None:
    """Write ``code(values + residual)`` to `codes`, and what that loses to `residual`.

    `values` and `residual` are fp32 [numel], `codes` uint8 [quantizer.nbytes(numel)]. A block with
    a value that is not finite, or of 2 ** 126 or more, becomes one of infinities or NaNs, and
    leaves no residual. `key` selects the random numbers.
    """
    for first, part, tiles, memory in _pieces(codes, quantizer):
        left = None if residual is None else residual[part].add_(values[part])
        given = values[part] if left is None else left
        missing = -len(given) % quantizer.tile_numel
        x = (torch.nn.functional.pad(given, (0, missing)) if missing else given).view_as(memory)
        bits, infinite = _scale_bits(x, quantizer)
        tiles[:, :SCALES_NBYTES].view(torch.int16).copy_(bits.view(-1, TILE_BLOCKS))
        scales = _scales(tiles)
        y = torch.mul(x, scales.reciprocal().nan_to_num_(0.0, 0.0), out=memory)
        if quantizer.rounding == STOCHASTIC:
            y.add_(uniform(key, first, len(tiles), quantizer).view(y.shape).to(y.device)).floor_()
            y.clamp_(-quantizer.most, quantizer.most)
        elif not quantizer.is_float:
            y.round_()
        if infinite is not None:
            y[infinite] = 1.0  # 1 times a scale that is not finite is not finite
        _pack(y.view(len(tiles), -1), tiles, quantizer)
        if left is not None:
            _unpack(tiles, memory, quantizer)
            lost = torch.sub(x, memory.mul_(scales), out=memory)
            if infinite is not None:
                lost[infinite] = 0.0
            left.copy_(lost.view(-1)[: len(left)])


def dequantize(codes: Tensor, values: Tensor, quantizer: Quantizer) -> None:
    """Write what `codes` stand for to `values`; shapes as for `quantize`."""
    for _, part, tiles, memory in _pieces(codes, quantizer):
        out = values[part]
        is_whole = len(out) == memory.numel()
        decoded = out.view_as(memory) if is_whole else memory
        _unpack(tiles, decoded, quantizer)
        decoded.mul_(_scales(tiles))
        if not is_whole:
            out.copy_(decoded.view(-1)[: len(out)])


def add_quantized(values: Tensor, received: Sequence[Tensor], quantizer: Quantizer) -> None:
    """Compute ``values += dequantized(received[0]) + ...``, left to right; shapes as `quantize`."""
    rows = [codes.view(-1, quantizer.tile_nbytes) for codes in received]
    for first, part, piece, memory in _pieces(received[0], quantizer):
        out = values[part]
        for row in rows:
            tiles = row[first : first + len(piece)]
            _unpack(tiles, memory, quantizer)
            scales = _scales(tiles)
            # exact products: rounded once
            if len(out) == memory.numel():
                out.view_as(memory).addcmul_(memory, scales)
            else:
                out.add_(memory.mul_(scales).view(-1)[: len(out)])


def _pieces(codes: Tensor, quantizer: Quantizer) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Yield some tiles at a time: the first's number, their values, and uint8 [tiles, tile_nbytes].

    The last one is memory for what is computed of them, fp32 [blocks, block], with any contents.
    All pieces share it: new memory costs page faults.
    """
    tiles = codes.view(-1, quantizer.tile_nbytes)
    most = PIECE_NUMEL // quantizer.tile_numel
    memory = torch.empty(min(most, len(tiles)) * TILE_BLOCKS, quantizer.block, device=codes.device)
    for first in range(0, len(tiles), most):
        piece = tiles[first : first + most]
        part = slice(first * quantizer.tile_numel, (first + most) * quantizer.tile_numel)
        yield first, part, piece, memory[: len(piece) * TILE_BLOCKS]


def _scales(tiles: Tensor) -> Tensor:
    """Return the scales of `tiles`, fp32 [blocks, 1]."""
    return tiles[:, :SCALES_NBYTES].view(torch.bfloat16).float().view(-1, 1)


def _scale_bits(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor | None]:
    """Return the scales of blocks `x`, rounded up so that no code is too large.

    They are int32 [blocks], of which 16 bits travel. Return also which blocks are not finite, or
    None if all are.
    """
    # NaN is above infinity
    largest = torch.maximum(x.amax(dim=1), x.amin(dim=1).neg_()).abs_().view(torch.int32)
    least, most = (int(bits) for bits in torch.aminmax(largest))
    bits = (largest.view(torch.float32) * (1.0 / quantizer.largest)).view(torch.int32).add_(0xFFFF)
    bits.bitwise_right_shift_(16)
    if least < LEAST_BITS:
        bits.masked_fill_(largest < LEAST_BITS, 0)
    if most < HUGE_BITS:
        return bits, None
    infinite = largest >= HUGE_BITS
    bits.masked_fill_(infinite, INFINITY_BITS >> 16).masked_fill_(
        largest > INFINITY_BITS, NAN_SCALE
    )
    return bits, infinite


def _pack(y: Tensor, tiles: Tensor, quantizer: Quantizer) -> None:
    """Write the codes `y`, whole numbers or e4m3, fp32 [tiles, tile_numel], to their planes."""
    begin = SCALES_NBYTES
    shift = quantizer.bits
    if quantizer.bits == 8:
        tiles[:, begin:].view(torch.float8_e4m3fn if quantizer.is_float else torch.int8).copy_(y)
        return
    rows = y.to(torch.int8).view(torch.uint8)
    for width in quantizer.planes:
        shift -= width
        parts = rows.view(len(rows), 8 // width, -1)
        plane = parts[:, -1] >> shift
        for number in reversed(range(8 // width - 1)):
            plane <<= width
            plane |= (parts[:, number] >> shift) & ((1 << width) - 1)
        tiles[:, begin:][:, : plane.shape[1]].copy_(plane)
        begin += plane.shape[1]


def _unpack(tiles: Tensor, y: Tensor, quantizer: Quantizer) -> None:
    """Write the codes of `tiles` to `y`, fp32 [blocks, block]."""
    rows = y.view(len(tiles), -1)
    packed = tiles[:, SCALES_NBYTES:].view(torch.int8)
    if quantizer.is_float:
        # In the order of fp16, whose exponent counts 8 more. No code is NaN: what is not finite is
        # so by its scale.
        halves = (packed.to(torch.int16) << 7).bitwise_and_(0xBF80 - (1 << 16))
        rows.copy_(halves.view(torch.float16)).mul_(256.0)
    elif quantizer.bits == 8:
        rows.copy_(packed)
    else:
        rows.copy_(_unpack_planes(packed, quantizer))


def _unpack_planes(packed: Tensor, quantizer: Quantizer) -> Tensor:
    """Return codes, int8 [tiles, tile_numel]; shifts to the right keep the sign."""
    codes = packed.new_empty(len(packed), quantizer.tile_numel)
    begin = 0
    for width in quantizer.planes:
        parts = codes.view(len(codes), 8 // width, -1)
        plane = packed[:, begin:][:, : parts.shape[2]]
        for number in range(8 // width):
            if begin == 0:
                torch.bitwise_right_shift(
                    plane << (8 - width * (number + 1)), 8 - width, out=parts[:, number]
                )
            else:
                parts[:, number].bitwise_left_shift_(width).bitwise_or_(
                    (plane >> (width * number)) & ((1 << width) - 1)
                )
        begin += parts.shape[2]
    return codes
