# SPDX-License-Identifier: Apache-2.0
"""Replicas that exchange after the optimizers' steps, not in the backward pass; between exchanges they may differ."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import nn
from torch.distributed import PrefixStore
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.buckets.layout import Named
from commrt.elastic.elastic_membership import make_elastic
from commrt.errors import UsageError
from commrt.runtime.membership import LOST
from commrt.schedule import Algorithm
from commrt.torch_import import untraced
from commrt.training.admission import check_stateful
from commrt.training.broadcast_state import WorldBroadcaster, overwrite_states
from commrt.training.hooks import current_pass, on_gradient
from commrt.training.join_progress import JoinProgress
from commrt.training.model_state import Stateful
from commrt.training.replica import Replica
from commrt.training.step_guard import are_stepping

__all__ = ["AfterStepReplica"]

MOST_PASSES = 20
"""More than the 17 that a `GradScaler` skips on its way from a scale of 2^16 to one below 1."""


@untraced
class AfterStepReplica(Replica):
    """A replica whose step is a backward pass outside of `no_sync`, so that all ranks count the same steps.

    It ends when all optimizers have stepped after it, or before one of those that have done so steps again. A
    `GradScaler` that meets an infinity leaves the optimizer's step out. The step then ends with the next one.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[Named],
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
        broadcaster: WorldBroadcaster,
        number: int,
        *,
        alone: bool,
    ) -> None:
        super().__init__(model, params, algorithm, broadcaster)
        self._optimizers, self._number, self._members_broadcaster = optimizers, number, broadcaster
        self._passes_due = 0  # backward passes whose step has not ended
        self._pass: int | None = None  # the latest
        self._stepped: dict[int, int] = {}  # by optimizer: how many of them had come when it last stepped
        self._passes_unused = 0  # since an optimizer has stepped
        self._progress: JoinProgress | None = None  # inside join()
        self._joins = 0
        make_elastic(broadcaster.world).begin(self, number, alone=alone)

    @abstractmethod
    def _advance(self) -> None:
        """End one step: exchange what is due after it."""

    @abstractmethod
    def _note_writes(self) -> None:
        """Take the parameters as they are: an optimizer may write them."""

    @abstractmethod
    def _on_pass(self) -> None:
        """Act in each backward pass outside of `no_sync`, which `_passes_due` counts already."""

    def _end_steps(self, count: int) -> None:
        """End the first `count` of the steps that have not ended."""
        if not count:
            return
        if not are_stepping(self._optimizers):  # `_check_step` has looked
            self._parameters.require_unchanged()
            self._refuse_writes()
        if not self._optimizers:
            self._passes_unused = 0
        self._passes_due -= count
        self._stepped = {each: passes - count for each, passes in self._stepped.items() if passes > count}
        for _ in range(count):
            self._advance()

    def _hooks(self) -> Iterator[RemovableHandle]:
        """Register on gradients and optimizers."""
        end_of_pass = self._weakly(self._end_of_pass)
        yield from (on_gradient(param, end_of_pass) for _, param in self._params)
        for optimizer in self._optimizers:
            yield optimizer.register_step_pre_hook(self._before_step)
            yield optimizer.register_step_post_hook(self._after_step)

    def _weakly(self, call: Callable[..., None]) -> Callable[..., None]:
        """Return `call` without a reference to this replica, which a hook would keep alive for ever."""
        weakly, function = ref(self), call.__func__  # type: ignore[attr-defined]

        def called(*args: Any) -> None:
            if (replica := weakly()) is not None:
                function(replica, *args)

        return called

    def _end_of_pass(self, *_: Any) -> None:
        """Note that a step is due once the optimizers have stepped; called for each gradient."""
        if self._is_synchronous and (number := current_pass()) != self._pass:
            self._pass = number
            self._passes_due += 1
            self._bound_passes()
            self._on_pass()

    def _bound_passes(self) -> None:
        """Raise `UsageError` after too many passes without a step; an optimizer may run its closure as it likes."""
        self._passes_unused = 0 if are_stepping(self._optimizers) else self._passes_unused + 1
        if self._passes_unused > MOST_PASSES:
            kinds = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
            who = f"a step() of the {kinds} given to attach()" if kinds else "a forward pass of its modules"
            raise UsageError(
                f"{MOST_PASSES} backward passes without {who}, so no step has ended: run passes that only accumulate "
                "in replica.no_sync(); give all optimizers that step the model to attach(), where one wraps another "
                "the one whose step() is called; for updates by hand call replica.average() after each"
            )

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if failure := self._world.unraised_failure:
            raise failure
        if passes := self._stepped.get(id(optimizer)):
            self._end_steps(passes)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._passes_unused = 0
        self._note_writes()
        if self._passes_due:
            self._stepped[id(optimizer)] = self._passes_due
        if len(self._stepped) == len(self._optimizers):
            self._end_steps(self._passes_due)

    def average(self) -> None:
        """End a step without a backward pass; see `Replica.average`."""
        if self._is_synchronous:
            self._passes_due += 1
            self._end_steps(self._passes_due)

    def _end_period(self) -> None:
        """Exchange what would be exchanged later, so that `consolidate` loses nothing; collective."""

    @contextmanager
    def join(self, *also: Stateful) -> Iterator[None]:
        """Let ranks run out of data at different times; collective, around the whole loop.

        A rank that runs out early goes on exchanging, without training, until all ranks have run out. Then all replicas
        become equal, as by `consolidate`. They take the state of the optimizers and of `also` from a rank that
        trained to the end. This costs one store operation per step. Raises `UsageError` inside another ``join()``.
        """
        world = self._world
        if world.joined is not None:
            raise UsageError("join() inside join(): join one model of a world at a time, around its loop")
        check_stateful(also)
        self._progress = progress = self._begin_join(also)
        world.joined = self
        try:
            yield
            self._end_steps(self._passes_due)
            self._exchange_until_all_end(progress)
            self._end_period()
            world.joined = None
            with world.collective("the end of join()"):
                self.consolidate()
                world.membership.together(lambda: self._take_states(progress.last(), also))
        finally:
            self._progress, world.joined = None, None

    def _begin_join(self, also: Sequence[Stateful]) -> JoinProgress:
        world = self._world
        self._joins += 1
        prefix = PrefixStore(f"gossip {self._number} join {self._joins}", world.store)
        progress = JoinProgress(prefix, world.rank, lambda: world.members, world.timeout_s, world.membership.any_gone)
        progress.begin(self._step)
        world.agree("join", also=", ".join(type(owner).__name__ for owner in also), step=str(self._step))
        return progress

    def _exchange_until_all_end(self, progress: JoinProgress) -> None:
        while True:
            try:
                for _ in progress.outlast(self._step):
                    self.average()
            except LOST as failure:
                make_elastic(self._world).recover_now(failure)
            else:
                return

    def _take_states(self, source: int, also: Sequence[Stateful]) -> None:
        broadcaster = self._members_broadcaster
        broadcaster.source = source
        try:
            overwrite_states(broadcaster, [*self._optimizers, *also], self._step)
        finally:
            broadcaster.source = None

    def detach(self) -> None:
        """Remove all hooks, and drop exchanges that are in flight; not collective."""
        super().detach()
        make_elastic(self._world).end(self)
