# SPDX-License-Identifier: Apache-2.0
"""The door for custom training loops: hooks that average gradients while the backward pass still runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.admission import check_model, check_optimizers, check_wire, describe_buffers, describe_optimizers
from commrt.algorithms.torus import Torus2D
from commrt.anchor import drop, hold
from commrt.answer import Answer
from commrt.autograd import at_end_of_backward, current_pass, on_gradient
from commrt.buckets import MIB, Bucket, Named, build_buckets
from commrt.engine import Engine
from commrt.errors import UsageError
from commrt.gate import Gate
from commrt.ready import LaunchOrder
from commrt.report import Span, Stats, StepReport
from commrt.schedule import Algorithm
from commrt.state import batches, dump, fingerprint, flatten, load, restore
from commrt.world import World, current

__all__ = ["Replica", "attach"]

Optimizers = Optimizer | Sequence[Optimizer] | None


def attach(
    model: nn.Module,
    optimizer: Optimizers = None,
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
    ``param.grad``. With `optimizer` (one, or all that step this model), ``step`` refuses gradients that were
    never averaged, and settings are compared between ranks.

    `wire` is the dtype that travels (bfloat16 or float16 halve the bytes; sums are formed in fp32 and rounded
    to the wire at each hop; replicas stay bitwise equal). `broadcast_buffers` sends rank 0's buffers to all in each
    synchronous step, as DDP does. Collective. The hooks live as long as the model, or until `Replica.detach`.
    Raises `UsageError` for a model that cannot be averaged, `ScheduleError` for an algorithm that does not keep
    its promise, `DisagreementError` if ranks differ.
    """
    world = world or current()
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    check_wire(wire, bucket_cap_mb)
    check_model(model, params)
    check_optimizers(optimizers, params)
    _require_unattached(params)
    world.attached += 1
    cap_nbytes, allocate = int(bucket_cap_mb * MIB), world.transport.allocate
    cut = partial(build_buckets, wire=wire, cap_nbytes=cap_nbytes, model=world.attached, allocate=allocate)
    engine = Engine(world, algorithm, cut(params[::-1]))
    _agree(engine, model, broadcast_buffers, describe_optimizers(optimizers, params))
    replica = Replica(model, optimizers, engine, cut, broadcast_buffers=broadcast_buffers)
    try:
        replica.overwrite_with_first()
    except BaseException:
        replica.detach()
        raise
    return replica


def _require_unattached(params: Sequence[Named]) -> None:
    taken = {id(param) for replica in _replicas for bucket in replica.buckets for _, param in bucket.params}
    for name, param in params:
        if id(param) in taken:
            raise UsageError(f"{name} is attached already: detach() the first replica before attaching again")


def _agree(engine: Engine, model: nn.Module, broadcast_buffers: bool, optimizers: str) -> None:
    """Invariant 1: what runs was verified, and is the same everywhere."""
    engine.world.agree(
        "attach",
        model=str(engine.world.attached),
        algorithm=re.sub(r" at 0x[0-9a-f]+", "", repr(engine.algorithm)),  # a plain class says where it lies
        schedule=engine.schedule(0).digest(),
        buckets="; ".join(bucket.layout() for bucket in engine.buckets),
        broadcast_buffers=str(broadcast_buffers),
        buffers=describe_buffers(model),
        optimizer=optimizers,
    )


