# SPDX-License-Identifier: Apache-2.0
"""What an exchange runs, and its price beside those of other schedules: `World.explain`.

Sends nothing; on the thread that asks. `World` imports it when it is first asked: training does
not need prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from commrt.algorithm import Algorithm
from commrt.algorithms.arguments import require_whole
from commrt.errors import UsageError
from commrt.kernels.dispatch import GPU_DTYPES
from commrt.kernels.layout import layout_of
from commrt.kernels.quantize_dispatch import compiled_quantize
from commrt.pricing.cluster import Cluster
from commrt.pricing.price import Pricing
from commrt.pricing.selection import choices
from commrt.proof.summing import MOST_SUMMING_STEPS, summing_steps
from commrt.quantizer import Quantizer
from commrt.runtime.all_reduce_call import DEFAULT, AllReduce, check_all_reduce
from commrt.runtime.sliced_sum import slice_numel, travels_in_slices
from commrt.runtime.wire import AnyWire, as_wire, buffer_dtype, is_quantized, travels_as
from commrt.runtime.wire_carrier import carrier_of
from commrt.schedule import Schedule
from commrt.store.environment import variable
from commrt.transport.by_device import TransportByDevice

SHOWN = 3
"""Alternatives that `str` shows."""
DEFAULT_CLUSTER = "host"
MOST_NBYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class PricedSchedule:
    """A schedule by its name on the command line, and the time that it takes."""

    name: str
    seconds: float

    def __str__(self) -> str:
        """Name it with its time in ms."""
        return f"{self.name} {1e3 * self.seconds:.3g} ms"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an all-reduce of so many bytes runs, as this rank would run it now.

    ``str()`` is for people. Prices are those of a cluster's description: they are compared with
    each other, and with measured times only where the description was measured (`commrt probe`).
    """

    nbytes: int
    """Bytes of the values."""
    ranks: int
    """Ranks that take part."""
    schedule: str
    """Name of the schedule; it is proven."""
    steps: int
    """Messages that follow each other, in each slice."""
    slices: int
    """Parts that travel one after the other, so that each stays in a cache."""
    transport: str
    """What moves the bytes, such as ``shared``."""
    wire: str
    """What travels for values: a dtype, or codes of few bits."""
    wire_nbytes: int
    """Bytes of the buffer that travels, with its header and padding."""
    kernel: str
    """What packs values and adds them up."""
    seconds: float
    """The price of the exchange."""
    alternatives: tuple[PricedSchedule, ...]
    """Other schedules of an all-reduce that carry this wire, the soonest to end first."""
    cluster: str
    """Name of the description that prices are for."""
    is_default: bool
    """True if COMMRT_CLUSTER names no cluster."""

    def __str__(self) -> str:
        """Say it in a few lines."""
        ranks = f"{self.ranks} ranks" if self.ranks > 1 else "1 rank"
        what = f"all-reduce of {self.nbytes:,} bytes among {ranks}"
        if self.ranks == 1:
            return f"{what}: nothing travels"
        lines = [
            f"{what}",
            f"schedule   {self.schedule}, proven; steps: {self.steps}{self._in_slices}",
            f"transport  {self.transport}",
            f"wire       {self.wire}, {self.wire_nbytes:,} bytes",
            f"kernel     {self.kernel}",
            f"price      {1e3 * self.seconds:.3g} ms on {self._where}",
            f"beside     {', '.join(map(str, self.alternatives[:SHOWN])) or 'no other schedule'}",
        ]
        return "\n".join(lines)

    @property
    def _in_slices(self) -> str:
        return f" in each of {self.slices} slices" if self.slices > 1 else ""

    @property
    def _where(self) -> str:
        if not self.is_default:
            return self.cluster
        return f"{self.cluster}, a small server: COMMRT_CLUSTER names no cluster"


def all_reduce_of(
    nbytes: int,
    algorithm: Algorithm | str | None,
    named: AnyWire | str | None,
    named_device: torch.device | str,
) -> AllReduce:
    """Return the checked call for `nbytes` of fp32 values; raises `UsageError`."""
    require_whole("nbytes", nbytes, 0, MOST_NBYTES)
    wire = as_wire(named)
    try:
        device = torch.device(named_device)
    except (RuntimeError, TypeError, ValueError) as error:
        what = f"device={named_device!r:.80}"
        raise UsageError(f'{what}: give a torch.device, or its name, such as "cpu"') from error
    if algorithm is not None or wire is not None:
        check_all_reduce(DEFAULT if algorithm is None else algorithm, wire)
    values = torch.float32
    shape = torch.Size([nbytes // values.itemsize])
    return AllReduce("sum", shape, (1,), values, travels_as(values, wire), device)


def explained(
    call: AllReduce, schedule: Schedule, members: Sequence[int], transport: TransportByDevice
) -> Explanation:
    """Return what `call` runs along `schedule`, which was made for `members`.

    Raises `UsageError` if there is no transport for its device, or if COMMRT_CLUSTER cannot be.
    """
    given = variable("COMMRT_CLUSTER")
    cluster = Cluster.named(given or DEFAULT_CLUSTER)
    if not given and not transport.one_host:
        cluster = replace(cluster, gpus_per_node=transport.per_host)
    numel = call.shape.numel()
    wire_nbytes = _wire_nbytes(numel, call.wire)
    slices = 1
    if travels_in_slices(call, schedule.chunks):
        slices = -(-numel // slice_numel(schedule.chunks))
    nbytes = wire_nbytes / slices
    price = Pricing(schedule.over(members, max(members) + 1), cluster).price(nbytes)
    others = choices(cluster, "all_reduce", members, nbytes) if len(members) > 1 else []
    alternatives = [
        PricedSchedule(each.name, slices * each.price.seconds)
        for each in others
        if each.schedule.name != schedule.name and _carries(each.schedule, call.wire)
    ]
    return Explanation(
        nbytes=numel * call.dtype.itemsize,
        ranks=len(members),
        schedule=schedule.name,
        steps=price.steps,
        slices=slices,
        transport=transport.kind_on(call.device),
        wire=str(call.wire).removeprefix("torch."),
        wire_nbytes=wire_nbytes,
        kernel=_kernel(call),
        seconds=slices * price.seconds,
        alternatives=tuple(alternatives),
        cluster=cluster.name,
        is_default=not given,
    )


def _wire_nbytes(numel: int, wire: AnyWire) -> int:
    """Return the bytes of the buffer that travels for so many values."""
    layout = layout_of([numel])
    itemsize = buffer_dtype(wire).itemsize
    if not is_quantized(wire):
        return layout.numel * itemsize
    chosen = wire
    if not isinstance(wire, Quantizer):  # it chooses one in each step
        chosen = carrier_of(wire).step_quantizer(wire).choose(0)
    return layout.head_numel * itemsize + cast("Quantizer", chosen).nbytes(numel)


def _carries(schedule: Schedule, wire: AnyWire) -> bool:
    return not is_quantized(wire) or (
        summing_steps(schedule, MOST_SUMMING_STEPS) <= MOST_SUMMING_STEPS
    )


def _kernel(call: AllReduce) -> str:
    """Return what the choices of `kernels.dispatch` and `quantize_dispatch` come to."""
    if call.device.type == "cuda":
        triton = call.dtype in GPU_DTYPES and buffer_dtype(call.wire) in GPU_DTYPES
        return "Triton" if triton else "plain torch"
    if is_quantized(call.wire) and compiled_quantize() is not None:
        return "Numba"
    return "plain torch"
