# SPDX-License-Identifier: Apache-2.0
"""Replicas that exchange after the optimizers' steps, not in the backward pass; between exchanges they may differ."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Event
from time import perf_counter
from typing import Any, ClassVar, NamedTuple
from weakref import ref

from torch.distributed import PrefixStore, Store
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.buckets.engine import Span
from commrt.buckets.weight_bucket import WeightPart
from commrt.elastic.elastic_membership import make_elastic
from commrt.errors import DeadlineExceeded, PeerLost, Place, UsageError
from commrt.runtime.membership import LOST
from commrt.runtime.recording import within_range
from commrt.runtime.world import World
from commrt.store.client import STORE_ANSWER_S, call_store, parse, require
from commrt.threads.clock import now_s
from commrt.torch_import import untraced
from commrt.training.admission import check_stateful
from commrt.training.broadcast_state import overwrite_states
from commrt.training.hooks import current_pass, on_gradient
from commrt.training.model_state import Stateful
from commrt.training.replica import Replica, StepReport
from commrt.training.request import Request
from commrt.training.step_guard import are_stepping

__all__ = ["AfterStepReplica", "JoinProgress"]

MOST_PASSES = 20
"""More than the 17 that a `GradScaler` skips on its way from a scale of 2^16 to one below 1."""
LOOK_S = 0.005
"""Between two reads of the store in ``join()``."""
RUNNING, ENDED = "running", "ended"


@untraced
class AfterStepReplica(Replica):
    """A replica whose step is a backward pass outside of `no_sync`, so that all ranks count the same steps.

    It ends when all optimizers have stepped after it, or before one of those that have done so steps again. A
    `GradScaler` that meets an infinity leaves the optimizer's step out. The step then ends with the next one.

    What the `parts` of the model rely on may be written by the given optimizers only.
    """

    IN_FLIGHT: ClassVar[str]
    """The error about a parameter ``{name}`` that somebody else wrote while it was in flight."""
    WRITTEN: ClassVar[str]
    """The same while nothing was in flight."""
    _reports_all = True

    def __init__(self, request: Request, parts: Sequence[WeightPart], *, alone: bool) -> None:
        super().__init__(request.model, request.params, request.algorithm, request.world)
        self._optimizers, self._number, self._parts = request.optimizers, request.world.attached, parts
        self._passes = 0  # backward passes so far; the steps of those after `_step` have not ended
        self._pass: int | None = None  # the latest
        self._stepped: dict[int, int] = {}  # by optimizer: how many passes had come when it last stepped
        self._used_passes = 0  # how many had come when an optimizer last stepped
        self._progress: JoinProgress | None = None  # inside join()
        self._joins = 0
        self._exposed_s, self._received_from = 0.0, set[int]()
        self._spans: list[Span] = []
        make_elastic(request.world).begin(self, self._number, alone=alone)

    @abstractmethod
    def _advance(self) -> None:
        """End one step: exchange what is due after it."""

    @abstractmethod
    def _on_pass(self) -> None:
        """Act in each backward pass outside of `no_sync`, which `_passes` counts already."""

    def _end_steps(self, until: int) -> None:
        """End the steps of the first `until` passes."""
        if until <= self._step:
            return
        if not are_stepping(self._optimizers):  # `_check_step` has looked
            self._parameters.require_unchanged()
            self._refuse_writes()
        if not self._optimizers:
            self._used_passes = self._passes
        while self._step < until:
            self._advance()

    def _restart_at_step(self, step: int) -> None:
        super()._restart_at_step(step)
        self._passes = self._used_passes = step
        self._stepped = {}

    def _refuse_writes(self, part: WeightPart | None = None) -> None:
        for each in self._parts if part is None else (part,):
            if (name := each.written()) and not are_stepping(self._optimizers):
                raise UsageError((self.IN_FLIGHT if each.in_flight else self.WRITTEN).format(name=name))

    @contextmanager
    def _waiting_for(self, part: WeightPart) -> Iterator[None]:
        """Mix in the body what has come for `part`, and count how long that takes."""
        self._refuse_writes(part)
        begin_s = perf_counter()
        with within_range(self._world.recorder, "wait", number=part.index):
            yield
        part.note()
        self._exposed_s += perf_counter() - begin_s

    def _report(self, step: int, members: tuple[int, ...]) -> None:
        """Report what was mixed since the latest report; only local SGD has steps without."""
        if self._spans or self._reports_all:
            self.last = StepReport(step, members, self._exposed_s, tuple(self._spans), frozenset(self._received_from))
            self._stats = self._stats.plus(self.last)
            self._spans, self._received_from, self._exposed_s = [], set(), 0.0

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
            self._passes += 1
            if are_stepping(self._optimizers):  # it may run its closure as it likes
                self._used_passes = self._passes
            elif self._passes - self._used_passes > MOST_PASSES:
                self._refuse_more_passes()
            self._on_pass()

    def _refuse_more_passes(self) -> None:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        who = f"a step() of the {kinds} given to attach()" if kinds else "a forward pass of its modules"
        raise UsageError(
            f"{MOST_PASSES} backward passes without {who}, so no step has ended: run passes that only accumulate "
            "in replica.no_sync(); give all optimizers that step the model to attach(), where one wraps another "
            "the one whose step() is called; for updates by hand call replica.average() after each"
        )

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._end_steps(self._stepped.get(id(optimizer), 0))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        for part in self._parts:
            part.note()
        self._stepped[id(optimizer)] = self._used_passes = self._passes
        if len(self._stepped) == len(self._optimizers) and min(self._stepped.values()) > self._step:
            self._end_steps(self._passes)

    @property
    def _have_stepped(self) -> bool:
        """True if an optimizer has stepped after a pass whose step has not ended."""
        return max(self._stepped.values(), default=0) > self._step

    def average(self) -> None:
        """End a step without a backward pass; see `Replica.average`."""
        if self._is_synchronous:
            self._passes += 1
            self._end_steps(self._passes)

    def _end_period(self) -> None:
        """Exchange what would be exchanged later, so that `consolidate` loses nothing; collective."""

    def join(self, *also: Stateful) -> AbstractContextManager[None]:
        """Let ranks run out of data at different times; collective, around the whole loop.

        A rank that runs out early goes on exchanging, without training, until all ranks have run out. Then all replicas
        become equal, as by `consolidate`. They take the state of the optimizers and of `also` from a rank that
        trained to the end. This costs one store operation per step. Raises `UsageError` inside another ``join()``.
        """
        return self._joined(also)

    @contextmanager
    def _joined(self, also: Sequence[Stateful]) -> Iterator[None]:
        world = self._world
        if world.joined is not None:
            raise UsageError("join() inside join(): join one model of a world at a time, around its loop")
        check_stateful(also)
        self._progress = progress = self._begin_join(also)
        world.joined = self
        try:
            yield
            self._end_steps(self._passes)
            self._exchange_until_all_end(progress)
            self._end_period()
            world.joined = None
            with world.collective("the end of join()"):
                self.consolidate()
                owners = [*self._optimizers, *also]
                world.membership.together(lambda: overwrite_states(world, owners, self._step, progress.last()))
        finally:
            self._progress, world.joined = None, None

    def _begin_join(self, also: Sequence[Stateful]) -> JoinProgress:
        world = self._world
        self._joins += 1
        progress = JoinProgress(PrefixStore(f"gossip {self._number} join {self._joins}", world.store), world)
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

    def detach(self) -> None:
        """Remove all hooks, and drop exchanges that are in flight; not collective."""
        super().detach()
        make_elastic(self._world).end(self)


class _Place(NamedTuple):
    steps: int
    has_data: bool


class JoinProgress:
    """How far each member of `world` is in its loop, so that ranks without data outlast the others.

    Needs a store prefix of its own.
    """

    def __init__(self, store: Store, world: World) -> None:
        self._store, self._world, self._has_data = store, world, True

    def begin(self, steps: int) -> None:
        """Record that this rank has begun `steps` steps; costs one store operation."""
        if self._has_data:
            self._set(steps)

    def outlast(self, steps: int) -> Iterator[int]:
        """Record that this rank has ended after `steps` steps, then yield each further step as another rank begins it.

        Returns when all have ended and no rank has done more. Raises `DeadlineExceeded` with the ranks that began no
        step within the timeout, `PeerLost` if one is gone.
        """
        self._has_data = False
        self._set(steps)
        latest_s, before = now_s(), self._all()
        while True:
            ranks = self._all()
            running = [rank for rank, place in ranks.items() if place.has_data]
            if max(place.steps for place in ranks.values()) > steps:
                yield steps
                steps += 1
            elif not running:
                return
            if ranks != before:
                latest_s, before = now_s(), ranks
            self._wait(running, latest_s)

    def last(self) -> int:
        """Return the lowest rank of those that did most steps; call it once all have ended."""
        ranks = self._all()
        return max(ranks, key=lambda rank: (ranks[rank].steps, -rank))

    def _wait(self, running: list[int], latest_s: float) -> None:
        world = self._world
        if running and world.membership.any_gone(running):
            raise PeerLost("a rank that had not ended is gone: look at its output", Place(world.rank))
        if now_s() - latest_s > world.timeout_s:
            what = (
                f"ranks {running} began no step within {world.timeout_s:g} s, and have not ended: look at their output"
            )
            raise DeadlineExceeded(what, Place(world.rank, next(iter(running), None)))
        Event().wait(LOOK_S)

    def _set(self, steps: int) -> None:
        key, value = str(self._world.rank), f"{steps} {RUNNING if self._has_data else ENDED}"
        call_store(lambda: self._store.set(key, value), self._world.timeout_s + STORE_ANSWER_S, self._world.rank)

    def _all(self) -> dict[int, _Place]:
        members, limit_s = self._world.members, self._world.timeout_s + STORE_ANSWER_S
        data = call_store(lambda: {rank: self._store.get(str(rank)) for rank in members}, limit_s, self._world.rank)
        return {rank: parse(f"the progress of rank {rank}", text, _place) for rank, text in data.items()}


def _place(text: bytes) -> _Place:
    steps, state = text.decode().split()
    require(int(steps) >= 0 and state in (RUNNING, ENDED))
    return _Place(int(steps), state == RUNNING)
