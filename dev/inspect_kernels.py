# SPDX-License-Identifier: Apache-2.0
"""Inspect the compiled code of each kernel: widths, registers, spills, barriers, instructions.
Needs no GPU.

``python dev/inspect_kernels.py`` prints a table, and with ``--json`` a list. ``--golden FOLDER``
compares the results with the file of this Triton version in the folder, and exits with 1 if
anything differs. ``--write FOLDER`` writes that file. All kernels take a quarter of an hour.
``--every N`` inspects every Nth kernel, each on the next architecture, and one of each kind at each
alignment and on each architecture.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from struct import iter_unpack, unpack_from
from typing import Any

import torch
import triton

from commrt.kernels.device import variants
from commrt.kernels.device.packing import ALIGNMENTS
from commrt.kernels.device.variants import Sizes, Variant, compiled, sizes_for

ARCHS = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
RECEIVED = range(1, 8)
"""How many buffers are added at once."""
PEERS = 1, 3, 7, 15
"""How many peers are waited for at once: those of 2, 4, 8 and 16 ranks."""
NOP = 0x918
"""The operation in the lowest 12 bits of an instruction of 16 bytes."""
INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE
)


@dataclass(frozen=True)
class Case:
    """A kernel to inspect."""

    name: str
    make: Callable[[Sizes], Variant]
    inputs: int = 1
    """Values read per element."""
    align: int = 16
    has_tiles: bool = True
    """Whether each program works on a tile of elements."""


@dataclass(frozen=True)
class Finding:
    """The compiled code of one kernel, in figures."""

    kernel: str
    arch: str
    load_bits: int
    """Width of the loads that move most bytes."""
    store_bits: int
    registers: int
    spill_bytes: int
    barriers: int
    traps: int
    instructions_per_element: float | None
    """Instructions that a thread adds for each further element, from half to twice the tile; None
    without tiles.
    """
    instructions_per_element_in_all: float | None
    """`instructions` over the elements of a thread, with work once per tile and the tail; None
    without tiles.
    """
    instructions: int
    """Instructions of the whole kernel."""


def cases() -> Iterator[Case]:
    """Yield every kernel in every combination that commrt offers."""
    for dtype, wire, align in product(SHORT, SHORT, ALIGNMENTS):
        if align >= dtype.itemsize:
            yield from on_tables(dtype, wire, align)
    for dtype, count in product(SHORT, RECEIVED):
        yield Case(
            f"reduce {SHORT[dtype]} of {count}", partial(variants.reduce, dtype, count), 1 + count
        )
    for peers in PEERS:
        yield Case(f"signal_wait of {peers}", partial(waiting, peers), has_tiles=False)


def waiting(peers: int, _: Sizes) -> Variant:
    """Return the kernel that waits for `peers`, which has one warp whatever the sizes of others."""
    return variants.signal_wait(peers)


def on_tables(dtype: torch.dtype, wire: torch.dtype, align: int) -> Iterator[Case]:
    """Yield the kernels between a wire and many tensors of `dtype`, aligned to `align` bytes."""

    def case(kernel: str, inputs: int, *options: str) -> Case:
        name = " ".join([kernel, SHORT[dtype], SHORT[wire], f"align {align}", *options])
        make = partial(
            getattr(variants, kernel), dtype, wire, align, **dict.fromkeys(options, True)
        )
        return Case(name, make, inputs, align)

    yield case("pack", 1)
    yield case("unpack", 1)
    if align == max(ALIGNMENTS):  # graphs are made for these only
        yield case("pack", 1, "held")
        yield case("unpack", 1, "held")
        yield case("unpack", 1, "held", "wide")
    yield case("unpack", 1, "wide")
    yield case("mix", 3)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument(
        "--arch",
        type=int,
        choices=ARCHS,
        action="append",
        help="inspect only this architecture; may be repeated",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="inspect only every Nth pair of kernel and architecture",
    )
    parser.add_argument("--golden", type=Path, help="compare with the file in this folder")
    parser.add_argument("--write", type=Path, help="write the file to this folder")
    options = parser.parse_args()
    if options.write and (options.arch or options.every > 1):
        parser.error("the file holds all kernels: --write goes with neither --arch nor --every")
    findings = inspect_all(chosen(options.every, options.arch or list(ARCHS)))
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    elif not options.golden:
        for finding in findings:
            print(*asdict(finding).values(), sep="\t")
    if options.write:
        of_this_version(options.write).write_text(as_golden(findings))
    offered = {(case.name, arch) for case in cases() for arch in ARCHS.values()}
    return 0 if options.golden is None else compare(options.golden, findings, offered)


def chosen(every: int, archs: Sequence[int]) -> list[tuple[int, int]]:
    """Return every Nth (number of a case, architecture), limited to `archs`; and what they leave
    out of each kind.
    """
    kinds = [(case.name.split()[0], case.align) for case in cases()]
    pairs = [*product(range(len(kinds)), ARCHS)]
    seen = set[tuple[str, int]]()
    some = []
    for number, arch in [*pairs[::every], *pairs]:
        looked_at = {kinds[number], (kinds[number][0], arch)}
        if len(some) < len(pairs[::every]) or not looked_at <= seen:
            some.append((number, arch))
            seen |= looked_at
    return [pair for pair in some if pair[1] in archs]


def as_golden(findings: Sequence[Any]) -> str:
    """Return the findings as JSON, one per line, so that differences are readable."""
    rows = ",\n".join(json.dumps(asdict(finding)) for finding in findings)
    return f'{{"triton": "{triton.__version__}", "findings": [\n{rows}\n]}}\n'


def of_this_version(folder: Path) -> Path:
    """Return the file for the installed Triton."""
    return folder / f"triton-{triton.__version__.partition('+')[0]}.json"


def compare(folder: Path, findings: Sequence[Any], offered: set[tuple[str, str]]) -> int:
    """Print the differences from the file in `folder`, which must hold all that is `offered`;
    return 1 for any.
    """
    golden = of_this_version(folder)
    if not golden.exists():
        print(f"{golden} is not there: {sys.argv[0]} --write {folder} makes it", file=sys.stderr)
        return 1
    before = {
        (row["kernel"], row["arch"]): row for row in json.loads(golden.read_text())["findings"]
    }
    now = {(finding.kernel, finding.arch): asdict(finding) for finding in findings}
    different = [key for key, found in now.items() if before.get(key) != found]
    for key in different:
        print(f"{key}\n  was {before.get(key)}\n  is  {now[key]}", file=sys.stderr)
    for key in offered ^ before.keys():
        print(
            f"{key} is {'missing from' if key in offered else 'only in'} {golden}", file=sys.stderr
        )
    return int(bool(different) or offered != before.keys())


def inspect_all(wanted: list[tuple[int, int]]) -> list[Finding]:
    """Inspect the chosen cases, on all cores."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(inspect, *zip(*wanted, strict=True)))


