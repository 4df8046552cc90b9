# SPDX-License-Identifier: Apache-2.0
"""A replica that stays equal to the others: gradients are averaged while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from commrt.algorithms.gossip import Gossip
from commrt.errors import UsageError
from commrt.model.admission import check_stateful
from commrt.model.autograd import at_end_of_backward, current_pass, on_dense_gradients
from commrt.model.gate import Gate
from commrt.model.state import Stateful
from commrt.replicas.averaging import BY_HAND, LATE, Averaging
from commrt.replicas.engine import Cut, Engine
from commrt.replicas.handover import overwrite_model, overwrite_states
from commrt.replicas.replica import Replica, attached
from commrt.wire.buckets import Bucket

__all__ = ["Synchronous"]


class Synchronous(Replica):
    """Its gradients are the same as everybody's when ``backward()`` returns."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        engine: Engine,
        cut: Cut,
        *,
        broadcast_buffers: bool,
    ) -> None:
        named = [named for bucket in engine.buckets for named in bucket.params]
        super().__init__(model, named, engine.algorithm, engine)
        self._engine = engine
        self._optimizers = optimizers
        params = [param for _, param in named]
        self._gate = Gate(optimizers, params, self._come_late, self._refuse, self._require_sound)
        self._averaging = Averaging(model, engine, self._gate, cut, broadcast_buffers=broadcast_buffers)
        self._live([*on_dense_gradients(self, named, Synchronous._on_gradient), *self._gate.register()])

    @property
    def step(self) -> int:
        """Synchronous steps so far."""
        return self._averaging.step

    def _go_on_at(self, step: int) -> None:
        self._averaging.step = step

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets, in the order in which they leave."""
        return self._engine.buckets

    def _on_gradient(self, name: str) -> None:
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
        """See `Replica.average`: the gradients at hand, now."""
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
        if attached([stranger])[0]:
            return
        own = (name for name, param in self.model.named_parameters() if param is stranger)
        name = next(own, f"a parameter of shape {list(stranger.shape)}")
        raise UsageError(
            f"the optimizer steps {name}, which was frozen, absent or outside of the model when it was attached: "
            "nobody averages its gradient; detach() and attach() again"
        )

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

    def drain(self) -> None:
        """See `Replica.drain`: nothing is, between steps."""

    def consolidate(self) -> None:
        """See `Replica.consolidate`; averaged replicas are equal already, but for buffers."""
        if isinstance(self._algorithm, Gossip):
            super().consolidate()
        else:
            self.sync_buffers()

    def why_not_graphs(self) -> dict[int, str]:
        """See `Replica.why_not_graphs`."""
        return self._engine.why_not_graphs()

    def detach(self) -> None:
        """See `Replica.detach`."""
        super().detach()
        self._engine.release()
