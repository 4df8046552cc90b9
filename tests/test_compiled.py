# SPDX-License-Identifier: Apache-2.0
"""What the compiler makes of the kernels, for three architectures, without any of them at hand."""

import json
import os
import sys
from itertools import product
from pathlib import Path

import inspect_quantize
import pytest
import torch
from forked_commands import printed
from inspect_kernels import ARCHS, PEERS, SHORT, cases
from interpreter import interpreted_gpu

from commrt.kernels import dispatch, quantize_dispatch
from commrt.kernels.device import launch, packing
from commrt.kernels.device.variants import sizes_for
from commrt.kernels.layout import WIDEST_NBYTES, layout_of
from commrt.kernels.packing import Parts
from commrt.kernels.signal_wait import HOST_WORDS, SignalWaitPlan

DEV = Path(__file__).parent.parent / "dev"
GOLDEN = DEV / "golden"
FINDINGS = {path.stem: json.loads(path.read_text())["findings"] for path in GOLDEN.iterdir()}
GOLDEN_CODING = DEV / "golden_quantize"
QUANTIZE_FINDINGS = [row for path in GOLDEN_CODING.iterdir() for row in json.loads(path.read_text())["findings"]]
EVERY = 70
"""Every how many-th kernel is compiled here; `make inspect` compiles all, in a quarter of an hour."""
KERNELS = ("pack", "unpack", "mix", "reduce", "signal_wait")
MOST_REGISTERS = {"signal_wait of 15": 80}
NBITS = {short: 8 * dtype.itemsize for dtype, short in SHORT.items()}
PURE_COPIES = [
    f"{kernel} {dtype} {dtype} align 16" for kernel in ("pack", "unpack") for dtype in ("fp32", "bf16", "fp16")
]
INSTRUCTIONS_PER_ELEMENT = {"unpack fp32 fp32 align 16": 2.1, "pack fp32 bf16 align 16": 3.1}
"""At most, on sm_90a: to copy; to scale and cast."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("program", "every", "golden"), [("inspect_kernels.py", EVERY, GOLDEN), ("inspect_quantize.py", 31, GOLDEN_CODING)]
)
def test_the_kernels_compile_to_what_the_golden_file_says(program, every, golden):
    """After a change that is meant, ``python dev/PROGRAM --write GOLDEN`` writes the file."""
    env = {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([str(DEV.parent), str(DEV)])}
    printed(sys.executable, DEV / program, "--every", every, "--golden", golden, **env)


def test_every_kernel_that_is_launched_has_been_looked_at(monkeypatch):
    looked_at = {case.make(sizes_for(90, case.inputs, case.align)) for case in cases()}
    launched = set()

    def launch_of(variant, device):
        launched.add(variant)
        return lambda programs, *arguments: None

    with interpreted_gpu():
        monkeypatch.setattr(packing, "launch_of", launch_of)
        monkeypatch.setattr(launch, "launch_of", launch_of)
        for dtype, wire, skew in product(SHORT, SHORT, (0, 1, 2, 4)):
            launch_everything(dtype, wire, skew)
        for peers in PEERS:
            words = torch.zeros(3, peers, 1, dtype=torch.int32)
            state, host = torch.zeros(2, dtype=torch.int32), torch.zeros(len(HOST_WORDS), dtype=torch.int64)
            plan = SignalWaitPlan(*words, range(peers), [1] * peers, state, host, position=1, last=0, number=0)
            launch.signal_wait_launch(plan)
    assert launched == looked_at


def launch_everything(dtype, wire_dtype, skew):
    """All that can be asked of a wire and a tensor `skew` elements off an aligned address, and of buffers."""
    tensors = [torch.zeros(80, dtype=dtype)[skew:]]
    wire = torch.zeros(layout_of([80]).numel, dtype=wire_dtype)
    moved = dispatch.packing(wire, layout_of([tensors[0].numel()]), tensors)
    moved.pack(tensors, 0.5, 1)
    moved.unpack(tensors, 1)
    moved.mix(tensors, wire, wire, 0.5)
    begin = layout_of([tensors[0].numel()]).offsets[0]
    dispatch.repeatable(moved).load(Parts([(wire[begin:], begin, wire.numel())]))
    rows = torch.zeros(8, 16, dtype=dtype)
    dispatch.mixing(rows[0], rows[1], 0.5)
    for received in range(1, 8):
        dispatch.adding(rows[0], [*rows[: received + 1]])


@pytest.mark.parametrize("triton", FINDINGS)
def test_no_kernel_spills_traps_or_waits_and_all_use_accesses_as_wide_as_alignment_allows(triton):
    rows = FINDINGS[triton]
    assert {(row["kernel"].split()[0], row["arch"]) for row in rows} == {*product(KERNELS, ARCHS.values())}
    assert [row for row in rows if not is_lean(row)] == []


def is_lean(row):
    """A wait is one warp, which reads and writes words; registers that it uses are nobody else's."""
    most = 48 if row["kernel"] in PURE_COPIES else MOST_REGISTERS.get(row["kernel"], 64)
    if row["spill_bytes"] or row["traps"] or row["registers"] > most:
        return False
    return row["barriers"] == 0 and (row["kernel"].startswith("signal_wait") or is_wide(row))


