# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels for given dtypes, alignments and sizes, before their first use.

A function for each kernel says what is compiled, as data; `compiled` does it, and loads nothing.
The signature, hints and options are the same with and without a GPU at hand, so what tests compile
is what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler import compile as compile_source

from commrt.kernels.device.mix import mix_kernel
from commrt.kernels.device.pack import pack_kernel
from commrt.kernels.device.quantize import add_quantized_kernel, dequantize_kernel, quantize_kernel
from commrt.kernels.device.reduce import reduce_kernel
from commrt.kernels.device.signal_wait import signal_wait_kernel
from commrt.kernels.device.unpack import unpack_kernel
from commrt.kernels.layout import WIDEST_NBYTES
from commrt.quantizer import STOCHASTIC, Quantizer

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
TABLES = {
    "addresses": "*i64",
    "tensors": "*i32",
    "numbers": "*i32",
    "counts": "*i32",
    "offsets": "*i32",
}

HEADER_TYPES = {False: "u64", True: "*u64"}
"""The header is a number, or the address of one that a captured launch reads anew each time."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a kernel."""

    tile: int
    """Elements per program."""
    warps: int


SIZES = {80: Sizes(4096, 4), 90: Sizes(4096, 4), 100: Sizes(4096, 4)}
"""Sizes for aligned tensors by compute capability (90 is 9.0); from `bench/tune_kernels.py`.

Chosen by registers and bytes in flight of the compiled kernels. On an H100, no other size is more
than 2 % faster for all of ResNet-50's gradients, or more than 4 % for one of its buckets; 80 and
100 were not measured.
"""


