# SPDX-License-Identifier: Apache-2.0
"""The door for custom training loops: hooks that average gradients while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.algorithms.torus import Torus2D
from commrt.autograd import at_end_of_backward, current_pass, on_gradient
from commrt.buckets import MIB, Bucket, Named, build_buckets, check_params
from commrt.engine import Engine, Span
from commrt.errors import UsageError
from commrt.ready import LaunchOrder
from commrt.schedule import Algorithm
from commrt.state import batches, fingerprint, flatten, restore
from commrt.world import World, current

__all__ = ["Replica", "Stats", "StepReport", "attach"]

WIRES = (torch.float32, torch.bfloat16, torch.float16)
_attached: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one synchronous step cost this rank."""

    step: int
    members: tuple[int, ...]
    """The ranks whose gradients were averaged."""
    comm_s: float
    """Time the lane was busy: packing, transfers, reductions, unpacking."""
    exposed_s: float
    """Part of it that the backward pass did not hide: how long ``backward()`` waited at its end."""
    nbytes_sent: int
    spans: tuple[Span, ...]
    """The lane's work, bucket by bucket."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals over the steps since `attach`; fields as in `StepReport`."""

    steps: int = 0
    comm_s: float = 0.0
    exposed_s: float = 0.0
    nbytes_sent: int = 0

    def plus(self, report: StepReport) -> Stats:
        """With one more step."""
        return Stats(
            self.steps + 1,
            self.comm_s + report.comm_s,
            self.exposed_s + report.exposed_s,
            self.nbytes_sent + report.nbytes_sent,
        )


def attach(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    algorithm: Algorithm = Torus2D(),  # noqa: B008  # a frozen value
    *,
    world: World | None = None,
    wire: torch.dtype | None = None,
    bucket_cap_mb: float = 25.0,
    broadcast_buffers: bool = True,
) -> Replica:
    """Make `model` one replica of a world: from now on ``backward()`` averages its gradients over all ranks.

    Parameters and buffers are overwritten with rank 0's. During each backward pass buckets leave on the
    world's lane as their gradients become ready; ``backward()`` returns when all are averaged, in place in
    ``param.grad``. With `optimizer`, its ``step`` refuses gradients that were never averaged.

    `wire` is the dtype that travels (bfloat16 or float16 halve the bytes; sums are formed in fp32 and rounded
    to the wire at each hop; replicas stay bitwise equal). `broadcast_buffers` sends rank 0's buffers to all in each
    synchronous step, as DDP does. Collective. Raises `UsageError` for a model that cannot be averaged,
    `ScheduleError` for an algorithm that does not keep its promise, `DisagreementError` if ranks differ.
    """
    world = world or current()
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    _check_model(model, params, wire)
    if not bucket_cap_mb > 0:
        raise UsageError(f"bucket_cap_mb={bucket_cap_mb} must be positive: 25 is a good start")
    buckets = build_buckets(params, wire, int(bucket_cap_mb * MIB), allocate=world.transport.allocate)
    engine = Engine(world, algorithm, buckets)
    _agree(engine, model, broadcast_buffers)
    replica = Replica(model, optimizer, engine, broadcast_buffers)
    replica.overwrite_with_first()
    return replica


def _check_model(model: nn.Module, params: list[Named], wire: torch.dtype | None) -> None:
    if isinstance(model, DistributedDataParallel):
        raise UsageError("the model is wrapped in DistributedDataParallel already: attach the bare module instead")
    if model in _attached:
        raise UsageError("the model is attached already: detach() the first replica before attaching again")
    if wire is not None and wire not in WIRES:
        raise UsageError(
            f"wire={wire} cannot travel: use {', '.join(map(str, WIRES))}, or None for each dtype as it is"
        )
    check_params(params)
    if (device := params[0][1].device).type != "cpu":
        raise UsageError(f"the parameters are on {device}: this version moves CPU tensors only")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise UsageError(
                f"{name or 'the model'} makes sparse gradients, which cannot be averaged: use sparse=False"
            )


def _agree(engine: Engine, model: nn.Module, broadcast_buffers: bool) -> None:
    """Invariant 1: what runs was verified, and is the same everywhere."""
    schedule = engine.schedule(0)
    engine.world.agree(
        "attach",
        algorithm=repr(engine.algorithm),
        schedule=schedule.digest(),
        buckets="; ".join(bucket.layout() for bucket in engine.buckets),
        broadcast_buffers=str(broadcast_buffers),
        buffers=", ".join(f"{name} {b.dtype}{list(b.shape)}" for name, b in model.named_buffers()),
    )


