# SPDX-License-Identifier: Apache-2.0
"""When steps end, and what they report, of replicas that exchange after the optimizers' steps.

Between exchanges they may differ. What gossip and local SGD share: subclasses say what is sent and
mixed, and write that. This writes gradients that weigh, copies of weights in optimizers that follow
what is mixed, and at the end of ``join()`` weights and states. Used on the thread that trains;
hooks of gradients run on that of the backward pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NoReturn

from torch.distributed import PrefixStore
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.buckets.digest import Digest
from commrt.buckets.span import Span
from commrt.buckets.weight_part import WeightPart
from commrt.errors import UsageError
from commrt.kernels.plain_torch import scale_present
from commrt.runtime.membership import LOST
from commrt.runtime.untraced import untraced
from commrt.store.keys import store_of_model
from commrt.training.backward_pass import at_end_of_backward, current_pass
from commrt.training.elastic_replica import ElasticReplica
from commrt.training.gradient_hooks import on_dense_gradients
from commrt.training.join_progress import JoinProgress
from commrt.training.joining import joining
from commrt.training.model_collectives import overwrite_states
from commrt.training.own_steps import NO_STEPS, ONE_STEP, ONE_UPDATE, OwnSteps
from commrt.training.request import Request
from commrt.training.riding_rules import RidingRules
from commrt.training.stateful import Stateful
from commrt.training.step_clock import MOST_PASSES, StepClock
from commrt.training.step_guard import are_zeroed
from commrt.training.step_report import StepReport


@untraced
class AfterStepReplica(ElasticReplica):
    """A replica whose step is a backward pass outside of `no_sync`; `StepClock` says when it ends.

    So all ranks count the same steps. What the `parts` of the model rely on may be written by the
    given optimizers only. Subclasses call `_live_with` last in `__init__`, and `_waiting_for`
    around what they mix. They add to `_spans` and `_received_from` what `_close_report` reports
    next, which writes `last` and `_stats`. Of its parents this replaces `step`, and what these
    call: `_restart_at_step` (`load_state_dict`), `_holds_means` (`weigh`), `_steps_made`,
    `_note_weights` and `_follow` (`ElasticReplica`).
    """

    def __init__(
        self,
        request: Request,
        parts: Sequence[WeightPart],
        rules: RidingRules,
        watched: Digest | None = None,
    ) -> None:
        super().__init__(request, request.params, rules, watched)
        self._parts = parts
        self._clock = StepClock(map(id, request.optimizers))
        self._pass: int | None = None  # autograd's number of the latest that counts
        self._own_steps = NO_STEPS  # that optimizers have used
        self._made = NO_STEPS  # the latest step, which no optimizer has used; else none
        self._progress: JoinProgress | None = None  # inside join()
        self._joins = 0  # calls of it so far
        self._exposed_s = 0.0  # waited in `_waiting_for` since the latest report
        self._received_from = set[int]()  # ranks, since the latest report
        self._spans: list[Span] = []  # of exchanges that ended since the latest report

    def _steps_made(self) -> int | None:
        """Return all passes, also those whose step a `GradScaler` left out; None in ``join()``."""
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
        """Act in each pass that the clock has counted; not in `no_sync`."""

    def _end_all_steps(self) -> None:
        """End the steps of all passes, which no optimizer may use any more."""
        self._end_steps(self._clock.on_weights_needed())

    def _end_steps(self, ended: range) -> None:
        """Exchange what is due after the steps that have `ended`, in order."""
        if not ended:
            return
        if not self._steps.running:  # else its checks have looked
            self._parameters.require_unchanged()
            for part in self._parts:
                part.require_unwritten()
        if not self._optimizers:
            self._use_step()
        for step in ended:
            if self._progress is not None:
                self._progress.begin(step + 1)
            self._advance()

    def _restart_at_step(self, step: int) -> None:
        self._clock.restart(step)

    def _follow(self, record: Mapping[str, Any]) -> None:
        self._clock.restart(int(record["step"]))

    def _note_weights(self) -> None:
        for part in self._parts:
            part.note(anyway=True)

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

    def _close_report(self, step: int, members: tuple[int, ...], *, steps: int = 1) -> None:
        """Set `last` to what was done since the latest report; add it to the totals (`plus`)."""
        self.last = StepReport(
            step, members, self._exposed_s, tuple(self._spans), frozenset(self._received_from)
        )
        self._stats = self._stats.plus(self.last, steps=steps)
        self._spans = []
        self._received_from = set()
        self._exposed_s = 0.0

    def _hooks(self) -> Iterator[RemovableHandle]:
        """Yield the hooks of gradients; they act at the first one of a backward pass."""
        return on_dense_gradients(
            self, self._params, AfterStepReplica._on_first_gradient, once_per_pass=True
        )

    def _holds_gradients(self) -> bool:
        return any(param.grad is not None for _, param in self._params)

    def _holds_means(self) -> bool:
        return self._clock.unused > 0 and not are_zeroed(param for _, param in self._params)

    def _end_weighing(self, number: int | None) -> None:
        """Divide weighed gradients by their total weight: each rank steps by its own mean."""
        at_hand = self._weights.leave(number)
        self._made = OwnSteps(1, int(at_hand.weight is not None), at_hand.weight or 0.0)
        if at_hand.weight:
            factor = (at_hand.reference or 1.0) / at_hand.weight
            scale_present((param.grad for _, param in self._params), factor)

    def _use_step(self) -> None:
        """Note that an optimizer has used the gradients of the latest step."""
        self._own_steps = self._own_steps.plus(self._made)
        self._made = NO_STEPS

    def _on_first_gradient(self, _: str) -> None:
        """Count a backward pass at its first gradient: a step is due after the optimizers'."""
        number = current_pass()
        if not self._is_synchronous:
            self._weights.count_pass(number)
        elif number != self._pass:
            self._pass = number
            self._clock.on_pass(within_step=bool(self._steps.running))
            if self._giver is not None:
                self._answer_newcomers(self._giver)
            self._made = ONE_STEP
            if not self._weights.is_idle:
                at_end_of_backward(partial(self._end_weighing, number))
            if self._clock.is_left_out:
                at_end_of_backward(self._end_all_steps)
            if self._clock.unused > MOST_PASSES:
                self._refuse_unused_passes()
            self._on_pass()

    def _refuse_unused_passes(self) -> NoReturn:
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

    def _live_with(self, handles: Iterable[RemovableHandle]) -> None:
        """Begin to act; refuse optimizers' steps where others wrote what an exchange relies on."""
        checks = [self._parameters.require_unchanged]
        checks += [part.require_unwritten for part in self._parts]
        self._live(handles, self._before_step, self._after_step, checks)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._weights.has_passes:  # all in no_sync()
            self._end_weighing(None)
        self._end_steps(self._clock.on_step_begin(id(optimizer)))

    def _after_step(self, optimizer: Optimizer) -> None:
        if not self._rules.anything:
            self._use_step()
            self._own_steps = self._own_steps.plus(ONE_UPDATE)
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
            self._weights.forget_thrown_away()
            if self._weights.has_passes and self._optimizers and self._holds_gradients():
                self._end_weighing(None)
                self._on_pass()  # an optimizer ends the step, as after a backward pass
            else:
                self._made = NO_STEPS  # a pass before whose step was left out
                self._end_all_steps()

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
        try:
            with joining(world, self, also, step=str(self.step)):
                self._joins += 1
                prefix = f"join {self._joins}"
                store = PrefixStore(prefix, store_of_model(world.store, self._number))
                self._progress = progress = JoinProgress(store, world)
                progress.begin(self.step)
                yield
                self._end_all_steps()
                self._exchange_until_all_end(progress)
            self.consolidate()
            with world.collective("the end of join()"):
                owners = [*self._optimizers, *also]
                world.membership.together(
                    lambda: overwrite_states(world, owners, self.step, progress.last())
                )
        finally:
            if world.joined is None:  # else it was called inside of another join(), and refused
                self._progress = None

    def _exchange_until_all_end(self, progress: JoinProgress) -> None:
        """Exchange without data as long as a rank has some; go on without ranks that are lost."""
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
