# SPDX-License-Identifier: Apache-2.0
"""Train with backup workers: a rank counts if its gradient is among the first, and catches up if it is not."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.algorithms.backup import BackupWorkers
from commrt.backup_workers.backup_step import BackupStep, SkippingGuard
from commrt.backup_workers.catch_up import CatchUp, PendingCatchUp, ReplicaState
from commrt.buckets.engine import BuildBuckets, Engine
from commrt.elastic.elastic_membership import make_elastic
from commrt.errors import CommrtError, DeadlineExceeded, PeerLost, QuorumLost, UsageError
from commrt.runtime.membership import NO_HOOKS, Hooks
from commrt.store.agreement import WorldConfig
from commrt.training.admission import check_stateful
from commrt.training.broadcast_state import gather_integers, overwrite_buffers, overwrite_model
from commrt.training.hooks import INTERRUPTED, ModuleHook, at_end_of_backward, current_pass, on_dense_gradients
from commrt.training.model_state import Stateful, fingerprint
from commrt.training.replica import Replica, StepReport

__all__ = ["BackupWorkersReplica", "FinalCalls", "reissued"]

T = TypeVar("T")
_log = logging.getLogger("commrt")
ENDED = (
    "commrt: rank %d drops its gradient of step %d: fewer than %d ranks train. The others are in a collective or have "
    "finished. This is logged once"
)
UNEQUAL = (
    "commrt: rank %d: weights or buffers differed between ranks that had applied the same updates; all ranks take "
    "those of rank %d. The loop or a forward pass changed them outside of steps (docs/backup_workers.md)"
)
ENDS_TRAINING = (QuorumLost, DeadlineExceeded, PeerLost)
"""Too few ranks are left, they do not answer, or the process that holds the store is gone."""


class Phase(Enum):
    """Where a replica stands in its step."""

    READY = auto()
    """Its weights are the latest that it knows, or become that in the optimizers' step."""
    RUNNING = auto()
    """It is in a backward pass."""
    LATE = auto()
    """The gradients of others counted: it needs the state of one of them before its next forward pass."""
    STALE = auto()
    """It is late, and in a backward pass that used older weights, as the model's hooks were not called."""
    OVER = auto()
    """Too few ranks train: what the loop does from here to the next pass is undone."""


LATE, IN_PASS = (Phase.LATE, Phase.STALE), (Phase.RUNNING, Phase.STALE)


class FinalCalls(list[Callable[[], object]]):
    """Calls to make once, before an error ends training."""

    def make(self, error: BaseException) -> None:
        """Make the calls if `error` ends training; logs what they raise."""
        if isinstance(error, ENDS_TRAINING) or isinstance(error.__cause__, ENDS_TRAINING):
            calls = [*self]
            self.clear()
            for call in calls:
                try:
                    call()
                except Exception:  # the other calls are made, and `error` is raised
                    _log.exception("commrt: a function given to before_giving_up() failed")