def sizes_for(arch: int, inputs: int = 1, align: int = 16) -> Sizes:
    """Return a kernel's sizes for `inputs` values per element of tensors aligned to `align` bytes.

    With many inputs or narrow accesses there are twice or four times the warps, or a thread would
    need more than 64 registers, or spill. `dev/inspect_kernels.py` found the bounds.
    """
    # or of an older architecture
    sizes = SIZES[max((older for older in SIZES if older <= arch), default=min(SIZES))]
    accesses = inputs * (16 // align)  # for 16 bytes of each input
    times = 4 if inputs > 6 or accesses > 12 else 2 if accesses > 3 else 1
    return Sizes(sizes.tile, sizes.warps * times)


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel for one combination of dtypes, alignment and sizes."""

    kernel: Any
    types: tuple[tuple[str, str], ...]
    """(argument, type) of each argument passed at launch."""
    constants: tuple[tuple[str, Any], ...]
    warps: int


def pack(
    dtype: torch.dtype, wire: torch.dtype, align: int, sizes: Sizes, *, held: bool = False
) -> Variant:
    """Return the variant that packs."""
    types = TABLES | {"wire": POINTERS[wire], "header": HEADER_TYPES[held], "scale": "*fp32"}
    return _variant(
        pack_kernel, types, _table(dtype, align, vector(wire), sizes) | {"HELD": held}, sizes.warps
    )


def unpack(
    dtype: torch.dtype,
    wire: torch.dtype,
    align: int,
    sizes: Sizes,
    *,
    held: bool = False,
    wide: bool = False,
) -> Variant:
    """Return the variant that unpacks; if `wide`, int64 offsets may lead to other memory."""
    types = TABLES | ({"offsets": "*i64"} if wide else {})
    types |= {"wire": POINTERS[wire], "header": HEADER_TYPES[held], "mismatch": "*i32"}
    constants = _table(dtype, align, vector(dtype, align), sizes) | {"HELD": held}
    return _variant(unpack_kernel, types, constants, sizes.warps)


def mix(dtype: torch.dtype, wire: torch.dtype, align: int, sizes: Sizes) -> Variant:
    """Return the variant that mixes a received wire of dtype `wire` into tensors of `dtype`."""
    types = TABLES | {"received": POINTERS[wire], "sent": POINTERS[wire], "weight": "*fp32"}
    return _variant(
        mix_kernel, types, _table(dtype, align, vector(dtype, align), sizes), sizes.warps
    )


def reduce(dtype: torch.dtype, count: int, sizes: Sizes) -> Variant:
    """Return the variant that adds up one buffer of `dtype` and `count` others."""
    pointer = POINTERS[dtype]
    types = {"head": pointer, "rest": "*i64", "out": pointer, "count": "i64"}
    constants = {
        "COUNT": count,
        "DTYPE": DTYPES[dtype],
        "VECTOR": vector(dtype),
        "TILE": sizes.tile,
    }
    return _variant(reduce_kernel, types, constants, sizes.warps)


def quantize(quantizer: Quantizer, *, feedback: bool) -> Variant:
    """Return the variant that codes fp32 values; `residual` is not used without `feedback`."""
    types = {"values": "*fp32", "residual": "*fp32", "codes": "*u8", "numel": "i64", "key": "u64"}
    constants = _codes(quantizer) | {
        "FEEDBACK": feedback,
        "STOCHASTIC": quantizer.rounding == STOCHASTIC,
    }
    return _variant(quantize_kernel, types, constants, _warps(quantizer))


def dequantize(quantizer: Quantizer) -> Variant:
    """Return the variant that dequantizes to fp32 values."""
    return _variant(
        dequantize_kernel,
        {"codes": "*u8", "values": "*fp32", "numel": "i64"},
        _codes(quantizer),
        _warps(quantizer),
    )


def add_quantized(quantizer: Quantizer) -> Variant:
    """Return the variant that adds what any number of received buffers of codes stand for."""
    types = {"values": "*fp32", "received": "*u8", "stride": "i64", "rows": "i32", "numel": "i64"}
    return _variant(add_quantized_kernel, types, _codes(quantizer), _warps(quantizer))


def _codes(quantizer: Quantizer) -> dict[str, Any]:
    return {"BLOCK": quantizer.block, "BITS": quantizer.bits, "IS_FLOAT": quantizer.is_float}


def _warps(quantizer: Quantizer) -> int:
    """Return a warp for each 128 columns of a tile: a thread has 4 columns of 8 values."""
    return max(1, quantizer.block // 128)


def signal_wait(peers: int) -> Variant:
    """Return the variant that signals to `peers` ranks and waits for them, by one warp."""
    addresses = dict.fromkeys(("outboxes", "inboxes", "counts"), "*i64")
    memory = {"needs": "*i32", "state": "*i32", "host": "*i64"}
    numbers = dict.fromkeys(("position", "last", "number", "checks_abort"), "i32")
    return _variant(signal_wait_kernel, addresses | memory | numbers, {"PEERS": peers}, 1)


def vector(dtype: torch.dtype, align: int = WIDEST_NBYTES) -> int:
    """Return the elements of `dtype` in a thread's widest store; loads take as many."""
    return max(1, align // dtype.itemsize)


def _table(dtype: torch.dtype, align: int, vector: int, sizes: Sizes) -> dict[str, Any]:
    return {"DTYPE": DTYPES[dtype], "ALIGN": align, "VECTOR": vector, "TILE": sizes.tile}


def _variant(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], warps: int
) -> Variant:
    return Variant(kernel, tuple(types.items()), tuple(constants.items()), warps)


def compiled(variant: Variant, arch: int) -> CompiledKernel:
    """Return `variant` compiled for capability `arch`: 0.1 s first, then Triton's cache has it."""
    types = dict(variant.types)
    signature = {name: types.get(name, "constexpr") for name in variant.kernel.arg_names}
    aligned = [i for i, each in enumerate(signature.values()) if each.startswith("*")]
    hints = {(i,): [["tt.divisibility", WIDEST_NBYTES]] for i in aligned}
    source = ASTSource(
        fn=variant.kernel, signature=signature, constexprs=dict(variant.constants), attrs=hints
    )
    # fused, last bits would differ from torch's
    options = {"num_warps": variant.warps, "enable_fp_fusion": False}
    return compile_source(source, target=GPUTarget("cuda", arch, 32), options=options)
