# SPDX-License-Identifier: Apache-2.0
"""Train with backup workers: a rank counts if its gradient is among the first, or it catches up.

On the training thread. Hooks of gradients, and `_finish` at the end of a pass, run on the thread of
the backward pass, for which that one waits. This says when: `backup_step` makes a step,
`replica_state` gives the state to late ranks, `catch_up` takes that of others. `attach` refuses
what cannot train so. A version of the weights is the number of updates in them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore
from torch.optim import Optimizer

from commrt.algorithms.arguments import schedule_of
from commrt.backup_workers.backup_exchange import BackupExchange
from commrt.backup_workers.backup_step import BackupStep
from commrt.backup_workers.catch_up import CatchUp
from commrt.backup_workers.final_calls import FinalCalls
from commrt.backup_workers.policy import BackupWorkers
from commrt.backup_workers.replica_state import ReplicaState
from commrt.backup_workers.skipping_guard import SkippingGuard
from commrt.backup_workers.standing import Standing
from commrt.buckets.engine import Engine
from commrt.elastic.elastic_membership import end_survival, survive_losses
from commrt.errors import CommrtError, UsageError
from commrt.runtime.model_hooks import NO_HOOKS, Hooks
from commrt.store.keys import store_of_model
from commrt.store.world_config import WorldConfig
from commrt.training import synchronous
from commrt.training.admission import letting_in
from commrt.training.backward_pass import INTERRUPTED, at_end_of_backward, current_pass
from commrt.training.gathering import gather_integers
from commrt.training.gradient_hooks import on_dense_gradients
from commrt.training.optimizer_steps import attached_to
from commrt.training.replica import Replica
from commrt.training.request import Request
from commrt.training.stateful import Stateful, check_stateful, dump, load
from commrt.training.step_report import StepReport
from commrt.training.tensor_bytes import digest, fingerprint
from commrt.training.uncopied import ModuleHook

_log = logging.getLogger("commrt")
ENDED = (
    "commrt: rank %d drops its gradient of step %d: fewer than %d ranks train. The others are in a"
    " collective or have finished. This is logged once"
)
UNEQUAL = (
    "commrt: rank %d: weights or buffers differed between ranks that had applied the same updates;"
    " all ranks take those of rank %d. The loop or a forward pass changed them outside of steps"
    " (docs/algorithms/backup_workers.md)"
)


class Phase(Enum):
    """Where a replica stands in its step."""

    READY = auto()
    """Its weights are the latest that it knows, or become that in the optimizers' step."""
    RUNNING = auto()
    """It is in a backward pass."""
    LATE = auto()
    """The gradients of others counted: it needs the state of one of them before its next forward
    pass.
    """
    STALE = auto()
    """It is late, and in a backward pass that used older weights, as the model's hooks were not
    called.
    """
    ENDED = auto()
    """Too few ranks train: what the loop does from here to the next pass is undone."""


NEEDS_STATE = (Phase.LATE, Phase.STALE)
IN_PASS = (Phase.RUNNING, Phase.STALE)


