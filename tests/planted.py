# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501  # lines of the kernels, as they stand there
"""Bugs that the tests of the kernels must notice: (module, text, what is put in its place)."""

__all__ = ["BUGS"]

BUGS = {
    "tail off by one": ("pack", "left = whole + tl.arange(0, 8)", "left = whole + 1 + tl.arange(0, 8)"),
    "tail too long": ("pack", "mask=left < count)", "mask=left <= count)"),
    "whole part too long": ("pack", "(count // 8) * 8", "((count + 7) // 8) * 8"),
    "wrong place of a tensor": ("tiles", "* 16 + first), 16)", "* 15 + first), 2)"),
    "tile forgotten in the place": ("tiles", "tl.load(places + tensor) * 16 + first", "tl.load(places + tensor) * 16"),
    "tile forgotten in the source": ("tiles", "start = address + first *", "start = address + 0 * first *"),
    "overlapping tiles": ("tiles", "tl.load(tile_numbers + tile).to(tl.int64) * TILE", "tl.load(tile_numbers + tile).to(tl.int64) * (TILE - 16)"),
    "scale forgotten": ("pack", ".to(tl.float32) * factor\n    tl.store", ".to(tl.float32)\n    tl.store"),
    "scale forgotten in the tail": ("pack", ".to(tl.float32) * factor\n        tl.store", ".to(tl.float32)\n        tl.store"),
    "cast before the scale": ("pack", "scaled.to(wire.dtype.element_ty)", "((scaled / factor).to(wire.dtype.element_ty).to(tl.float32) * factor).to(wire.dtype.element_ty)"),
    "a hint that is not kept": ("tiles", "tl.multiple_of(start.to(tl.pointer_type(DTYPE)), ALIGN)", "tl.multiple_of(start.to(tl.pointer_type(DTYPE)), 16)"),
    "tail not looked at": ("pack", '        tl.store(nonfinite + left * 0, 1, mask=~(tl.abs(tail) < float("inf")))\n', ""),
    "absent tensor read": ("pack", "tl.where(address != 0, whole, 0)", "whole"),
}  # fmt: skip
