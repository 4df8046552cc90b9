# SPDX-License-Identifier: Apache-2.0
"""A replica with backup workers: it counts if it is among the first, and takes the others' state if it was not."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.algorithms.backup import BackupWorkers
from commrt.errors import CommrtError, UsageError
from commrt.membership.quorum_vote import QuorumVote, VoteSettings
from commrt.membership.world_config import WorldConfig
from commrt.model.admission import check_stateful
from commrt.model.anchor import Hook
from commrt.model.autograd import INTERRUPTED, at_end_of_backward, current_pass, on_dense_gradients
from commrt.model.donor import Donor, Edition, Parts
from commrt.model.gate import Gate
from commrt.model.state import Stateful
from commrt.model.stepping import Stepping
from commrt.replicas.arrears import Arrears
from commrt.replicas.backing import Backing
from commrt.replicas.engine import Cut, Engine
from commrt.replicas.handover import Gathering, of_all
from commrt.replicas.relief import Due, Relief
from commrt.replicas.replica import Replica, attached
from commrt.replicas.report import StepReport
from commrt.runtime.around import Around

__all__ = ["Backed"]

_log = logging.getLogger("commrt")
ENDED = (
    "commrt: rank %d drops its batches from step %d on, until others train again: fewer than the %d ranks whose "
    "gradients make a step do, since the others do something together or have finished"
)
UNEQUAL = (
    "commrt: rank %d: weights or buffers differed between ranks that had done the same steps, so all take those of "
    "rank %d; a loop or a forward pass changed them outside of steps (docs/backup_workers.md)"
)


def _nothing() -> None:
    """Who has no gradient takes no part."""


class Backed(Replica):
    """Its gradients are the mean of the quorum's when ``backward()`` returns, or zeros, and then the next step is none.

    What a rank that was late has to become is fetched before its next forward pass. So what all ranks do between a
    backward pass and the next forward pass, with schedulers for instance, it may do or leave.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        also: Sequence[Stateful],
        algorithm: BackupWorkers,
        engine: Engine,
        cut: Cut,
        *,
        broadcast_buffers: bool,
    ) -> None:
        named = [named for bucket in engine.buckets for named in bucket.params]
        self._world, self._needed = engine.world, algorithm.needed(engine.world.size)
        super().__init__(model, named, algorithm, Gathering(self._world))
        self._engine, self._carried = engine, [*optimizers, *also]
        self._passing: int | None = None  # a backward pass that has not ended
        self._is_stale = False  # it began with weights that the others have left
        self._samples: int | None = 0
        self._has_told = False
        self._is_successor = False  # and has not begun its first step
        self._has_run_behind = False  # forward, with weights that the others have left
        params = [param for _, param in named]
        self._gate = Gate(optimizers, params, _nothing, self._refuse, self._require_sound)
        self._backing = Backing(
            model, engine, self._gate, cut, self._needed, early=algorithm.early, with_buffers=broadcast_buffers
        )
        self._donor = Donor(Parts.of(model, params), lambda: self._carried)
        self._arrears = Arrears(self._carried, self._donor, self._backing, self._world)
        self._stepping = Stepping(optimizers, self._gate, self._donor.shut, self._donor.settle)
        self._meet_the_others(PrefixStore(f"backed {self._world.attached}", self._world.store))
        gradients = on_dense_gradients(self, self._params, Backed._on_gradient)
        self._live([*self._on_model(), *gradients, *self._stepping.register()])

    def _meet_the_others(self, shelf: PrefixStore) -> None:
        world = self._world
        self._shelf = shelf
        self._others = (*range(world.rank + 1, world.size), *range(world.rank))  # in the order in which to ask them
        founds = world.config is None
        world.elastic.begin(self, world.attached, alone=True, needed=self._needed, founds=founds)
        self._relief = Relief(world, shelf, self._donor)
        self._begin_era(1)
        if founds:
            self._relief.open()
        world.around = Around(self._show, self._end, self._leave, self._last_words.speak_of)

    def _begin_era(self, era: int) -> None:
        """Number steps anew: those after a checkpoint was loaded may have numbers that were used before."""
        world, elastic = self._world, self._world.elastic
        if era > 1:
            self._backing.ballot.close()
        self._era = era
        terms = VoteSettings(
            world.rank, world.size, self._needed, lambda: world.timeout_s,
            elastic.require_open, lambda: elastic.is_called, elastic.membership,
        )  # fmt: skip
        self._backing.ballot = QuorumVote(PrefixStore(f"era {era}", self._shelf), terms)

    @property
    def step(self) -> int:
        """How many updates the weights have seen, or must have when they next run forward; who was late skips some."""
        return self._arrears.version

    def drain(self) -> None:
        """See `Replica.drain`: takes the state of the others, if this rank was late. Not collective.

        What a loop does at the end of a step, with schedulers for instance, must be done before. A rank whose batches
        ended before the others' has the weights that it trained last: `consolidate` brings all to the latest.
        """
        self._drain()

    def _drain(self, *, in_pass: bool = False, amid_step: bool = False) -> None:
        self._arrears.restore(in_pass=in_pass)
        if self._arrears.due is not None and (in_pass or amid_step or not self._has_run_behind):
            with self._last_words.around():
                if in_pass or amid_step or self._is_successor or self._donor.is_intact:
                    self._catch_up(self._arrears.due, in_pass=in_pass, amid_step=amid_step)
                else:  # what the loop puts back would undo it
                    self._arrears.remain()

    def _go_on_at(self, step: int) -> None:
        self._donor.shut()
        self._arrears.forget()
        self._world.elastic.go_on_at(step)
        self._gate.steps = 0
        self._backing.go_on_at(step)
        self._donor.settle()
        self._begin_era(self._era + 1)

    def _on_model(self) -> Iterator[RemovableHandle]:
        weakly = ref(self)

        def before_forward(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            replica = weakly()
            if replica is not None:
                replica._begin_forward([*given, *named.values()])  # noqa: SLF001  # its own

        yield self.model.register_forward_pre_hook(Hook(before_forward), with_kwargs=True)
        yield self.model.register_forward_hook(Hook(self._donor.settle_again))

    def _begin_forward(self, given: Sequence[object]) -> None:
        if self.model.training and torch.is_grad_enabled():
            self._begin()
            self._has_run_behind = self._arrears.due is not None
            self._is_successor = False
            first = next((each for each in given if isinstance(each, Tensor) and each.dim()), None)
            self._samples = None if first is None or self._samples is None else self._samples + len(first)

    def _begin(self) -> None:
        """From here to the optimizer's step this rank's state is whole, and stays."""
        self._drain(in_pass=True)
        if self._arrears.due is None:
            self._arrears.renew()
            if not self._gate.is_due:
                self._open()

    def _open(self, *, in_pass: bool = True, is_whole: bool = True) -> None:
        backing = self._backing
        if in_pass and self._donor.is_new(backing.version):
            backing.keep_buffers()  # as the loop left them
        edition = Edition(backing.version, self._gate.steps, backing.order, self._era, in_pass)
        self._donor.open(edition, backing.buffers, is_whole=is_whole)

    def _on_gradient(self, name: str) -> None:
        if not self._is_synchronous:
            self._gate.hold_back()
            return
        if self._is_new(f"the gradient of {name}"):
            self._begin_pass(current_pass())
            at_end_of_backward(self._finish)
        if not self._is_stale:
            self._backing.mark(name)

    def _is_new(self, what: str) -> bool:
        if self._passing is not None and self._passing != current_pass() and not self._world.closed:
            if not self._backing.forget_pass():
                raise UsageError(INTERRUPTED.format(what=what))
            self._passing = None
        return self._passing is None or self._passing != current_pass()

    def _begin_pass(self, number: int) -> None:
        self._is_successor = False
        self._passing, self._is_stale = number, self._arrears.due is not None
        if not self._is_stale:  # a compiled model, or one that is taken apart, has called no hooks
            self._arrears.renew()
            self._open()
            self._backing.begin(self._samples or None)

    def _finish(self) -> None:
        self._passing, self._samples, self._has_run_behind = None, 0, False
        if self._is_stale:
            self._backing.drop()
            self.last = StepReport(self._backing.version, (), 0.0, (), counted=False)
            self._stats = self._stats.plus(self.last)
            self._drain(amid_step=True)
            return
        with self._last_words.around():
            self.last, outcome = self._backing.finish()
        self._stats = self._stats.plus(self.last)
        self._tell_once(self.last)
        self._stepping.renew(outcome.counts)
        if outcome.is_over and not outcome.counts:
            known = [rank for rank in outcome.members if rank != self._world.rank]  # it may have another's place
            self._arrears.owe(self.last.step + 1, known or self._others, max(outcome.place - self._needed, 0))
        elif not outcome.counts:
            self._arrears.keep()

    def _tell_once(self, report: StepReport) -> None:
        if report.ended and not self._has_told:
            _log.warning(ENDED, self._world.rank, report.step, self._needed)
        self._has_told = report.ended

    def _catch_up(self, due: Due, *, in_pass: bool, amid_step: bool) -> None:
        """Become what one of the donors is, if they are what they were; `amid_step`, the loop has yet to end a step."""
        gift, backing = self._relief.fetch(due), self._backing
        if gift is None:
            self._arrears.remain()
            return
        self._donor.become(gift, self.model, in_pass=in_pass)
        edition, backing.buffers = gift.edition, gift.buffers
        backing.version, self._gate.steps = edition.version, edition.optimizer_steps
        backing.follow(edition.order)
        if edition.era != self._era:
            self._begin_era(edition.era)
        self._arrears.due, self._arrears.taken = None, gift.states if edition.in_pass or amid_step else None

    def _require_sound(self) -> None:
        if failure := self._world.untold:
            raise failure

    def _refuse(self, stranger: Tensor) -> None:
        if not attached([stranger])[0]:
            raise UsageError(
                f"the optimizer steps a parameter of shape {list(stranger.shape)} which was frozen, absent or outside "
                "of the model when it was attached: nobody averages its gradient; detach() and attach() again"
            )

    def average(self) -> None:
        """See `Replica.average`: announces the gradients at hand; a rank without a batch may as well be absent."""
        if self._is_synchronous:
            self._begin_pass(current_pass())
            self._finish()

    def _show(self) -> None:
        """Between steps: catch up, and let late ranks have this rank's state. Before each collective."""
        with self._last_words.around():
            self.drain()
            if self._arrears.due is None:
                self._arrears.renew()
                self._open(in_pass=False, is_whole=not self._gate.is_due)

    def _end(self) -> None:
        """Before the world is closed in good order: serve late ranks until nobody trains any more."""
        self._backing.abandon("the world was closed in the middle of a backward pass")
        self._has_run_behind = False
        with suppress(CommrtError, RuntimeError):
            self._show()
            if self._world.elastic.finish():
                WorldConfig.withdraw(self._world.store)

    def _leave(self) -> None:
        self._relief.close()
        self._backing.ballot.close()

    def succeed(self) -> None:
        """Take the place of a rank that is lost, between two collectives of the others; not collective."""
        self._world.elastic.take_place(self._fetch_amid_step)
        self._relief.open()
        # Once more before the first step, whatever is loaded until then.
        self._arrears.due, self._is_successor = Due(self.step, self._others), True

    def _fetch_amid_step(self) -> bool:
        """Take the state of another rank; True if that one was in a forward or backward pass."""
        self._arrears.due = Due(0, self._others)
        self.drain()
        return self._arrears.taken is not None

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """See `Replica.load_state_dict`; who takes the place of a rank that is gone gets all from the others."""
        if self._is_successor:
            _log.info("commrt: rank %d takes its state from the others, not from a checkpoint", self._world.rank)
        else:
            self._step_in(state)  # raises before anything has changed
            self._donor.shut()
            self._arrears.forget()
            super().load_state_dict(state)

    def state_dict(self) -> dict[str, int | str]:
        """See `Replica.state_dict`; takes the others' state first, if this rank was late: call it before you save."""
        self._has_run_behind = False  # the batch of that pass was skipped
        self.drain()
        if self._arrears.due is not None:
            raise UsageError("this rank was late, and the others have changed their weights since: consolidate() first")
        return super().state_dict()

    def overwrite_with_first(self) -> None:
        """See `Replica.overwrite_with_first`."""
        super().overwrite_with_first()
        self._donor.settle(with_rest=self._backing.version == 0)
        self._backing.keep_buffers()

    def sync_buffers(self) -> None:
        """See `Replica.sync_buffers`."""
        super().sync_buffers()
        self._backing.keep_buffers()

    def consolidate(self) -> None:
        """See `Replica.consolidate`: all take the state of those that have seen most updates; collective.

        Weights are taken as they are, also where a loop has changed them outside of its optimizer's steps.
        """
        self._stepping.end_step()
        self._has_run_behind = False
        self._arrears.restore(in_pass=False)
        self._arrears.accept()
        with self._world.gathered("consolidate()"):
            versions = self._world.elastic.together(lambda: of_all(self._lane, self._backing.version))
            latest = max(versions.values())
            if self._backing.version < latest:
                self._arrears.owe(latest, [rank for rank, version in versions.items() if version == latest], 0)
                self._show()
            self.sync_buffers()
            if not super().replicas_equal():
                _log.warning(UNEQUAL, self._world.rank, self._world.members[0])
                self.overwrite_with_first()

    @contextmanager
    def join(self, *also: Stateful) -> Iterator[None]:
        """See `Replica.join`: a rank that has finished counts as absent anyway; at the end all are made equal."""
        check_stateful(also)
        self._carried += also
        yield
        self.consolidate()

    def detach(self) -> None:
        """See `Replica.detach`; the others go on without this rank, if there are enough."""
        self.withdraw()

    def withdraw(self) -> None:
        """Let go of the model without a word: to the others it is as if this process were gone."""
        super().detach()
        self._world.around = Around()
        self._donor.shut()
        self._relief.close()
        self._backing.ballot.close()
        self._world.elastic.end(self)
        self._engine.release()
