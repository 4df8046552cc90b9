# SPDX-License-Identifier: Apache-2.0
"""Inspect the compiled code of the kernels of quantization, as `inspect_kernels` does for the
others. Needs no GPU.

``python dev/inspect_quantize.py`` prints a table. ``--golden FOLDER`` compares the results with the
file of this Triton version in the folder, and exits with 1 if anything differs. ``--write FOLDER``
writes that file. All kernels take 2 to 4 minutes. ``--every N`` inspects every Nth kernel, each on
the next architecture.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from inspect_kernels import ARCHS, as_golden, compare, disassembled, of_this_version, width

from commrt.kernels.device import variants
from commrt.kernels.device.variants import Variant
from commrt.quantizer import BITS, BLOCKS, NEAREST, STOCHASTIC, Float8, Int8, Quantizer

KINDS = (*(Quantizer(bits) for bits in BITS), Float8())
OF_ALL_BLOCKS = (Int8(), Quantizer(7, feedback=True, rounding=STOCHASTIC), Float8(feedback=True))
"""Codings that are inspected for blocks of all sizes: they take most registers."""


@dataclass(frozen=True)
class CodingFinding:
    """The compiled code of one kernel, in figures."""

    kernel: str
    arch: str
    values: int
    """Values of a thread."""
    wide_loads: int
    """Loads of 16 bytes; there are others for codes, and for the last 3 values of a buffer."""
    wide_stores: int
    registers: int
    spill_bytes: int
    barriers: int
    instructions_per_value: float
    """`instructions` over the values of a thread, with the code for the end of a buffer."""
    instructions: int


def quantizers() -> Iterator[Quantizer]:
    """Yield every quantizer that commrt offers, for the usual block."""
    for kind, feedback, rounding in product(KINDS, (False, True), (NEAREST, STOCHASTIC)):
        if rounding == NEAREST or not (kind.is_float or (feedback and kind.bits == 2)):
            yield replace(kind, feedback=feedback, rounding=rounding)


def cases() -> dict[str, tuple[Quantizer, Variant]]:
    """Return the quantizer and the kernel of every case by its name."""
    usual = KINDS[0].block
    inspected = [
        *quantizers(),
        *(replace(each, block=block) for each in OF_ALL_BLOCKS for block in BLOCKS),
    ]
    found = {}
    for quantizer in inspected:
        found[f"quantize {quantizer} block {quantizer.block}"] = (
            quantizer,
            variants.quantize(quantizer, feedback=quantizer.feedback),
        )
        if quantizer.block != usual or not quantizer.feedback:
            kind = replace(quantizer, feedback=False, rounding=NEAREST)
            found[f"dequantize {kind} block {kind.block}"] = kind, variants.dequantize(kind)
            found[f"add {kind} block {kind.block}"] = kind, variants.add_quantized(kind)
    return found


def inspect(name: str, arch: int) -> CodingFinding:
    """Inspect one case on one architecture."""
    quantizer, variant = cases()[name]
    code, usage = disassembled(variant, arch)
    operations = Counter(code)
    values = quantizer.tile_numel // (32 * variant.warps)
    return CodingFinding(
        kernel=name,
        arch=ARCHS[arch],
        values=values,
        wide_loads=wide(operations, "LDG"),
        wide_stores=wide(operations, "STG"),
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        barriers=sum(
            count for operation, count in operations.items() if operation.startswith("BAR")
        ),
        instructions_per_value=round(len(code) / values, 2),
        instructions=len(code),
    )


def wide(operations: Counter[str], kind: str) -> int:
    """Return the number of loads or stores of 16 bytes."""
    return sum(
        count for name, count in operations.items() if name.startswith(kind) and width(name) == 128
    )


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="inspect only every Nth kernel"
    )
    parser.add_argument("--golden", type=Path, help="compare with the file in this folder")
    parser.add_argument(
        "--write", type=Path, help="write the file to this folder; needs all kernels"
    )
    options = parser.parse_args()
    wanted = [*product(cases(), ARCHS)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        findings = list(pool.map(inspect, *zip(*wanted[:: options.every], strict=True)))
    if options.write:
        of_this_version(options.write).write_text(as_golden(findings))
    if options.golden:
        return compare(options.golden, findings, {(name, ARCHS[arch]) for name, arch in wanted})
    for finding in findings:
        print(*asdict(finding).values(), sep="\t")
    return 0


if __name__ == "__main__":
    sys.exit(main())