class Replica:
    """One rank's model, attached; made by `attach`.

    All methods belong to the thread that trains. Those marked collective must be called by every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        engine: Engine,
        cut: Callable[[Sequence[Named]], list[Bucket]],
        *,
        broadcast_buffers: bool,
    ) -> None:
        self.model = model
        self.step = 0
        """Synchronous steps so far."""
        self.last: StepReport | None = None
        """The latest step."""
        self._engine = engine
        self._cut = cut
        self._optimizers = optimizers
        self._broadcast_buffers = broadcast_buffers
        self._buffer_kinds = _kinds(model.buffers())
        self._params = [named for bucket in engine.buckets for named in bucket.params]
        self._gate = Gate(optimizers, [param for _, param in self._params], self._take_part, self._refuse)
        self._order = LaunchOrder([bucket.names for bucket in engine.buckets])
        self._order_is_observed = False
        self._stats = Stats()
        self._in_flight: list[Answer[Span]] = []
        self._buffers: list[Tensor] = []  # those being broadcast in this step, and their bytes
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._pass: int | None = None  # the backward pass whose gradients are being averaged
        self._averaging = True
        self._joining = False
        self._handles = self._register()

    def _register(self) -> list[RemovableHandle]:
        _replicas.add(self)
        hold(self, self._owners())
        return [on_gradient(param, self._hook(name)) for name, param in self._params] + self._gate.register()

    def _owners(self) -> Iterator[nn.Module]:
        ours = {id(param) for _, param in self._params}
        for module in self.model.modules():
            if any(id(param) in ours for param in module.parameters(recurse=False)):
                yield module

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets, in the order in which they leave."""
        return self._engine.buckets

    # One backward pass: _begin at the first gradient, _submit as buckets fill, _finish at its end.

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        weakly = ref(self)

        def ready(param: Tensor) -> None:
            replica = weakly()
            if replica is None:
                raise UsageError(f"{name} outlived the model it was attached with: keep the model or its replica")
            replica._on_gradient(name, param)  # noqa: SLF001  # its own

        return ready

    def _on_gradient(self, name: str, param: Tensor) -> None:
        if param.grad is not None and param.grad.layout != torch.strided:
            raise UsageError(f"the gradient of {name} is {param.grad.layout}: only dense gradients can be averaged")
        if not self._averaging:
            self._gate.hold_back()
            return
        self._require_one_pass(name)
        if self._pass is None:
            self._begin(current_pass())
            at_end_of_backward(self._finish)
        self._submit(self._order.mark(name))

    def _require_one_pass(self, name: str) -> None:
        if self._pass in (None, current_pass()):
            return
        if self._engine.world.size == 1:  # nobody waits for the rest of the pass that was interrupted
            self._pass = None
            return
        raise UsageError(
            f"the gradient of {name} came from a backward pass inside or after one that did not end: an error "
            "interrupted it, or reentrant activation checkpointing is on (use use_reentrant=False)"
        )

    def _begin(self, number: int) -> None:
        self._buffers = self._unchanged_buffers() if self._broadcast_buffers else []
        self._pass = number
        self._order.arm()
        self._in_flight = []
        if self._joining:
            self._engine.submit_roll_call(True, self.step)
        if self._buffers:
            self._flat = flatten(self._buffers)
            self._in_flight.append(self._engine.submit_broadcast(self._flat, self.step))

    def _unchanged_buffers(self) -> list[Tensor]:
        buffers = list(self.model.buffers())
        if _kinds(buffers) != self._buffer_kinds:
            raise UsageError(
                f"the buffers' dtypes or shapes have changed since attach(), now {describe_buffers(self.model)}: "
                "keep them as they are, or attach with broadcast_buffers=False"
            )
        return buffers

    def _submit(self, indices: list[int]) -> None:
        self._in_flight += [self._engine.submit(self._engine.buckets[i], self.step) for i in indices]

    def _finish(self) -> None:
        if self._pass is None:
            return
        begin_s = perf_counter()
        try:
            self._submit(self._order.rest())
            spans = tuple(answer.result() for answer in self._in_flight)
        finally:
            self._pass = None
            self._in_flight = []
        if self._buffers:
            restore(self._flat, self._buffers)
        self._record(StepReport(self.step, self._engine.members, perf_counter() - begin_s, spans))
        if not (self._order_is_observed or self._joining):
            self._observe_order()
        self._gate.open()

    def _record(self, report: StepReport) -> None:
        self.last, self._stats = report, self._stats.plus(report)
        self.step += 1

    def _observe_order(self) -> None:
        """Cut the buckets anew, in the order in which rank 0's gradients became ready in this pass."""
        self._order_is_observed = True
        place = {name: i for i, (name, _) in enumerate(self._params)}
        seen = [place[name] for name in self._order.seen]
        order = torch.tensor([*seen, *sorted(set(place.values()) - set(seen))])
        self._engine.submit_broadcast(order, self.step).result()
        if order.tolist() != sorted(order.tolist()):
            self._params = [self._params[i] for i in order.tolist()]
            self._engine.replace_buckets(self._cut(self._params))
            self._order = LaunchOrder([bucket.names for bucket in self.buckets])

    def _take_part(self) -> None:
        """Average the gradients at hand, if any, where no backward pass did."""
        self._begin(number=-1)
        self._finish()

    def _refuse(self, stranger: Tensor) -> None:
        """Raise for a parameter with a gradient that no replica averages."""
        for replica in _replicas:
            if any(param is stranger for _, param in replica._params):  # noqa: SLF001  # of this class
                return
        own = (name for name, param in self.model.named_parameters() if param is stranger)
        name = next(own, f"a parameter of shape {list(stranger.shape)}")
        raise UsageError(
            f"the optimizer steps {name}, which was frozen, absent or outside of the model when it was attached: "
            "nobody averages its gradient; detach() and attach() again"
        )

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
        data, and divide by their number. At the end all ranks get parameters, buffers and the optimizers' state of
        one that worked to the end. Costs one small all-reduce per step. Raises `UsageError` inside another
        ``join()``, and for an algorithm that cannot do without a rank.
        """
        if self._joining:
            raise UsageError("join() inside join(): one around the whole loop is enough")
        self._engine.require_any_members()
        self._joining = True
        try:
            yield
            self._outlast()
        finally:
            self._joining = False
            self._engine.members = tuple(range(self._engine.world.size))

    def _outlast(self) -> None:
        """Answer roll calls until nobody has data, then take the state of the last who had."""
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
        if self._optimizers:
            self._overwrite_optimizers()

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

    def _overwrite_optimizers(self) -> None:
        first = self._engine.members[0] == self._engine.world.rank
        flat = dump(self._optimizers) if first else torch.empty(0, dtype=torch.uint8)
        nbytes = torch.tensor([flat.numel()])
        self._engine.submit_broadcast(nbytes, self.step).result()
        flat = flat if first else flat.new_empty(int(nbytes))
        self._engine.submit_broadcast(flat, self.step).result()
        if not first:
            load(flat, self._optimizers)

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
        drop(self._owners())
        _replicas.discard(self)

    def close(self) -> None:
        """Detach; the world stays open. Safe to call twice."""
        self.detach()


_replicas: WeakSet[Replica] = WeakSet()


def _kinds(tensors: Iterable[Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(tensor.dtype, tensor.shape) for tensor in tensors]
