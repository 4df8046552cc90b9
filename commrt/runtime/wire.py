# SPDX-License-Identifier: Apache-2.0
"""What travels for values: a dtype, or a quantized wire, which names the module that carries it.

Pure checks and choices, for any thread, and the protocols of what stands above; no wire is named.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import ClassVar, NamedTuple, Protocol, TypeGuard, cast

import torch
from torch import Tensor

from commrt.errors import UsageError
from commrt.program import Program
from commrt.runtime.executor import BoundProgram, RunnableProgram
from commrt.transport.protocol import Transport

WIRES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that may travel in place of wider ones."""


class QuantizedWire(Protocol):
    """A wire of few bits, as `attach` takes it: hashable, ``repr`` equal on ranks that agree."""

    carried_by: ClassVar[str]
    """The module that offers what `Carrier` says."""

    @property
    def traits(self) -> tuple[str, ...]:
        """What `commrt.options` calls it: at least "quantized wire", by which options refuse it."""

    @property
    def feedback(self) -> bool:
        """True if what rounding lost is added in the next step."""

    def __hash__(self) -> int: ...


AnyWire = torch.dtype | QuantizedWire


class ValuesOnWire(NamedTuple):
    """A wire buffer whose values are quantized when they travel."""

    head: BoundProgram
    """Carries the beginning of the buffer, which travels as it is."""
    values: Tensor
    """fp32 [numel]"""
    residual: Tensor | None
    """fp32 [numel], for wires with feedback."""


class StepQuantizer(Protocol):
    """Chooses the quantizer of each step.

    `choose` and `note` are for the thread that averages, `norm` and `resume` for checkpoints, with
    nothing in flight.
    """

    norm: float | None
    """Norm of the latest average, which a checkpoint keeps."""

    def choose(self, step: int) -> QuantizedWire:
        """Return the quantizer of `step`, after all of the step before was averaged."""

    def note(self, average: Tensor) -> None:
        """Look at a bucket's `average`, fp32 [numel], of the step that runs."""

    def resume(self, norm: float | None) -> None:
        """Go on after a step whose average had this `norm`."""


class Carrier(Protocol):
    """The module of a quantized wire."""

    def step_quantizer(self, wire: QuantizedWire) -> StepQuantizer:
        """Return what chooses the quantizer of each step."""

    def check_residual(self, wire: QuantizedWire, residual: Tensor | None, tensor: Tensor) -> None:
        """Raise `UsageError` unless `tensor` has a residual exactly where there is feedback."""

    def bind_values(
        self,
        program: Program,
        quantizer: QuantizedWire,
        buffers: Sequence[ValuesOnWire],
        transport: Transport,
        allocate: Callable[[str, int], Tensor],
        calls: Iterator[int] = ...,
    ) -> Sequence[RunnableProgram]:
        """Return, for each buffer, a program that runs its head and carries its values quantized.

        `allocate` makes [nbytes] for a use; the buffers share it, as they travel one at a time.
        `calls` numbers the runs where tags come again.
        """


def is_quantized(wire: object) -> TypeGuard[QuantizedWire]:
    """Return True for a wire that is no dtype."""
    return isinstance(getattr(wire, "carried_by", None), str) and not isinstance(wire, type)


def carrier_of(wire: QuantizedWire) -> Carrier:
    """Return the module that carries `wire`; imports it."""
    return cast("Carrier", import_module(wire.carried_by))


def check_wire(wire: AnyWire | None) -> None:
    """Raise `UsageError` for what cannot travel."""
    if wire is None or is_quantized(wire) or (isinstance(wire, torch.dtype) and wire in WIRES):
        return
    offered = ", ".join(map(str, WIRES))
    raise UsageError(
        f"wire={wire!s:.80} cannot travel: use {offered}, a quantizer such as"
        " commrt.Int8(), or None for each dtype as it is"
    )


def travels_as(own: torch.dtype, wire: AnyWire | None) -> AnyWire:
    """Return what travels for values of dtype `own`: `wire` if that is narrower."""
    if wire is None or not own.is_floating_point:
        return own
    narrower = is_quantized(wire) or cast("torch.dtype", wire).itemsize < own.itemsize
    return wire if narrower else own


def buffer_dtype(travels: AnyWire) -> torch.dtype:
    """Return the dtype of the wire buffer: fp32 for values that will be quantized."""
    return torch.float32 if is_quantized(travels) else cast("torch.dtype", travels)


def wire_text(wire: AnyWire) -> str:
    """Return `wire` as a short text that ranks compare."""
    return f"{wire} {zlib.crc32(repr(wire).encode()):08x}" if is_quantized(wire) else str(wire)