def inspect(number: int, arch: int) -> Finding:
    """Inspect case `number` on one architecture."""
    case = [*cases()][number]
    sizes = sizes_for(arch, case.inputs, case.align)
    variant = case.make(sizes)
    code, usage = disassembled(variant, arch)
    operations = Counter(code)
    per_element, in_all = (
        per_elements(case, sizes, arch, len(code)) if case.has_tiles else (None, None)
    )
    return Finding(
        kernel=case.name,
        arch=ARCHS[arch],
        load_bits=main_width(operations, "LDG"),
        store_bits=main_width(operations, "STG"),
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        barriers=sum(count for name, count in operations.items() if name.startswith("BAR")),
        traps=sum(count for name, count in operations.items() if name.startswith("BPT")),
        instructions_per_element=per_element,
        instructions_per_element_in_all=in_all,
        instructions=len(code),
    )


def per_elements(case: Case, sizes: Sizes, arch: int, instructions: int) -> tuple[float, float]:
    """Return the instructions per element of a thread: those of each further element, and all of
    the kernel's.
    """
    smaller, larger = (
        length(case.make(Sizes(tile, sizes.warps)), arch) for tile in neighbours(sizes.tile)
    )
    elements = sizes.tile / (32 * case.make(sizes).warps)
    return round((larger - smaller) / (elements * 2 - elements / 2), 2), round(
        instructions / elements, 2
    )


def neighbours(tile: int) -> tuple[int, int]:
    """Return half of `tile` and twice as much."""
    return tile // 2, tile * 2


def disassembled(variant: Variant, arch: int) -> tuple[list[str], dict[str, int]]:
    """Return the instructions in order, and the kernel's resources."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(variant, arch).asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "-sass", "-res-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", listing)}
    return [name for name in INSTRUCTION.findall(listing) if name != "NOP"], used


def length(variant: Variant, arch: int) -> int:
    """Return the number of instructions that `disassembled` would find, half a second faster."""
    file = compiled(variant, arch).asm["cubin"]
    headers, (size, count, names) = unpack_from("<Q", file, 0x28)[0], unpack_from("<3H", file, 0x3A)
    sections = [unpack_from("<I20x2Q", file, headers + number * size) for number in range(count)]
    (code,) = (
        file[begin : begin + nbytes]
        for name, begin, nbytes in sections
        if file.startswith(b".text.", sections[names][1] + name)
    )
    return sum(operation & 0xFFF != NOP for operation, _ in iter_unpack("<2Q", code))


def main_width(operations: Counter[str], kind: str) -> int:
    """Return the width in bits of the accesses that move most bytes."""
    moved: Counter[int] = Counter()
    for name, count in operations.items():
        if name.startswith(kind):
            moved[width(name)] += width(name) * count
    return max(moved, key=lambda bits: (moved[bits], bits))


def width(name: str) -> int:
    """Return the bits of a load or store such as ``LDG.E.128``."""
    found = re.search(r"\.[US]?(8|16|64|128|256)\b", name)
    return int(found.group(1)) if found else 32


if __name__ == "__main__":
    sys.exit(main())