class Replica:
    """One rank's model, attached; made by `attach`.

    All methods belong to the thread that trains. Those marked collective must be called by every rank.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, engine: Engine, broadcast_buffers: bool) -> None:
        self.model = model
        self.step = 0
        """Synchronous steps so far."""
        self.last: StepReport | None = None
        """The latest step."""
        self._engine = engine
        self._stats = Stats()
        self._broadcast_buffers = broadcast_buffers
        self._order = LaunchOrder([bucket.names for bucket in engine.buckets])
        self._in_flight: list[Future[Span]] = []
        self._buffers: list[Tensor] = []  # those being broadcast in this step, and their bytes
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._pass: int | None = None  # the backward pass whose gradients are being averaged
        self._averaging = True
        self._joining = False
        self._averaged = False  # since the last optimizer step
        self._held_back = False  # gradients of no_sync() that were not averaged yet
        self._frozen = [(name, param) for name, param in model.named_parameters() if not param.requires_grad]
        self._handles = self._register(optimizer)
        _attached.add(model)

    def _register(self, optimizer: Optimizer | None) -> list[RemovableHandle]:
        handles = [
            on_gradient(param, self._on_gradient(bucket, name))
            for bucket in self._engine.buckets
            for name, param in bucket.params
        ]
        if optimizer is not None:
            handles.append(optimizer.register_step_pre_hook(self._before_step))
        return handles

    # One backward pass: _begin at the first gradient, _submit as buckets fill, _finish at its end.

    def _on_gradient(self, bucket: Bucket, name: str) -> Callable[[Tensor], None]:
        def ready(param: Tensor) -> None:
            if param.grad is not None and param.grad.layout != torch.strided:
                raise UsageError(f"the gradient of {name} is {param.grad.layout}: only dense gradients can be averaged")
            if not self._averaging:
                self._held_back = True
                return
            if self._pass is None:
                at_end_of_backward(self._finish)
                self._begin(current_pass())
            elif self._pass != current_pass():
                raise UsageError(
                    f"the gradient of {name} came from a backward pass inside or after one that did not end: an error "
                    "interrupted it, or reentrant activation checkpointing is on (use use_reentrant=False)"
                )
            self._submit(self._order.mark(bucket.index, name))

        return ready

    def _begin(self, number: int) -> None:
        self._pass = number
        self._order.arm()
        self._in_flight = []
        if self._joining:
            self._engine.submit_roll_call(True, self.step)
        self._buffers = list(self.model.buffers()) if self._broadcast_buffers else []
        if self._buffers:
            self._flat = flatten(self._buffers)
            self._in_flight.append(self._engine.submit_broadcast(self._flat, self.step))

    def _submit(self, indices: list[int]) -> None:
        self._in_flight += [self._engine.submit(self._engine.buckets[i], self.step) for i in indices]

    def _finish(self) -> None:
        begin_s = perf_counter()
        self._submit(self._order.rest())
        try:
            spans = tuple(future.result() for future in self._in_flight)
        finally:
            self._pass = None
            self._in_flight = []
        if self._buffers:
            restore(self._flat, self._buffers)
        busy = sum(span.end_s - span.begin_s for span in spans)
        nbytes = sum(span.nbytes_sent for span in spans)
        report = StepReport(self.step, self._engine.members, busy, perf_counter() - begin_s, nbytes, spans)
        self.last, self._stats = report, self._stats.plus(report)
        self.step += 1
        self._averaged, self._held_back = True, False

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Refuse what would let the replicas drift apart; take part if this rank had no gradient at all."""
        if self._held_back:
            raise UsageError(
                "optimizer.step() with gradients that were never averaged: the last backward pass of an "
                "accumulation must be outside no_sync()"
            )
        for name, param in self._frozen:
            if param.requires_grad and param.grad is not None:
                raise UsageError(f"{name} was frozen when the model was attached: detach() and attach() again")
        if not self._averaged and len(args) < 2 and not kwargs.get("closure"):
            self._begin(number=-1)
            self._finish()
        self._averaged = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context only accumulate; the first one outside averages what has gathered."""
        before, self._averaging = self._averaging, False
        try:
            yield
        finally:
            self._averaging = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks run out of data at different times; collective, around the whole loop.

        A rank that leaves the context early stays until all have; steps average over those that still have
        data, and divide by their number. At the end all ranks get the parameters and buffers of one that
        worked to the end (not its optimizer state). Costs one small all-reduce per step.
        """
        self._joining = True
        try:
            yield
            self._outlast()
        finally:
            self._joining = False
            self._engine.members = tuple(range(self._engine.world.size))

    def _outlast(self) -> None:
        """Answer roll calls until nobody has data, then take the model of the last who had."""
        last = self._engine.members
        while True:
            self._engine.submit_roll_call(False, self.step).result()
            if not self._engine.members:
                break
            last = self._engine.members
            self.step += 1
        first = last[0]
        self._engine.members = (first, *(rank for rank in range(self._engine.world.size) if rank != first))
        self.overwrite_with_first()

    def overwrite_with_first(self) -> None:
        """Parameters and buffers of rank 0 to all; collective."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for batch in batches(tensors, 25 * MIB):
            self._overwrite(batch)

    def sync_buffers(self) -> None:
        """Overwrite this rank's buffers with rank 0's now; collective."""
        buffers = list(self.model.buffers())
        if buffers:
            self._overwrite(buffers)

    def _overwrite(self, tensors: list[Tensor]) -> None:
        flat = flatten(tensors)
        self._engine.submit_broadcast(flat, self.step).result()
        restore(flat, tensors)

    def replicas_equal(self) -> bool:
        """True if parameters and buffers are bitwise equal on all ranks; collective."""
        return self._engine.world.all_equal("replicas", fingerprint(self.model))

    def stats(self) -> Stats:
        """Totals since `attach`."""
        return self._stats

    def state_dict(self) -> dict[str, int | str]:
        """What a checkpoint needs besides the model and the optimizer."""
        return {"step": self.step, "algorithm": repr(self._engine.algorithm)}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continue at the step of `state`; collective, raises `DisagreementError` if ranks load different steps."""
        step = state.get("step")
        if not isinstance(step, int) or step < 0:
            raise UsageError(f"a state without a step number: {sorted(state)}; pass what state_dict() returned")
        self._engine.world.agree("load_state_dict", step=str(step))
        self.step = step

    def detach(self) -> None:
        """Remove every hook; the model is a plain model again. Not collective."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _attached.discard(self.model)

    def close(self) -> None:
        """Detach; the world stays open. Safe to call twice."""
        self.detach()