def is_wide(row):
    loads, store = widths(row["kernel"])
    return row["load_bits"] in loads and row["store_bits"] == store


def widths(kernel):
    """(those of loads, that of stores) in bits: of what is wider, all that is aligned; of the other as many elements.

    Wires and buffers are aligned to 16 bytes, tensors to `align`. A thread takes as many elements as it stores at once.
    """
    kind, dtype, *rest = kernel.split()
    widest = 8 * WIDEST_NBYTES
    if kind == "reduce":
        return {widest}, widest
    wire, align = rest[0], 8 * int(rest[2])
    if kind == "pack":
        return {min(align, widest // NBITS[wire] * NBITS[dtype])}, widest
    from_wire = min(widest, align // NBITS[dtype] * NBITS[wire])
    return ({from_wire, align} if kind == "mix" else {from_wire}), align


def test_the_kernels_have_instructions_to_spare_beside_memory():
    for findings, kernel in product(FINDINGS.values(), INSTRUCTIONS_PER_ELEMENT):
        (row,) = (row for row in findings if row["kernel"] == kernel and row["arch"] == "sm_90a")
        assert row["instructions_per_element"] <= INSTRUCTIONS_PER_ELEMENT[kernel], row


def test_every_kernel_of_coding_that_is_launched_has_been_looked_at(monkeypatch):
    launched = set()

    def launch_of(variant, device):
        launched.add(variant)

    with interpreted_gpu():
        monkeypatch.setattr(launch, "launch_of", launch_of)
        for quantizer in inspect_quantize.quantizers():
            values, codes = torch.zeros(100), torch.zeros(quantizer.nbytes(100), dtype=torch.uint8)
            quantize_dispatch.quantizing(values, codes, quantizer, values if quantizer.feedback else None)
            quantize_dispatch.dequantizing(codes, values, quantizer)
            quantize_dispatch.adding_quantized(values, [codes], quantizer)
    assert launched <= {variant for _, variant in inspect_quantize.cases().values()}


def test_no_kernel_of_quantization_spills_and_values_move_16_bytes_at_a_time():
    looked_at = {(row["kernel"], row["arch"]) for row in QUANTIZE_FINDINGS}
    assert looked_at == {*product(inspect_quantize.cases(), ARCHS.values())}
    assert [row for row in QUANTIZE_FINDINGS if not is_coding_lean(row)] == []


def is_coding_lean(row):
    """Warps wait for each other only to find the largest value of a block that several of them share."""
    kernel, block, vectors = row["kernel"].split()[0], int(row["kernel"].split()[-1]), row["values"] // 4
    feedback = "feedback" in row["kernel"]
    loads, stores = {
        "quantize": (vectors * (1 + feedback), vectors * feedback),
        "dequantize": (0, vectors),
        "add": (vectors, vectors),
    }[kernel]
    waits = kernel == "quantize" and block > 128
    is_wide = row["wide_loads"] >= loads and row["wide_stores"] >= stores
    most = 160 if kernel == "quantize" else 96
    return is_wide and row["spill_bytes"] == 0 and row["registers"] <= most and bool(row["barriers"]) == waits
