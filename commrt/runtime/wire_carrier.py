# SPDX-License-Identifier: Apache-2.0
"""How a quantized wire plugs in: what the module that carries it offers, and how it is found.

Protocols, but for `carrier_of`, which imports such a module when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from commrt.program import Program
from commrt.runtime.executor import BoundProgram, RunnableProgram
from commrt.runtime.wire import QuantizedWire
from commrt.transport.protocol import Transport


class ValuesOnWire(NamedTuple):
    """A wire buffer whose values are quantized when they travel."""

    head: BoundProgram
    """Carries the beginning of the buffer, which travels as it is."""
    values: Tensor
    """fp32 [numel]"""
    residual: Tensor | None
    """fp32 [numel], what rounding lost, for wires with feedback; otherwise None."""


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
        `calls` numbers the runs, so that those with equal tags round with other random numbers.
        """


def carrier_of(wire: QuantizedWire) -> Carrier:
    """Return the module that carries `wire`."""
    return cast("Carrier", import_module(wire.carried_by))
