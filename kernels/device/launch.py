# SPDX-License-Identifier: Apache-2.0
"""Launches of compiled kernels, with little work per call: a kept handle, integers for addresses.

Triton's own launch checks every argument, its alignment, the device and the options each time. Any
thread may make a launch, which is compiled and loaded under a lock, and call it: it runs on that
thread's current stream. All kernels but those of packing have theirs here, on fixed memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from commrt.kernels.device import variants
from commrt.kernels.device.variants import Variant, compiled, sizes_for
from commrt.kernels.layout import GRANULE, WIDEST_NBYTES, Layout
from commrt.kernels.signal_wait import SignalWaitPlan
from commrt.kernels.tables import Tables
from commrt.quantizer import Quantizer

Launch = Callable[..., None]
"""``launch(programs, *integers)``, on the current stream of the kernel's device."""


@cache
def arch_of(device: torch.device) -> int:
    """Return the compute capability of `device` as Triton writes it: 90 is 9.0."""
    major, minor = driver.active.get_device_capability(device.index)
    return int(major * 10 + minor)


@dataclass(frozen=True, slots=True)
class Bound:
    """A launch whose arguments never change."""

    launch: Launch
    programs: int
    arguments: tuple[int, ...]
    memory: tuple[object, ...]
    """Objects at the addresses among the arguments, kept alive as long as this launch."""

    def __call__(self) -> None:
        """Launch it."""
        self.launch(self.programs, *self.arguments)


_loading = threading.Lock()
"""Held while a kernel is compiled and loaded: Triton's handle is there before its code is."""


def launch_of(variant: Variant, device: torch.device) -> Launch:
    """Return `variant`'s launch, compiled and loaded once; calls need `device` as the current."""
    there: AbstractContextManager[object] = (
        torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    )
    with _loading, there:
        return _loaded(variant, device)


@cache
def _loaded(variant: Variant, device: torch.device) -> Launch:
    kernel = compiled(variant, arch_of(device))  # of this device alone: its code is loaded there
    # `run` loads the code and makes the launcher
    run = kernel.run
    index = device.index
    function = kernel.function
    metadata = kernel.packed_metadata
    constants = tuple(value for _, value in variant.constants)
    current_stream: Callable[[int], Any] = driver.active.get_current_stream

    def launch(programs: int, *arguments: int) -> None:
        run(
            programs,
            1,
            1,
            current_stream(index),
            function,
            metadata,
            None,
            None,
            None,
            *arguments,
            *constants,
        )

    return launch


def require_aligned(*buffers: Tensor) -> None:
    """Raise `ValueError` for a buffer not aligned to 16 bytes, as the kernels are told it is."""
    for address in (buffer.data_ptr() for buffer in buffers):
        if address % WIDEST_NBYTES:
            raise ValueError(
                f"a buffer on a GPU begins at {address:#x}, which is no multiple of {WIDEST_NBYTES}"
                " bytes: pass one that is not a view into the middle of another, or its clone()"
            )


def add_launch(out: Tensor, summands: Sequence[Tensor]) -> Bound:
    """Return a launch that computes ``out = cast(summands[0] + ...)``; others may be peers'.

    `out` is one of them. Up to 9 summands need at most 64 registers, 17 need 57.
    """
    require_aligned(*summands)
    first, *others = summands
    sizes = sizes_for(arch_of(out.device), inputs=len(summands))
    launch = launch_of(variants.reduce(out.dtype, len(others), sizes), out.device)
    addresses = torch.tensor([part.data_ptr() for part in others], device=out.device)
    arguments = (first.data_ptr(), addresses.data_ptr(), out.data_ptr(), out.numel())
    return Bound(launch, -(-out.numel() // sizes.tile), arguments, (addresses, *summands))


def spacing(received: Sequence[Tensor]) -> int:
    """Return the distance of two of `received` in granules; raise `ValueError` if it differs."""
    nbytes = GRANULE * received[0].element_size()
    addresses = [part.data_ptr() for part in received]
    step = addresses[1] - addresses[0] if len(addresses) > 1 else 0
    if step % nbytes or any(there - here != step for here, there in pairwise(addresses)):
        raise ValueError(
            f"received buffers must lie evenly, a multiple of {nbytes} bytes apart: they are at"
            f" {addresses}"
        )
    return step // nbytes


def mix_launch(out: Tensor, received: Tensor, weight: float) -> Bound:
    """Return a launch that computes ``out = cast(out + weight * (received - out))``."""
    require_aligned(out, received)
    arch = arch_of(out.device)
    tables = Tables(Layout((out.numel(),), (0,), out.numel()), sizes_for(arch).tile, out.device)
    tables.point_at([out])
    variant = variants.mix(out.dtype, out.dtype, tables.align, sizes_for(arch, 3, tables.align))
    factor = torch.full((1,), weight, device=out.device)
    arguments = (
        *(column.data_ptr() for column in tables.columns),
        received.data_ptr(),
        out.data_ptr(),
        factor.data_ptr(),
    )
    return Bound(
        launch_of(variant, out.device), tables.tiles, arguments, (tables, factor, out, received)
    )


def quantize_launch(
    values: Tensor, codes: Tensor, quantizer: Quantizer, residual: Tensor | None
) -> Callable[[int], None]:
    """Return a function of a key that codes `values`, and keeps in `residual` what is lost."""
    left = values if residual is None else residual  # not touched without feedback
    require_aligned(values, codes, left)
    launch = launch_of(variants.quantize(quantizer, feedback=residual is not None), values.device)
    arguments = (values.data_ptr(), left.data_ptr(), codes.data_ptr(), values.numel())
    bound = Bound(launch, _tiles(values, quantizer), arguments, (values, codes, left))
    return lambda key: bound.launch(bound.programs, *bound.arguments, key)


def dequantize_launch(codes: Tensor, values: Tensor, quantizer: Quantizer) -> Bound:
    """Return a launch that dequantizes to `values`."""
    require_aligned(values, codes)
    launch = launch_of(variants.dequantize(quantizer), values.device)
    arguments = (codes.data_ptr(), values.data_ptr(), values.numel())
    return Bound(launch, _tiles(values, quantizer), arguments, (codes, values))


def add_quantized_launch(values: Tensor, received: Sequence[Tensor], quantizer: Quantizer) -> Bound:
    """Return a launch that adds what `received` codes stand for; they are evenly spaced."""
    require_aligned(values, *received)
    launch = launch_of(variants.add_quantized(quantizer), values.device)
    arguments = (
        values.data_ptr(),
        received[0].data_ptr(),
        spacing(received),
        len(received),
        values.numel(),
    )
    return Bound(launch, _tiles(values, quantizer), arguments, (values, *received))


def _tiles(values: Tensor, quantizer: Quantizer) -> int:
    return -(-values.numel() // quantizer.tile_numel)


def signal_wait_launch(plan: SignalWaitPlan) -> Bound:
    """Return a launch of `plan`; see `signal_wait_kernel`."""
    device = plan.state.device
    peers = len(plan.needs)
    rows = (plan.outboxes, plan.inboxes, plan.counts)
    tables = [torch.tensor([word.data_ptr() for word in row], device=device) for row in rows]
    needs = torch.tensor([*plan.needs, *plan.ranks], dtype=torch.int32, device=device)
    memory = (*tables, needs, plan.state, plan.host)
    arguments = (
        *(part.data_ptr() for part in memory),
        plan.position,
        plan.last,
        plan.number,
        int(plan.checks_abort),
    )
    return Bound(launch_of(variants.signal_wait(peers), device), 1, arguments, (*memory, *rows))