class BackupWorkersReplica(Replica):
    """Train one replica; its gradients are the mean of the first N ranks' when ``backward()``
    returns.

    Or they are zeros, if this rank was late: then the optimizer's step changes nothing. A late rank
    fetches the state of a rank that counted before its next forward pass. So between a backward
    pass and the next forward pass its loop may do what the other ranks do, such as stepping a
    scheduler, or leave it.

    Written here of others: the world's `membership` and `hooks`, and the guard's `held_back`. Late
    ranks take the model and all of `_owners_of_state`, a list that `_state` reads too.

    Of its parent it replaces what users call, and `_collective`, `_take_from_first` and
    `_restart_at_step`, which collective methods there call; it writes `last`, `_stats` and
    `_dropped`. `_end` is called by the thread that closes the world (`Hooks`).
    """

    drops_gradients = True

    def __init__(self, request: Request, engine: Engine) -> None:
        world = request.world
        named = [named for bucket in engine.buckets for named in bucket.params]
        super().__init__(request, named)
        self._engine = engine
        self._owners_of_state = [*request.optimizers, *request.also, request.copies]
        self._final_calls = FinalCalls()
        self._phase = Phase.READY
        self._pass_number = -1  # of the latest pass with a step, as autograd counts
        # the version that it needs while it is late, and whom to ask for it, in this order
        self._wanted = 0
        self._sources = [world.rank]
        # inputs of the forward passes since the latest step; None if one cannot say
        self._samples: int | None = 0
        self._has_warned = False  # of batches that were dropped because the others had stopped
        params = [param for _, param in named]
        self._state = ReplicaState(request.model, params, self._owners_of_state)
        self._guard = SkippingGuard(request.optimizers, params, self._state.shut, request.scales)
        self._is_founder = world.config is None
        needed = partial(
            cast("BackupWorkers", request.algorithm).needed_among, founders=world.founders
        )
        self._number = request.number
        # the world's membership from here on, which the rest uses
        self._membership = survive_losses(
            world, self._number, needed=needed, founds=self._is_founder
        )
        store = PrefixStore("backed", store_of_model(world.store, self._number))
        self._standing = Standing(self._guard, self._riding)
        self._exchange = BackupExchange(request, self._membership, engine, self._standing, store)
        self._backup_step = BackupStep(
            request,
            self._membership,
            engine,
            self._guard,
            self._standing,
            self._exchange,
            self._riding,
        )
        self._catch_up = CatchUp(world, self._membership, store, self._state, self._riding)
        if self._is_founder:
            self._catch_up.open()
        world.hooks = Hooks(
            self._before_collective,
            self._state.shut,
            self._end,
            self._catch_up.close,
            self._final_calls.make,
        )
        handles = [
            self.model.register_forward_pre_hook(
                ModuleHook(self._before_forward), with_kwargs=True
            ),
            self.model.register_forward_hook(ModuleHook(self._state.after_forward)),
            *on_dense_gradients(self, self._params, BackupWorkersReplica._on_gradient),
        ]
        self._live(handles, self._guard.before_step, self._after_step)

    def _after_step(self, optimizer: Optimizer) -> None:
        self._guard.after_step(optimizer)
        self._copies.after_step(optimizer)

    @property
    def step(self) -> int:
        """The number of updates in the weights, or that they will have in the next forward pass of
        a late rank.
        """
        return self._wanted if self._phase in NEEDS_STATE else self._standing.version

    def before_giving_up(self, call: Callable[[], object]) -> None:
        """See `Replica.before_giving_up`."""
        super().before_giving_up(call)
        self._final_calls.append(call)

    def drain(self) -> None:
        """Catch up, if this rank was late; call it at the end of a step, not collective.

        Before, do what your loop does at the end of a step, such as stepping a scheduler. A rank
        whose data ended before the others' has the weights that it trained last; `consolidate`
        brings all to the latest.
        """
        if self._phase is Phase.ENDED:
            self._state.undo()
            self._phase = Phase.READY
        elif self._phase in NEEDS_STATE:
            amid_step = self._phase is Phase.STALE
            self._phase = Phase.LATE
            try:
                transfer = self._catch_up.fetch(self._wanted, self._sources)
            except CommrtError as error:
                self._final_calls.make(error)
                raise
            self._state.install(transfer, amid_step=amid_step)
            self._standing.follow(transfer.snapshot)
            self._exchange.use_standing()
            self._wanted = transfer.snapshot.version
            self._phase = Phase.LATE if transfer.snapshot.is_due else Phase.READY

    def _before_forward(
        self, _: nn.Module, given: tuple[object, ...], named: Mapping[str, object]
    ) -> None:
        if not (self.model.training and torch.is_grad_enabled()):
            return
        if self._phase in (Phase.LATE, Phase.ENDED):
            self.drain()
        if self._phase not in NEEDS_STATE and not self._guard.is_due:
            self._state.open(self._standing.snapshot(in_pass=True))
        for each in (*given, *named.values()):
            if isinstance(each, Tensor) and each.dim():
                self._samples = None if self._samples is None else self._samples + len(each)
                break
        else:
            self._samples = None

    def _on_gradient(self, name: str) -> None:
        number = current_pass()
        if not self._is_synchronous:
            self._guard.held_back = True
            self._weights.count_pass(number)
            return
        if self._phase not in IN_PASS or self._pass_number != number:
            if self._phase in IN_PASS:  # an error ended the pass before
                if not (self._world.closed or self._backup_step.forget_pass()):
                    raise UsageError(INTERRUPTED.format(what=f"the gradient of {name}"))
                self._phase = Phase.LATE if self._phase is Phase.STALE else Phase.READY
            if not self._weights.is_idle:
                self._weights.count_pass(number)  # or refuse it, before the step begins
            self._pass_number = number
            self._begin_pass(number)
            at_end_of_backward(self._finish)
        if self._phase is Phase.RUNNING:
            self._backup_step.mark(name)

    def _begin_pass(self, number: int | None) -> None:
        if self._phase is Phase.LATE:
            self._phase = Phase.STALE
            return
        # again, as a compiled model calls no hooks
        self._state.open(self._standing.snapshot(in_pass=True))
        self._parameters.require_unchanged()
        self._backup_step.begin(self._samples or None, number)
        self._phase = Phase.RUNNING

    def _finish(self) -> None:
        self._samples = 0
        if self._phase is Phase.STALE:
            self._backup_step.drop()
            self.last = StepReport(
                self._standing.version, members=(), exposed_s=0.0, spans=(), counted=False
            )
            self._stats = self._stats.plus(self.last)
            self.drain()
            return
        self._phase = Phase.READY
        try:
            self.last, outcome = self._backup_step.finish()
        except CommrtError as error:
            self._final_calls.make(error)
            raise
        self._stats = self._stats.plus(self.last)
        if self.last.dropped:
            self._dropped.update(self.last.dropped)
        if outcome.counts:
            self._state.keep_buffers()
        elif outcome.is_over:
            self._need(self.last.step + 1, outcome.members)
        else:
            self._phase = Phase.ENDED
            self._state.keep(self._standing.snapshot(in_pass=False))
            if not self._has_warned:
                self._has_warned = True
                _log.warning(ENDED, self._world.rank, self.last.step, self._world.membership.needed)

    def _need(self, version: int, sources: Collection[int] = ()) -> None:
        """Note that this rank needs `version`, of one of `sources`, by default of any.

        Ranks that are late together ask different sources first: the k-th late rank begins with the
        k-th source.
        """
        rank = self._world.rank
        # a process that had this rank's place before may be among them, and is gone
        others = [each for each in range(self._world.size) if each != rank]
        found = [each for each in others if each in sources] or others
        turn = len({*range(rank)}.difference(sources)) % len(found)
        self._phase = Phase.LATE
        self._wanted = version
        self._sources = [*found[turn:], *found[:turn]]

    def average(self) -> None:
        """Announce the gradients at hand, in place of a backward pass; a rank without a batch may
        also leave it.
        """
        if self._is_synchronous:
            self._weights.forget_thrown_away()
            self._begin_pass(None)
            self._finish()

    def _before_collective(self) -> None:
        """Let late ranks have this rank's state until they have come."""
        if self._phase is Phase.ENDED:
            self.drain()
        if self._phase not in NEEDS_STATE:
            self._state.open(self._standing.snapshot(in_pass=False))

    def _end(self) -> None:
        """Answer late ranks until no rank trains any more; before the world is closed in good
        order.
        """
        self._backup_step.abandon()
        with suppress(CommrtError, RuntimeError):
            self.drain()
            self._before_collective()
            if self._membership.finish():
                WorldConfig.withdraw(self._world.store)

    def come(self) -> BackupWorkersReplica:
        """Take the place of a lost rank, between two collectives of the others, or detach; not
        collective.
        """
        with letting_in(self, self._world, self._membership):
            self._membership.join_as_replacement(self._fetch_from_a_pass)
            self._catch_up.open()
            self._need(self.step)  # again before the first step, whatever is loaded until then
        return self

    def _fetch_from_a_pass(self) -> bool:
        """Take the state of another rank; True if that rank was in a forward or backward pass."""
        self._need(0)
        self.drain()
        return self._state.again is not None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the step of `state`; collective.

        A process in a lost rank's place keeps the state of the others.
        """
        if not self._is_founder and self.last is None:
            _log.info(
                "commrt: rank %d takes its state from the others, not from a checkpoint",
                self._world.rank,
            )
            return
        self._step_in(state)  # raises before anything has changed
        self._state.forget()
        self._phase = Phase.READY
        super().load_state_dict(state)

    def _restart_at_step(self, step: int) -> None:
        self._membership.restart_at_step(step)
        self._standing.restart_at_step(step)
        self._exchange.use_standing()
        self._state.keep_buffers()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the rest; catches up first, so call it before you
        save the model.
        """
        self.drain()
        return super().state_dict()

    def _take_from_first(self, *, buffers_only: bool = False) -> None:
        """See `Replica`; the lowest rank that is left is the first."""
        super()._take_from_first(buffers_only=buffers_only)
        self._state.keep_buffers()

    def consolidate(self) -> None:
        """Make all replicas equal at the latest weights; collective.

        It takes weights as they are, also where a loop has changed them outside of the optimizer's
        steps.
        """
        self._guard.end_step()
        with self._collective("consolidate()"):
            self._take_from_first(buffers_only=True)
            if not self._world.all_equal("replicas", fingerprint(self.model)):
                _log.warning(UNEQUAL, self._world.rank, self._world.members[0])
                self._take_from_first()

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        """Run the body as the collective `what`, in which late ranks have caught up."""
        with self._world.collective(what):
            own = self._standing.version
            versions = self._world.membership.together(
                lambda: gather_integers(self._world, own, own)
            )
            latest = max(versions.values())
            if own < latest:
                self._need(
                    latest, [rank for rank, version in versions.items() if version == latest]
                )
                self.drain()
            else:
                self._before_collective()
            try:
                yield
            finally:
                self._state.shut()

    @contextmanager
    def join(self, *also: Stateful) -> Iterator[None]:
        """Make all replicas equal at the end, as `consolidate` does; a rank that has no more data
        is merely absent.
        """
        check_stateful(also)
        self._owners_of_state += also
        yield
        self.consolidate()

    def detach(self) -> None:
        """Remove all hooks; the others go on without this rank, if there are enough.

        Not collective.
        """
        super().detach()
        self._world.hooks = NO_HOOKS
        self._state.shut()
        self._catch_up.close()
        end_survival(self._world, self._number)
        self._engine.release()


