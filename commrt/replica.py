# SPDX-License-Identifier: Apache-2.0
"""The door for custom training loops: hooks that average gradients while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.admission import (
    check_kinds,
    check_model,
    check_optimizers,
    check_stateful,
    check_wire,
    describe,
    describe_buffers,
    describe_optimizers,
    have_state,
    listed,
)
from commrt.algorithms.torus import Torus2D
from commrt.anchor import drop, hold
from commrt.autograd import at_end_of_backward, current_pass, on_gradient
from commrt.averaging import BY_HAND, LATE, Averaging, Cut
from commrt.buckets import MIB, Bucket, Named, build_buckets
from commrt.engine import Engine
from commrt.errors import UsageError
from commrt.gate import Gate
from commrt.handover import overwrite_buffers, overwrite_model, overwrite_states
from commrt.report import Stats, StepReport
from commrt.schedule import Algorithm
from commrt.state import Stateful, fingerprint
from commrt.world import World, current

__all__ = ["Replica", "attach"]

Optimizers = Optimizer | Sequence[Optimizer] | None


def attach(  # noqa: PLR0913  # each says one thing, and has its default
    model: nn.Module,
    optimizer: Optimizers = None,
    algorithm: Algorithm = Torus2D(),  # noqa: B008  # a frozen value
    *,
    world: World | None = None,
    wire: torch.dtype | None = None,
    bucket_cap_mb: float = 25.0,
    broadcast_buffers: bool = True,
    graphs: bool = False,
) -> Replica:
    """Make `model` one replica of a world: from now on ``backward()`` averages its gradients over all ranks.

    Parameters and buffers are overwritten with rank 0's. During each backward pass buckets leave on the
    world's lane as their gradients become ready; ``backward()`` returns when all are averaged, in place in
    ``param.grad``; until then they must be left alone. With `optimizer` (one, or all that step this model), ``step``
    refuses gradients that were never averaged, settings are compared between ranks, now and in each step, and
    state that is there already is overwritten with rank 0's.

    `wire` is the dtype that travels (bfloat16 or float16 halve the bytes; sums are formed in fp32 and rounded
    to the wire at each hop; replicas stay bitwise equal); gradients of no wider dtype travel as they are.
    `broadcast_buffers` sends rank 0's buffers to all at the end of each synchronous step; a graph that was built with
    other values and has not run backward yet then ends in torch's own error (not BatchNorm's in training, which does
    not read them). With `graphs`, not yet tried on a GPU (docs/nccl.md), a device remembers what it does for a bucket
    after two steps with a schedule, and repeats it by one launch; `Replica.why_not_graphs` says where it does not.
    Collective. The hooks live as long as the model, or until `Replica.detach`.
    Raises `UsageError` for a model that cannot be averaged, `ScheduleError` for an algorithm that does not keep
    its promise, `DisagreementError` if ranks differ.
    """
    world = _checked(world)
    world.require_all_ranks("attach()")
    check_kinds(model, algorithm)
    optimizers = listed(optimizer)
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    check_wire(wire, bucket_cap_mb)
    check_model(model, params)
    check_optimizers(optimizers, params)
    _require_unattached(params)
    if (device := params[0][1].device).type == "cuda":
        world.connect(device)
    world.attached += 1
    cap_nbytes, allocate = int(bucket_cap_mb * MIB), world.transport.allocate
    cut = partial(build_buckets, wire=wire, cap_nbytes=cap_nbytes, model=world.attached, allocate=allocate)
    engine = Engine(world, algorithm, cut(params[::-1]), graphs=graphs)
    _agree(engine, model, broadcast_buffers, describe_optimizers(optimizers, params))
    replica = Replica(model, optimizers, engine, cut, broadcast_buffers=broadcast_buffers)
    try:
        replica.overwrite_with_first()
        if have_state(optimizers):
            overwrite_states(engine, optimizers, 0)
        engine.submit_preparation(0).result()
    except BaseException:
        replica.detach()
        raise
    return replica


def _checked(world: World | None) -> World:
    if world is not None and not isinstance(world, World):
        raise UsageError(f"world={world!r} is no world: pass what commrt.init() returned, or leave it out")
    return current() if world is None else world


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
        algorithm=describe(repr(engine.algorithm)),
        schedule=engine.schedule(0).digest(),
        buckets="; ".join(bucket.description() for bucket in engine.buckets),
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
        cut: Cut,
        *,
        broadcast_buffers: bool,
    ) -> None:
        self.model = model
        self.last: StepReport | None = None
        """The latest step."""
        self._engine = engine
        self._optimizers = optimizers
        self._params = [named for bucket in engine.buckets for named in bucket.params]
        params = [param for _, param in self._params]
        self._gate = Gate(optimizers, params, self._come_late, self._refuse, self._require_sound)
        self._averaging = Averaging(model, engine, self._gate, cut, broadcast_buffers=broadcast_buffers)
        self._stats = Stats()
        self._is_synchronous = True
        self._handles = self._register()

    @property
    def step(self) -> int:
        """Synchronous steps so far."""
        return self._averaging.step

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
        if not self._is_synchronous:
            self._gate.hold_back()
            return
        if self._averaging.is_new(f"the gradient of {name}"):
            self._begin(current_pass())
            at_end_of_backward(self._finish)
        self._averaging.mark(name)

    def _begin(self, number: int) -> None:
        if self._engine.world.joined not in (None, self):
            raise UsageError("another model of this world is in join(): ranks that left it answer for that model only")
        self._averaging.begin(number)

    def _finish(self) -> None:
        self.last = self._averaging.finish()
        self._stats = self._stats.plus(self.last)

    def average(self) -> None:
        """Average the gradients at hand now; collective.

        For a rank that has no batch for this step: in place of its ``backward()``, while the others run theirs. In
        `no_sync`, where theirs only accumulates, it does nothing.
        """
        if self._is_synchronous:
            self._average(BY_HAND)

    def _average(self, number: int) -> None:
        if self._averaging.is_new("average()"):
            self._begin(number)
            self._finish()

    def _come_late(self) -> None:
        self._average(LATE)

    def _require_sound(self) -> None:
        """Raise what ended a transfer on a GPU after ``backward()`` had returned."""
        if failure := self._engine.world.untold:
            raise failure

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
        before, self._is_synchronous = self._is_synchronous, False
        try:
            yield
        finally:
            self._is_synchronous = before

    @contextmanager
    def join(self, *also: Stateful) -> Iterator[None]:
        """Let ranks run out of data at different times; collective, around the whole loop.

        A rank that leaves the context early stays until all have; steps average over those that still have
        data, and divide by their number. At the end all ranks get parameters, buffers, the optimizers' state and that
        of `also` of one that worked to the end. Learning rate schedulers and a `GradScaler` belong there: they have
        counted as many steps as their rank had data for, and ranks would go on differently.

        Costs one small all-reduce per step. Raises `UsageError` inside another ``join()``, for the gradients of another
        model of the world, and for an algorithm that cannot do without a rank. Only `average` works inside of it; other
        calls that all ranks must make would meet a roll call, and raise `UsageError`.
        """
        if self._engine.world.joined is not None:
            raise UsageError("join() inside join(): one model of a world can be joined at a time, around its loop")
        self._engine.require_any_members()
        check_stateful(also)
        self._engine.world.agree("join", also=", ".join(type(owner).__name__ for owner in also))
        self._averaging.joining = True
        self._engine.world.joined = self
        try:
            yield
            self._outlast(also)
        finally:
            self._averaging.joining = False
            self._engine.world.joined = None
            self._engine.forget()
            self._engine.members = tuple(range(self._engine.world.size))

    def _outlast(self, also: Sequence[Stateful]) -> None:
        """Answer roll calls until nobody has data, then take the state of the last who had."""
        last = self._engine.members
        while True:
            self._engine.submit_roll_call(False, self.step).result()
            if not self._engine.members:
                break
            last = self._engine.members
            self._averaging.step += 1
        first = last[0]
        self._engine.members = (first, *(rank for rank in range(self._engine.world.size) if rank != first))
        overwrite_model(self._engine, self.model, self.step)
        overwrite_states(self._engine, [*self._optimizers, *also], self.step)
        self._gate.steps = 0

    def overwrite_with_first(self) -> None:
        """Parameters and buffers of rank 0 to all; collective, not inside `join`."""
        self._engine.world.require_all_ranks("overwrite_with_first()")
        overwrite_model(self._engine, self.model, self.step)

    def sync_buffers(self) -> None:
        """Overwrite this rank's buffers with rank 0's now; collective, not inside `join`."""
        self._engine.world.require_all_ranks("sync_buffers()")
        overwrite_buffers(self._engine, self.model, self.step)

    def replicas_equal(self) -> bool:
        """True if parameters and buffers are bitwise equal on all ranks; collective, not inside `join`."""
        return self._engine.world.all_equal("replicas", fingerprint(self.model))

    def stats(self) -> Stats:
        """Totals since `attach`."""
        return self._stats

    def why_not_graphs(self) -> dict[int, str]:
        """The buckets that no graph carried in the latest step, with the reason; empty without ``graphs=True``."""
        return self._engine.why_not_graphs()

    def state_dict(self) -> dict[str, int | str]:
        """What a checkpoint needs besides the model and the optimizer."""
        return {"step": self.step, "algorithm": repr(self._engine.algorithm)}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue at the step of `state`; collective, raises `DisagreementError` if ranks load different steps."""
        step = state.get("step") if isinstance(state, Mapping) else None
        if not isinstance(step, int) or step < 0:
            raise UsageError(f"a state without a step number: {state!r:.200}; pass what state_dict() returned")
        self._engine.world.agree("load_state_dict", step=str(step))
        self._averaging.step = step

    def detach(self) -> None:
        """Remove every hook; the model is a plain model again. Not collective."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        drop(self._owners())
        _replicas.discard(self)
        self._engine.release()

    def close(self) -> None:
        """Detach; the world stays open. Safe to call twice."""
        self.detach()


_replicas: WeakSet[Replica] = WeakSet()
