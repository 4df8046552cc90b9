# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of each kernel: widths, registers, spills, barriers, instructions. Needs no GPU.

``python bench/inspect_kernels.py`` prints a table, ``--json`` a list, ``--golden FILE`` compares with a file and ends
with 1 if anything has changed, ``--write FILE`` writes that file.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
import triton

from commrt.kernels.device import variants
from commrt.kernels.device.sizes import Sizes, sizes_for
from commrt.kernels.device.variants import Variant, compiled

ARCHS = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHORT = {F32: "fp32", BF16: "bf16", F16: "fp16"}
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """A kernel to look at."""

    name: str
    make: Callable[[Sizes], Variant]
    inputs: int = 1
    """Values read per element."""
    align: int = 16


@dataclass(frozen=True)
class Finding:
    """What one kernel compiled to."""

    kernel: str
    arch: str
    load_bits: int
    """Width of the loads that move most bytes."""
    store_bits: int
    registers: int
    spill_bytes: int
    barriers: int
    instructions_per_element: float
    """That a thread adds for each further element, from half to twice the tile: without what is done once per tile."""
    instructions: int
    """Of the whole kernel."""


def cases() -> Iterator[Case]:
    """Every kernel in every combination that is offered."""
    pairs = [(F32, F32), (F32, BF16), (F32, F16), (BF16, BF16), (F16, F16)]
    for align, (dtype, wire) in product((16, 8, 4), pairs):
        label = f"{SHORT[dtype]} {SHORT[wire]} align {align}"
        make_pack, make_unpack = (partial(make, dtype, wire, align) for make in (variants.pack, variants.unpack))
        yield Case(f"pack {label}", make_pack, align=align)
        yield Case(f"pack {label} sums", partial(make_pack, sums=True), align=align)
        yield Case(f"pack {label} nonfinite sums", partial(make_pack, nonfinite=True, sums=True), align=align)
        yield Case(f"unpack {label}", make_unpack, align=align)
        yield Case(f"unpack {label} scaled", partial(make_unpack, scaled=True), align=align)
        yield Case(f"unpack {label} sums", partial(make_unpack, sums=True), align=align)
        yield Case(f"unpack {label} accumulate", partial(make_unpack, accumulate=True), 2, align)
        yield Case(f"mix {label}", partial(variants.mix, dtype, wire, align, sent=False), 2, align)
        yield Case(f"mix {label} sent", partial(variants.mix, dtype, wire, align, sent=True), 3, align)
    for dtype, count in product((F32, BF16, F16), (1, 2, 3, 7)):
        yield Case(f"reduce {SHORT[dtype]} of {count}", partial(variants.reduce, dtype, count), 1 + count)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--aligned", action="store_true", help="only tensors aligned to 16 bytes")
    parser.add_argument("--arch", type=int, choices=ARCHS, action="append", help="only this one; may be repeated")
    parser.add_argument("--golden", type=Path)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    aligned = options.aligned or options.golden is not None  # what the file holds
    findings = inspect_all(options.arch or list(ARCHS), aligned=aligned)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    elif not options.golden:
        for finding in findings:
            print(*asdict(finding).values(), sep="\t")
    if options.write:
        options.write.write_text(as_golden(findings))
    return 0 if options.golden is None else compare(options.golden, findings)


def as_golden(findings: list[Finding]) -> str:
    """One line per finding, so that a difference can be read."""
    rows = ",\n".join(json.dumps(asdict(finding)) for finding in findings)
    return f'{{"triton": "{triton.__version__}", "findings": [\n{rows}\n]}}\n'


def compare(golden: Path, findings: list[Finding]) -> int:
    """Print what differs from `golden`; 1 if anything does."""
    expected = json.loads(golden.read_text())
    if expected["triton"] != triton.__version__:
        print(f"{golden} was made with Triton {expected['triton']}, and this is {triton.__version__}", file=sys.stderr)
        return 1
    before = {(row["kernel"], row["arch"]): row for row in expected["findings"]}
    now = {(finding.kernel, finding.arch): asdict(finding) for finding in findings}
    looked_at = {arch for _, arch in now}
    different = [key for key in {**before, **now} if key[1] in looked_at and before.get(key) != now.get(key)]
    for key in different:
        print(f"{key}\n  was {before.get(key)}\n  is  {now.get(key)}", file=sys.stderr)
    return int(bool(different))


def inspect_all(archs: list[int], *, aligned: bool) -> list[Finding]:
    """Every kernel on each of `archs`, as many at once as there are cores."""
    numbers = [number for number, case in enumerate(cases()) if case.align == 16 or not aligned]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(inspect, *zip(*product(numbers, archs), strict=True)))


def inspect(number: int, arch: int) -> Finding:
    """Case `number` on one architecture."""
    case = list(cases())[number]
    sizes = sizes_for(arch, case.inputs, case.align)
    code, usage = disassembled(case.make(sizes), arch)
    smaller, larger = (disassembled(case.make(Sizes(tile, sizes.warps)), arch)[0] for tile in neighbours(sizes.tile))
    added = (sizes.tile * 2 - sizes.tile // 2) / (32 * sizes.warps)
    operations = Counter(code)
    return Finding(
        kernel=case.name,
        arch=ARCHS[arch],
        load_bits=main_width(operations, "LDG"),
        store_bits=main_width(operations, "STG"),
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        barriers=sum(count for name, count in operations.items() if name.startswith("BAR")),
        instructions_per_element=round((len(larger) - len(smaller)) / added, 2),
        instructions=len(code),
    )


def neighbours(tile: int) -> tuple[int, int]:
    """Half of `tile` and twice as much."""
    return tile // 2, tile * 2


def disassembled(variant: Variant, arch: int) -> tuple[list[str], dict[str, int]]:
    """The instructions in order, and what the kernel uses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(variant, arch).asm["cubin"])
        file.flush()
        listing, usage = (
            subprocess.run([TOOLS / "cuobjdump", option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "-res-usage")
        )
    used = {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", usage)}
    return [name for name in INSTRUCTION.findall(listing) if name != "NOP"], used


def main_width(operations: Counter[str], kind: str) -> int:
    """The width in bits of the accesses that move most bytes."""
    moved: Counter[int] = Counter()
    for name, count in operations.items():
        if name.startswith(kind):
            moved[width(name)] += width(name) * count
    return max(moved, key=lambda bits: (moved[bits], bits))


def width(name: str) -> int:
    """Bits of a load or store such as ``LDG.E.128``."""
    found = re.search(r"\.[US]?(8|16|64|128|256)\b", name)
    return int(found.group(1)) if found else 32


if __name__ == "__main__":
    sys.exit(main())
