# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501  # lines of the kernels, as they stand there
"""Bugs that the tests of the kernels of quantization must notice: (text, what is put in its place), by the check."""

__all__ = ["BUGS"]

BUGS = {
    "a far tile": {
        "ceil for floor": ("tl.clamp(tl.floor(y", "tl.clamp(tl.ceil(y"),
        "counter off by one": ("counter = tl.program_id(0) * (2 * BLOCK) +", "counter = 1 + tl.program_id(0) * (2 * BLOCK) +"),
        "same numbers in each tile": ("counter = tl.program_id(0) * (2 * BLOCK) +", "counter = 0 * BLOCK +"),
        "words in another order": ("tl.join(tl.join(a, c), tl.join(b, d))", "tl.join(tl.join(a, b), tl.join(c, d))"),
        "half of the key": ("tl.philox(key,", "tl.philox(key & 0xFFFFFFFF,"),
        "32 bits of a place": ("first = tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK)", "first = tl.program_id(0) * (BLOCKS * BLOCK)"),
        "another tile's codes": ("codes + tl.program_id(0).to(tl.int64) * nbytes", "codes + tl.program_id(0).to(tl.int64) * 0"),
    },
    "every random bit": {
        "fewer rounds": ("zero, zero, zero)", "zero, zero, zero, 7)"),
        "number of 23 bits": ("(words >> 8).to(tl.int32)", "((words >> 9) << 1).to(tl.int32)"),
    },
    "the largest code": {
        "not clamped": ("y = tl.clamp(tl.floor(y + _uniform(key, BLOCK)), -most, most)", "y = tl.floor(y + _uniform(key, BLOCK))"),
    },
    "ties of floats": {
        "residual with the wrong sign": ("x - q * step[:, None]", "q * step[:, None] - x"),
        "values without their mask": ("mask=place < whole, other=0.0)", "mask=place <= whole, other=0.0)"),
        "garbage after the end": ("mask=place < whole, other=0.0)", "mask=place < whole, other=1e9)"),
        "count forgotten": ("tl.minimum(numel - first, BLOCKS * BLOCK)", "(numel - first + BLOCKS * BLOCK - numel + first)"),
        "float: ties away": ("0x7FFFF + ((bits >> 20) & 1)", "0x80000"),
        "float: subnormals cut off": ("small = (bits.to(tl.float32, bitcast=True) + SUBNORMAL)", "small = (0.0 * y + SUBNORMAL)"),
    },
    "values": {
        "codes of a byte swapped": ("part = tl.sum(tl.reshape(part,", "part = tl.sum(tl.reshape(tl.flip(part, 0),"),
        "bits of other planes kept": ("(WIDTH - 1))) & ((1 << WIDTH) - 1)\n", "(WIDTH - 1)))\n"),
    },
    "values as floats": {
        "largest as signed": ("bitcast=True) & 0x7FFFFFFF, axis=1)", "bitcast=True), axis=1)"),
        "NaN as infinity": ("tl.where(largest > INFINITY, 0x7FC0, 0x7F80)", "0x7F80"),
        "residual forgotten": ("x += _read(residual + first, count, BLOCK)", "x = x"),
        "residual of an infinite block": ("tl.where(finite[:, None], x - q * step[:, None], 0.0)", "x - q * step[:, None]"),
        "tail of values forgotten": ("tl.where((place >= whole) & (place < whole + VECTOR), tail, x)", "x"),
        "tail everywhere": ("(place < whole + VECTOR), tail, x)", "(place >= 0), tail, x)"),
        "tail too long": ("mask=whole + lane < count, other=0.0)", "mask=whole + lane <= count, other=0.0)"),
        "garbage in the tail": ("lane < count, other=0.0)", "lane < count, other=1e9)"),
        "tail not written": ("mask=(place >= whole) & (place < count))", "mask=place < 0)"),
        "float: no sign": ("normal) | ((signed >> 24) & 0x80)", "normal)"),
        "float: sign lost in dequantizing": ("((code & 0x7F) << 20) | ((code & 0x80) << 24)", "(code & 0x7F) << 20"),
        "float: code of a block that is not finite": ("_to_float8(y), 0x38)", "_to_float8(y), 0)"),
    },
    "values of one tile": {
        "plane at another shift": ("part = (code >> (BITS & (WIDTH - 1)))", "part = (code >> (BITS & WIDTH))"),
        "planes in one place": ("codes + BLOCK * (BITS & (16 - 2 * WIDTH))", "codes + BLOCK * (BITS & (16 - WIDTH) & 8)"),
        "scale rounded down": ("bitcast=True) + 0xFFFF) >> 16", "bitcast=True)) >> 16"),
        "scale rounded to nearest": ("+ 0xFFFF) >> 16", "+ 0x7FFF) >> 16"),
        "scale of the sum": ("largest = tl.max(", "largest = tl.sum("),
        "one code too many": ("1 << (BITS - 1)) - 1)", "1 << (BITS - 1)))"),
        "infinity not marked": ("bits = tl.where(largest >= HUGE,", "bits = tl.where(largest > INFINITY,"),
        "small blocks kept": ("bits = tl.where(largest < LEAST, 0, bits)", "bits = bits"),
        "ties away": ("1.0) + WHOLE\n", "1.0 if False else tl.where(y < 0, -1, 1) * tl.floor(tl.abs(y) + 0.5)) + WHOLE\n"),
        "rounded towards zero": ("whole = tl.where(finite[:, None], y,", "whole = tl.where(finite[:, None], y * 0.999,"),
        "division is approximate": ("tl.div_rn(1.0, tl.where(usable, step, 1.0))", "1.0000001 / tl.where(usable, step, 1.0)"),
        "code of a block that is not finite": ("whole = tl.where(finite[:, None], y, 1.0)", "whole = tl.where(finite[:, None], y, 0.0)"),
    },
    "any bytes as floats": {
        "plane unpacked at another shift": ("return part << (BITS & (WIDTH - 1))", "return part << (BITS & WIDTH)"),
        "last row forgotten": ("while number < rows:", "while number < rows - 1:"),
    },
    "rows": {
        "no sign": ("q = ((code ^ sign) - sign)", "q = code"),
        "sign of another width": ("sign: tl.constexpr = 1 << (BITS - 1)", "sign: tl.constexpr = 128"),
        "written after the end": ("(place >= whole) & (place < count))", "(place >= whole) & (place <= count))"),
        "written twice": ("mask=(place >= whole) & (place < count))", "mask=place < count)"),
        "first row again": ("source + number * (stride * GRAIN)", "source + 0 * (stride * GRAIN)"),
    },
}  # fmt: skip
