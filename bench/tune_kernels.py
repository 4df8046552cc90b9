# SPDX-License-Identifier: Apache-2.0
"""Find the best sizes on this GPU, and print the row for `kernels/device/variants.py`; nothing is tuned at run time.

Every size packs and unpacks ResNet-50's gradients and one of their buckets, interleaved. ``--variants`` also tries
other widths.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from gpu_timer import HAS_GPU, stopwatch
from interleaved import Times, spread
from kernel_variants import DEVICE, bucket_of, shapes_of

from commrt.kernels.device import variants
from commrt.kernels.device.launch import arch_of, launch_of
from commrt.kernels.device.variants import Sizes, Variant
from commrt.kernels.layout import layout_of
from commrt.kernels.tables import Tables

F32, BF16 = torch.float32, torch.bfloat16
CANDIDATES = [Sizes(tile, warps) for tile, warps in product((1024, 2048, 4096, 8192), (2, 4, 8)) if tile >= 512 * warps]
"""Sizes to try."""
ROUNDS, CALLS, SETS = 20, 20, 4

Trial = tuple[str, Sizes, Variant]


@dataclass(frozen=True)
class Workload:
    """Gradients to pack and to unpack, and a wire, several times over."""

    shapes: list[tuple[int, ...]]
    wire: torch.dtype

    def launches(self, variant: Variant, sizes: Sizes) -> Callable[[int], None]:
        """Return a function that launches `variant` on set number i."""
        layout = layout_of([prod(shape) for shape in self.shapes])
        launch, sets = launch_of(variant, DEVICE), []
        for _ in range(SETS):
            grads = [torch.randn(shape, device=DEVICE) for shape in self.shapes]
            memory = {
                "wire": torch.zeros(layout.numel, dtype=self.wire, device=DEVICE),
                "scale": torch.ones(1, device=DEVICE),
                "mismatch": torch.zeros(1, dtype=torch.int32, device=DEVICE),
            }
            tables = Tables(layout, sizes.tile, DEVICE)
            tables.point_at(grads)
            given = {name: tensor.data_ptr() for name, tensor in memory.items()} | {"header": 1}
            columns = [column.data_ptr() for column in tables.columns]
            rest = [given[name] for name, _ in variant.types[len(columns) :]]
            sets.append((tables, grads, memory, (tables.tiles, *columns, *rest)))
        return lambda number: launch(*sets[number][3])


def trials(wire: torch.dtype, *, more: bool) -> Iterator[Trial]:
    """Yield the trials: (label, sizes, kernel)."""
    for sizes in CANDIDATES:
        yield "pack", sizes, variants.pack(F32, wire, 16, sizes)
        yield "unpack", sizes, variants.unpack(F32, wire, 16, sizes)
    for make, sizes in product((variants.pack, variants.unpack), (Sizes(4096, 4),) if more else ()):
        plain = make(F32, wire, 16, sizes)
        for width in (2, 4, 8):
            constants = {**dict(plain.constants), "VECTOR": width}
            yield f"{make.__name__} {width} at once", sizes, replace(plain, constants=tuple(constants.items()))


def measure(workload: Workload, *, more: bool) -> Times:
    """Return the seconds of every trial, interleaved."""
    tried = list(trials(workload.wire, more=more))
    names = [f"{label}, tile {sizes.tile}, {sizes.warps} warps" for label, sizes, _ in tried]
    runs = [workload.launches(variant, sizes) for _, sizes, variant in tried]
    watches = [stopwatch("graph, cold", run, SETS, CALLS) for run in runs]
    times: Times = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name, watch in zip(names, watches, strict=True):
            times[name].append(watch())
    return times


def best(all_times: list[Times]) -> Sizes:
    """Return the sizes with the least sum of medians over workloads, each in units of the least median."""

    def cost(sizes: Sizes) -> float:
        label = f"tile {sizes.tile}, {sizes.warps} warps"
        total = 0.0
        for times, kernel in product(all_times, ("pack", "unpack")):
            own = spread(times[f"{kernel}, {label}"])[1]
            total += own / min(spread(seconds)[1] for name, seconds in times.items() if name.startswith(f"{kernel},"))
        return total

    return min(CANDIDATES, key=cost)


def tune(*, more: bool) -> None:
    """Measure on this GPU."""
    shapes = {"ResNet-50": shapes_of("ResNet-50"), "a bucket of ResNet-50": bucket_of("ResNet-50", 2)}
    all_times = []
    for (name, members), wire in product(shapes.items(), (F32, BF16)):
        times = measure(Workload(list(members), wire), more=more)
        all_times.append(times)
        print(f"\n{name}, fp32 with a wire of {wire}: us, 20 %, median, 80 %")
        for label, seconds in sorted(times.items(), key=lambda pair: spread(pair[1])[1]):
            print(f"  {label:44}" + "".join(f"{1e6 * value:9.2f}" for value in spread(seconds)))
    print(f"\nfor kernels/device/variants.py: {arch_of(DEVICE)}: {best(all_times)},")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", action="store_true", help="also try other widths")
    options = parser.parse_args()
    tune(more=options.variants) if HAS_GPU else print("no GPU: nothing was measured")


if __name__ == "__main__":
    main()