def attach(request: Request) -> Replica:
    """Return a replica whose gradient counts if it is among the first.

    Collective, but for a replacement.
    """
    world = request.world
    algorithm = cast("BackupWorkers", request.algorithm)
    needed = algorithm.needed(world.founders)
    if world.size == 1:
        return synchronous.attach(replace(request, algorithm=algorithm.inner))
    _check_for_backups(request)
    for count in range(needed, algorithm.needed_among(world.size, world.founders) + 1):
        schedule_of(algorithm.inner, 0, count)  # raises where it cannot be made for so many
    engine = Engine(world, algorithm.inner, request.build_buckets(request.params[::-1]))
    return request.open(
        engine.schedule(0, needed),
        engine.buckets,
        partial(BackupWorkersReplica, request, engine),
        flags={"broadcast_buffers": request.broadcast_buffers},
        come=BackupWorkersReplica.come,
        unsent=partial(_frozen, request.model),
    )


def _check_for_backups(request: Request) -> None:
    owners = [*request.optimizers, *request.also]
    load(dump(owners), owners)  # raises for a state that other ranks could not load
    # this rank takes another's place, with the first model, or is refused
    if request.world.config is not None:
        return
    if request.world.reconnect_options is None:
        raise UsageError(
            "BackupWorkers needs ranks that can connect again: use commrt.init(), or run_ranks()"
            " without connect="
        )
    own = f"more on rank {request.world.rank}" if attached_to(request.world) else "0"
    if not request.world.all_equal("other models", own) or own != "0":
        raise UsageError(
            "another model is attached to this world, and with BackupWorkers ranks do different"
            " numbers of steps: attach them as one, in an nn.ModuleList, or detach() the other"
        )


def _frozen(model: nn.Module) -> dict[str, str]:
    """Return a claim about the frozen parameters, which ranks do not send each other later, as they
    do not change.
    """
    return {
        "frozen parameters": digest(
            named for named in model.named_parameters() if not named[1].requires_grad
        )
    }