class BackupWorkersReplica(Replica):
    """Train one replica; its gradients are the mean of the first N ranks' when ``backward()`` returns.

    Or they are zeros, if this rank was late: then the optimizer's step changes nothing. A late rank fetches the state
    of a rank that counted before its next forward pass. So between a backward pass and the next forward pass its loop
    may do what the other ranks do, such as stepping a scheduler, or leave it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        also: Sequence[Stateful],
        algorithm: BackupWorkers,
        engine: Engine,
        cut: BuildBuckets,
        *,
        broadcast_buffers: bool,
    ) -> None:
        named = [named for bucket in engine.buckets for named in bucket.params]
        params, world = [param for _, param in named], engine.world
        self._needed = algorithm.needed(world.size)
        super().__init__(model, named, algorithm, world)
        self._engine, self._owners_of_state = engine, [*optimizers, *also]
        self._final_calls = FinalCalls()
        self._phase, self._pass_number = Phase.READY, -1
        self._pending = PendingCatchUp(0, ())  # what it needs while it is late
        self._samples: int | None = 0
        self._has_warned = False  # of batches that were dropped because the others had stopped
        self._state = ReplicaState(model, params, self._owners_of_state)
        self._guard = SkippingGuard(optimizers, params, self._state.shut)
        self._is_founder = world.config is None
        make_elastic(world).begin(self, world.attached, alone=True, needed=self._needed, founds=self._is_founder)
        store = PrefixStore(f"backed {world.attached}", world.store)
        self._backup_step = BackupStep(
            model, engine, self._guard, cut, algorithm, store, with_buffers=broadcast_buffers
        )
        self._catch_up = CatchUp(world, make_elastic(world), store, self._state)
        if self._is_founder:
            self._catch_up.open()
        world.hooks = Hooks(
            self._before_collective, self._state.shut, self._end, self._catch_up.close, self._final_calls.make
        )
        gradients = on_dense_gradients(self, self._params, BackupWorkersReplica._on_gradient)
        self._live([*self._on_model(), *gradients, *self._guard.register()], optimizers)

    def _on_model(self) -> Iterator[RemovableHandle]:
        weakly = ref(self)

        def before_forward(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if (replica := weakly()) is not None:
                replica._before_forward([*given, *named.values()])  # noqa: SLF001  # its own

        yield self.model.register_forward_pre_hook(ModuleHook(before_forward), with_kwargs=True)
        yield self.model.register_forward_hook(ModuleHook(self._state.after_forward))

    @property
    def step(self) -> int:
        """The number of updates in the weights, or that they will have in the next forward pass of a late rank."""
        return self._pending.version if self._phase in LATE else self._backup_step.version

    def before_giving_up(self, call: Callable[[], object]) -> None:
        """Call `call` before `QuorumLost`, `DeadlineExceeded` or `PeerLost` ends training, to save a checkpoint.

        The weights are then those of the latest whole step of this rank; a late rank has older ones than the others.
        """
        self._final_calls.append(call)

    def drain(self) -> None:
        """Catch up, if this rank was late; call it at the end of a step, not collective.

        Before, do what your loop does at the end of a step, such as stepping a scheduler. A rank whose data ended
        before the others' has the weights that it trained last; `consolidate` brings all to the latest.
        """
        self._follow()

    def _follow(self, *, amid_step: bool = False) -> None:
        if self._phase is Phase.OVER:
            self._state.undo()
            self._phase = Phase.READY
        elif self._phase in LATE:
            try:
                transfer = self._catch_up.fetch(self._pending)
            except CommrtError as error:
                self._final_calls.make(error)
                raise
            self._state.install(transfer, amid_step=amid_step)
            self._backup_step.follow(transfer.snapshot)
            self._pending = self._pending._replace(version=transfer.snapshot.version)
            self._phase = Phase.LATE if transfer.snapshot.is_due else Phase.READY

    def _open(self, *, in_pass: bool) -> None:
        """Let late ranks copy this state."""
        self._state.reload()
        self._state.open(self._backup_step.snapshot(in_pass=in_pass))

    def _before_forward(self, given: Sequence[object]) -> None:
        if not (self.model.training and torch.is_grad_enabled()):
            return
        if self._phase in (Phase.LATE, Phase.OVER):
            self._follow()
        if self._phase not in LATE and not (self._guard.fresh and self._guard.is_due):
            self._open(in_pass=True)
        for each in given:
            if isinstance(each, Tensor) and each.dim():
                self._samples = None if self._samples is None else self._samples + len(each)
                break
        else:
            self._samples = None

    def _on_gradient(self, name: str) -> None:
        if not self._is_synchronous:
            self._guard.hold_back()
            return
        if self._phase not in IN_PASS or self._pass_number != current_pass():
            if self._phase in IN_PASS:
                self._leave_interrupted_pass(name)
            self._pass_number = current_pass()
            self._begin_pass()
            at_end_of_backward(self._finish)
        if self._phase is Phase.RUNNING:
            self._backup_step.mark(name)

    def _leave_interrupted_pass(self, name: str) -> None:
        if not (self._world.closed or self._backup_step.forget_pass()):
            raise UsageError(INTERRUPTED.format(what=f"the gradient of {name}"))
        self._phase = Phase.LATE if self._phase is Phase.STALE else Phase.READY

    def _begin_pass(self) -> None:
        if self._phase is Phase.LATE:
            self._phase = Phase.STALE
            return
        self._open(in_pass=True)  # again, as a compiled model calls no hooks
        self._backup_step.begin(self._samples or None)
        self._phase = Phase.RUNNING

    def _finish(self) -> None:
        was, self._phase, self._samples = self._phase, Phase.READY, 0
        if was is Phase.STALE:
            self._backup_step.drop()
            self.last = StepReport(self._backup_step.version, (), 0.0, (), counted=False)
            self._stats, self._phase = self._stats.plus(self.last), Phase.LATE
            self._follow(amid_step=True)
            return
        try:
            self.last, outcome = self._backup_step.finish()
        except CommrtError as error:
            self._final_calls.make(error)
            raise
        self._stats = self._stats.plus(self.last)
        if outcome.counts:
            self._state.keep_buffers()
        elif outcome.is_over:
            self._require(self.last.step + 1, outcome.members)
        else:
            self._phase = Phase.OVER
            self._state.keep(self._backup_step.version)
            if not self._has_warned:
                self._has_warned = True
                _log.warning(ENDED, self._world.rank, self.last.step, self._needed)

    def _require(self, version: int, sources: Collection[int] = ()) -> None:
        """Note that this rank needs `version`, of one of `sources`, by default of any; the next rank is asked first."""
        rank, size = self._world.rank, self._world.size
        others = (*range(rank + 1, size), *range(rank))  # not a process of this rank before this one
        self._phase = Phase.LATE
        self._pending = PendingCatchUp(version, tuple(each for each in others if each in sources) or others)

    def average(self) -> None:
        """Announce the gradients at hand, in place of a backward pass; a rank without a batch may also leave it."""
        if self._is_synchronous:
            self._begin_pass()
            self._finish()

    def _before_collective(self) -> None:
        """Let late ranks have this rank's state until they have come."""
        if self._phase is Phase.OVER:
            self._follow()
        if self._phase not in LATE:
            self._open(in_pass=False)

    def _end(self) -> None:
        """Answer late ranks until no rank trains any more; before the world is closed in good order."""
        self._backup_step.abandon("the world was closed in the middle of a backward pass")
        with suppress(CommrtError, RuntimeError):
            self.drain()
            self._before_collective()
            if make_elastic(self._world).finish():
                WorldConfig.withdraw(self._world.store)

    def join_as_replacement(self) -> None:
        """Take the place of a lost rank, between two collectives of the others; not collective."""
        make_elastic(self._world).join_as_replacement(self._fetch_from_a_pass)
        self._catch_up.open()
        self._require(self.step)  # again before the first step, whatever is loaded until then

    def _fetch_from_a_pass(self) -> bool:
        """Take the state of another rank; True if that rank was in a forward or backward pass."""
        self._require(0)
        self.drain()
        return self._state.is_amid_step

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the step of `state`; collective. A process in a lost rank's place keeps the state of the others."""
        if not self._is_founder and self.last is None:
            _log.info("commrt: rank %d takes its state from the others, not from a checkpoint", self._world.rank)
            return
        self._step_in(state)  # raises before anything has changed
        self._forget()
        super().load_state_dict(state)

    def _forget(self) -> None:
        self._state.shut()
        self._state.forget()
        self._phase = Phase.READY

    def _restart_at_step(self, step: int) -> None:
        self._forget()
        make_elastic(self._world).restart_at_step(step)
        self._backup_step.restart_at_step(step)
        self._state.keep_buffers()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the rest; catches up first, so call it before you save the model."""
        self.drain()
        return super().state_dict()

    def overwrite_with_first(self) -> None:
        """See `Replica`; the lowest rank that is left is the first."""
        super().overwrite_with_first()
        self._state.keep_buffers()

    def sync_buffers(self) -> None:
        """See `overwrite_with_first`."""
        super().sync_buffers()
        self._state.keep_buffers()

    def consolidate(self) -> None:
        """Make all replicas equal at the latest weights; collective.

        It takes weights as they are, also where a loop has changed them outside of the optimizer's steps.
        """
        self._guard.end_step()
        world, model, together = self._world, self.model, self._world.membership.together
        with self._collective("consolidate()"):
            together(lambda: overwrite_buffers(world, model, self.step))
            if not world.all_equal("replicas", fingerprint(model)):
                _log.warning(UNEQUAL, world.rank, world.members[0])
                together(lambda: overwrite_model(world, model, self.step))
        self._state.keep_buffers()

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        """Run the body as the collective `what`, in which late ranks have caught up."""
        with self._world.collective(what):
            own = self._backup_step.version
            versions = self._world.membership.together(lambda: gather_integers(self._world, own))
            latest = max(versions.values())
            if own < latest:
                self._require(latest, [rank for rank, version in versions.items() if version == latest])
                self.drain()
            else:
                self._before_collective()
            try:
                yield
            finally:
                self._state.shut()

    @contextmanager
    def join(self, *also: Stateful) -> Iterator[None]:
        """Make all replicas equal at the end, as `consolidate` does; a rank that has no more data is merely absent."""
        check_stateful(also)
        self._owners_of_state += also
        yield
        self.consolidate()

    def detach(self) -> None:
        """Remove all hooks; the others go on without this rank, if there are enough. Not collective."""
        super().detach()
        self._world.hooks = NO_HOOKS
        self._state.shut()
        self._catch_up.close()
        make_elastic(self._world).end(self)
        self._engine.release()


def reissued(batches: Iterable[T], replica: Replica) -> Iterator[T]:
    """Yield each of `batches` again and again until its gradient counted; where several make a step, all of them.

    For `BackupWorkers`; with other algorithms every batch counts at once. It ends with `batches`. It also ends the
    repetition of a batch when too few ranks train for a step. Keeps the batches of one step in memory.
    """
    step: list[T] = []
    for batch in batches:
        waiting = deque([batch])
        while waiting:
            before = replica.last
            step.append(waiting.popleft())
            yield step[-1]
            if (report := replica.last) is not None and report is not before:
                if not (report.counted or report.ended):
                    waiting.extendleft(reversed(step))
                step = []
