# SPDX-License-Identifier: Apache-2.0
"""Replicas that exchange after the optimizers' steps, not in the backward pass.

Between exchanges they may differ. What gossip and local SGD share, used on the thread that trains.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Self, TypeVar, cast
from weakref import WeakMethod

import torch
from torch.distributed import PrefixStore
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.buckets.engine import Span
from commrt.buckets.weight_part import WeightPart
from commrt.elastic.elastic_membership import (
    ElasticMembership,
    end_survival,
    survive_losses,
)
from commrt.errors import UsageError
from commrt.runtime.membership import LOST
from commrt.runtime.untraced import untraced
from commrt.store.keys import store_of_model
from commrt.training.arrival import StateGiver, letting_in
from commrt.training.gradient_weights import NOTHING_SEEN, ONE_STEP
from commrt.training.hooks import at_end_of_backward, current_pass, on_dense_gradients
from commrt.training.join_progress import JoinProgress
from commrt.training.model_collectives import overwrite_states
from commrt.training.optimizer_steps import attached_to
from commrt.training.packed_state import pack, unpack
from commrt.training.replica import Replica
from commrt.training.request import Request
from commrt.training.stateful import Stateful, check_stateful, dump, load
from commrt.training.step_clock import MOST_PASSES, StepClock
from commrt.training.step_guard import are_zeroed
from commrt.training.step_report import StepReport
from commrt.training.tensor_bytes import flatten, restore
from commrt.training.unread_buffers import unread_buffers

T = TypeVar("T")
_log = logging.getLogger("commrt")


def call_if_alive(method: WeakMethod[Callable[[], T]]) -> T | None:
    """Call `method` unless its object was dropped; what a world keeps must not keep a replica."""
    call = method()
    return None if call is None else call()


def _needs_nobody(_: int) -> int:
    return 0


@untraced
class AfterStepReplica(Replica):
    """A replica whose step is a backward pass outside of `no_sync`; `StepClock` says when it ends.

    So all ranks count the same steps. What the `parts` of the model rely on may be written by the
    given optimizers only.
    """

    def __init__(self, request: Request, parts: Sequence[WeightPart]) -> None:
        super().__init__(request, request.params)
        self._number = request.number
        self._parts = parts
        self._clock = StepClock(map(id, request.optimizers))
        self._pass: int | None = None  # autograd's number of the latest that counts
        self._progress: JoinProgress | None = None  # inside join()
        self._joins = 0
        self._exposed_s = 0.0
        self._received_from = set[int]()
        self._spans: list[Span] = []
        # another rank's state, until the first step of this process
        self._taken: bytes | None = None
        self._owners_of_state = [*request.optimizers, *request.also, request.copies]
        admits = self._world.size > self._world.founders
        founds = self._world.config is None
        # two models have no common step
        is_other = attached_to(self._world) > 0
        others = f"more on rank {self._world.rank}" if is_other else "0"
        alone = not founds or self._world.all_equal("other models that train alone", others)
        if admits and not alone:
            raise UsageError(
                "init(up_to=) with two models that train alone: who comes takes the state of one;"
                " detach() the other one first"
            )
        self._giver = StateGiver(self._world, self._number) if admits else None
        if isinstance(self._world.membership, ElasticMembership):
            self._world.membership.end("another model gossips now")
        if alone and self._world.reconnect_options is not None:
            survive_losses(
                self._world,
                self._number,
                needed=None if self._giver is None else _needs_nobody,
                founds=founds,
                made=partial(call_if_alive, WeakMethod(self._steps_made)),
            )
        if self._giver is not None and founds:
            self._giver.open()

    def _steps_made(self) -> int | None:
        """Return what ranks compare where they meet; steps a `GradScaler` left out count too."""
        return self._clock.passes if self._progress is None else None

    @property
    def step(self) -> int:
        """Steps so far."""
        return self._clock.step

    @abstractmethod
    def _advance(self) -> None:
        """End one step of the clock, and exchange what is due after it."""

    @abstractmethod
    def _on_pass(self) -> None:
        """Act in each backward pass outside of `no_sync`, which the clock counts already."""

    def _end_all_steps(self) -> None:
        """End the steps of all passes, which no optimizer may use any more."""
        self._end_steps(self._clock.on_weights_needed())

    def _end_steps(self, ended: range) -> None:
        if not ended:
            return
        if not self._steps.running:  # else its checks have looked
            self._parameters.require_unchanged()
            for part in self._parts:
                part.require_unwritten()
        if not self._optimizers:
            self._riding.use_step()
        for step in ended:
            if self._progress is not None:
                self._progress.begin(step + 1)
            self._advance()

    def _restart_at_step(self, step: int) -> None:
        self._clock.restart(step)

    @contextmanager
    def _waiting_for(self, part: WeightPart) -> Iterator[None]:
        """Mix in the body what has come for `part`, and count how long that takes."""
        if not self._steps.running:
            part.require_unwritten()
        begin_s = perf_counter()
        before = self._copies.before(part.tensors()) if self._copies.found else ()
        with self._world.comm_thread.within_range("wait", number=part.index):
            yield
        if before:
            self._copies.follow(before)
        part.note()
        self._exposed_s += perf_counter() - begin_s

    def _report(self, step: int, members: tuple[int, ...]) -> None:
        self.last = StepReport(
            step, members, self._exposed_s, tuple(self._spans), frozenset(self._received_from)
        )
        self._stats = self._stats.plus(self.last)
        self._spans = []
        self._received_from = set()
        self._exposed_s = 0.0

    def _hooks(self) -> Iterator[RemovableHandle]:
        return on_dense_gradients(
            self, self._params, AfterStepReplica._end_of_pass, once_per_pass=True
        )

    def _holds_gradients(self) -> bool:
        return any(param.grad is not None for _, param in self._params)

    def _holds_means(self) -> bool:
        return self._clock.unused > 0 and not are_zeroed(param for _, param in self._params)

    def _end_weighing(self, number: int | None) -> None:
        """Divide weighed gradients by their total weight: each rank steps by its own mean."""
        if factor := self._riding.end_step(number):
            torch._foreach_mul_(
                [param.grad for _, param in self._params if param.grad is not None], factor
            )

    def _end_of_pass(self, _: str) -> None:
        """Note that a step is due after the optimizers'; called at each pass's first gradient."""
        number = current_pass()
        if not self._is_synchronous:
            self._riding.count_pass(number)
        elif number != self._pass:
            self._pass = number
            self._clock.on_pass(within_step=bool(self._steps.running))
            self._taken = None
            if self._giver is not None and self._giver.is_asked and self._may_give():
                at_end_of_backward(partial(self._giver.answer, self._packed))
            self._riding.made = ONE_STEP
            if not self._riding.is_idle:
                at_end_of_backward(partial(self._end_weighing, number))
            if self._clock.is_left_out:
                at_end_of_backward(self._end_all_steps)
            if self._clock.unused > MOST_PASSES:
                kinds = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
                who = (
                    f"a step() of the {kinds} given to attach()"
                    if kinds
                    else "a forward pass of its modules"
                )
                raise UsageError(
                    f"{MOST_PASSES} backward passes without {who}, so no step has ended: run passes"
                    " that only accumulate in replica.no_sync(); give all optimizers that step the"
                    " model to attach(), where one wraps another the one whose step() is called;"
                    " for updates by hand call replica.average() after each"
                )
            self._on_pass()

    def _live_with(self, handles: Iterable[RemovableHandle]) -> None:
        """Begin to act; refuse optimizers' steps where others wrote what an exchange relies on."""
        checks = [self._parameters.require_unchanged]
        checks += [part.require_unwritten for part in self._parts]
        self._live(handles, self._before_step, self._after_step, checks)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._riding.has_passes:  # all in no_sync()
            self._end_weighing(None)
        self._end_steps(self._clock.on_step_begin(id(optimizer)))

    def _after_step(self, optimizer: Optimizer) -> None:
        if not self._refuses:
            self._riding.use_step()
        for part in self._parts:
            part.note()
        self._copies.after_step(optimizer)
        self._end_steps(self._clock.on_step_end(id(optimizer)))

    def skip(self) -> None:
        """Leave out the step whose backward pass comes next, or runs, on this rank alone."""
        self._clock.leave_out(running=current_pass() == self._pass)

    @property
    def skipping(self) -> tuple[int, ...]:
        """This rank, if it is to leave out the latest step; the others do not know of it."""
        return (self._world.rank,) if self._clock.is_left_out else ()

    def average(self) -> None:
        """End a step without a backward pass; see `Replica.average`."""
        if self._is_synchronous:
            self._clock.on_pass(within_step=bool(self._steps.running))
            self._riding.forget_thrown_away()
            if self._riding.has_passes and self._optimizers and self._holds_gradients():
                self._end_weighing(None)
                self._on_pass()  # an optimizer ends the step, as after a backward pass
            else:
                self._riding.made = NOTHING_SEEN  # a pass before whose step was left out
                self._end_all_steps()

    def come(self) -> Self:
        """Become a member while others train, with the state of one, or detach; not collective."""
        membership = cast("ElasticMembership", self._world.membership)
        with letting_in(self, self._world, membership):
            self._enter(membership)
            cast("StateGiver", self._giver).open()
        return self

    def _enter(self, membership: ElasticMembership) -> None:
        """Become a member, with another's state; train alone until its generation starts.

        So it makes all collectives that the others make after the step of that state.
        """
        membership.join_as_replacement(partial(self._fetch, membership))
        membership.go_on_at_step(self.step)

    def _packed(self) -> bytes:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return pack(self._record(), flatten(tensors).cpu(), dump(self._owners_of_state))

    def _fetch(self, membership: ElasticMembership) -> bool:
        """Take the state of a member; False if none gives it now."""
        if (packed := cast("StateGiver", self._giver).fetch(membership)) is not None:
            self._install(packed)
        return packed is not None

    def _install(self, packed: bytes) -> None:
        self._taken = packed
        record, (weights, states) = unpack(packed, dict, 2)
        tensors = [*self.model.parameters(), *self.model.buffers()]
        restore(weights.to(tensors[0].device), tensors, unread_buffers(self.model))
        load(states, self._owners_of_state)
        for part in self._parts:
            part.note(anyway=True)
        self._follow(record)

    def _keeps_taken_state(self) -> bool:
        """Return True before the first step of a process that came: it keeps the others' state."""
        if self._taken is None:
            return False
        _log.info(
            "commrt: rank %d takes its state from the others, not from a checkpoint",
            self._world.rank,
        )
        self._install(self._taken)
        return True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the step of `state`; a process that came keeps the others'. Collective."""
        if not self._keeps_taken_state():
            super().load_state_dict(state)

    def _may_give(self) -> bool:
        """Return True if another rank can go on from this rank's state."""
        return True

    def _record(self) -> dict[str, Any]:
        """Return what a process that comes takes over besides weights and states."""
        return {"step": self.step}

    def _follow(self, record: Mapping[str, Any]) -> None:
        """Take over what another rank's `_record` is."""
        self._clock.restart(int(record["step"]))

    @contextmanager
    def join(self, *also: Stateful) -> Iterator[None]:
        """Let ranks run out of data at different times; collective, around the whole loop.

        A rank that runs out early goes on exchanging, without training, until all ranks have run
        out. Then all replicas become equal, as by `consolidate`. They take the state of the
        optimizers and of `also` from a rank that trained to the end. This costs one store operation
        per step. Raises `UsageError` inside another ``join()``.
        """
        world = self._world
        if world.size > world.founders:
            raise UsageError(
                "join() with init(up_to=): ranks that come know nothing of it; leave one of the"
                " two out"
            )
        if world.joined is not None:
            raise UsageError(
                "join() inside join(): join one model of a world at a time, around its loop"
            )
        check_stateful(also)
        self._joins += 1
        store = PrefixStore(f"join {self._joins}", store_of_model(world.store, self._number))
        world.agree(
            "join", also=", ".join(type(owner).__name__ for owner in also), step=str(self.step)
        )
        self._progress = progress = JoinProgress(store, world)
        progress.begin(self.step)
        progress.founders = world.members
        world.joined = self
        try:
            yield
            self._end_all_steps()
            self._exchange_until_all_end(progress)
            world.joined = None
            self.consolidate()
            with world.collective("the end of join()"):
                owners = [*self._optimizers, *also]
                world.membership.together(
                    lambda: overwrite_states(world, owners, self.step, progress.last())
                )
        finally:
            self._progress = None
            world.joined = None

    def _exchange_until_all_end(self, progress: JoinProgress) -> None:
        while True:
            try:
                for _ in progress.outlast(self.step):
                    self.average()
            except LOST as failure:
                self._world.comm_thread.submit(
                    partial(self._world.membership.recover, failure)
                ).result()
            else:
                return

    def detach(self) -> None:
        """Remove all hooks, and drop exchanges that are in flight; not collective."""
        super().detach()
        if self._giver is not None:
            self._giver.close()
        end_survival(self._world, self._number)
