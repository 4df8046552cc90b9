# SPDX-License-Identifier: Apache-2.0
"""Who the ranks of a world are, and what a world asks where a rank may be lost.

`Membership` is of ranks that stay the same, so most of its answers are trivial, and nobody is told
anything. It is the interface, too, of the one in `commrt.elastic`, which goes on without lost
ranks. It also says which errors may mean that one is lost. Nothing here sends, compares values, or
writes to a world.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import Tensor

from commrt.errors import (
    DeadlineExceeded,
    DisagreementError,
    PeerLost,
    ScheduleError,
    TransportClosed,
    TransportError,
    UsageError,
)
from commrt.runtime.generation import Generation, Loss
from commrt.threads.comm_thread import CommThread
from commrt.threads.future import Future

T = TypeVar("T")
RunNow = Callable[[Tensor], object]
"""Overwrites a tensor, on the communication thread."""
Begin = Callable[[], RunNow]
"""Checks on the training thread what this rank alone may refuse; `RunNow` what all refuse alike."""
LOST = (PeerLost, DeadlineExceeded, TransportClosed)
"""Errors that may mean that a rank is lost; all others are of this rank, or of the program."""
REFUSALS = (UsageError, DisagreementError, ScheduleError)
"""Errors of a collective after which the world goes on."""


class Membership:
    """The members of one generation of a world, for as long as it lives: a lost rank ends it.

    What `ElasticMembership` does in place of the methods here:

    - `submit`: also moves to a new generation if the task loses a rank, and raises that loss;
    - `together`, `begin_call`, `collective`: lets the members meet on the store and vote, and does
      the work again among those that are left. `begin_call` works on a copy, and waits;
    - `outwait`, `require_none_behind`: looks meanwhile whether others are in a collective;
    - `recover`: forms the next generation. `any_gone`: asks who is lost. `restart_at_step`: also
      sets the generation that its `Member` shows to others on the store;
    - `depart`, `end_membership`, `wait_for_all_closed`, `close`: tells the others, stays for them,
      and lets go of its connection to the store. Here all of them do nothing.

    Steps (`start_no_earlier`, `submit_step`, `go_on_at_step`, `takes_part`) are counted alike in
    both: they say in which step a generation may start.

    On the communication thread: `takes_part`, `recover`, and `start_no_earlier` while it exchanges.
    On any thread: `submit`, `any_gone`, `depart`, and reading the attributes. On the thread that
    closes the world: `end_membership`, `wait_for_all_closed` and `close`. On the training thread:
    the others.
    """

    is_elastic = False
    """True if a lost rank does not end this world; the same on all ranks."""
    needed = 0
    """So many ranks must be left to go on with backup workers; 0 where all make each step."""

    def __init__(
        self, generation: Generation, comm_thread: CommThread, before: Membership | None = None
    ) -> None:
        self._comm_thread = comm_thread
        # these are set by `_use`; a membership that is elastic calls it anew for each generation,
        # on the communication thread
        self.generation: Generation
        """The one whose connections this rank uses."""
        self.number: int
        """The number of that generation."""
        self.ranks: tuple[int, ...]
        """The members, in ascending order."""
        self.lost: tuple[Loss, ...]
        """The ranks that are missing in it."""
        self._use(generation)
        self.next_step: int = 0 if before is None else before.next_step
        """The first training step in which a new generation can start for this rank.

        Written by `start_no_earlier` only.
        """
        self.history: tuple[str, ...] = () if before is None else before.history
        """What has changed since the start, and in which step; only grows, with each generation."""
        # the first training step whose exchanges were not submitted; the training thread writes
        # it, and `ElasticMembership` reads it
        self._submitted_steps = 0
        self.failures = 0
        """Failures since an exchange was completed, which an elastic membership counts.

        The communication thread writes it, and whoever completes an exchange of training sets it to
        0 there. The training thread sets it to 0 after a collective, with nothing in flight.
        """

    def _use(self, generation: Generation) -> None:
        """Set the attributes of the generation; `restart_at_step` alone writes it, too."""
        self.generation = generation
        self.number = generation.number
        self.ranks = generation.ranks
        self.lost = generation.lost

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` on the communication thread; ``result()`` raises what ended it."""
        return self._comm_thread.submit(task)

    def begin_call(
        self, begin: Begin, tensor: Tensor, residual: Tensor | None, *, at_once: bool
    ) -> Future[Any] | None:
        """Begin what `begin` returns, on `tensor`, and return its future; None if it is done.

        All members do so, in a `collective`. `at_once`: the calling thread does it, unless others
        are on their way. It overwrites `tensor` and the call's `residual`, what earlier roundings
        left; only a membership that may do the call again needs to know of them here.
        """
        run_now = begin()
        comm_thread = self._comm_thread
        return (comm_thread.run if at_once else comm_thread.submit)(lambda: run_now(tensor))

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which all members do, in a `collective`."""
        return work()

    def collective(self, what: str, made: int | None = None) -> AbstractContextManager[None]:
        """Run the body as the collective `what` of all members, after `made` steps."""
        return nullcontext()

    def outwait(self, future: Future[T], made: int) -> T:
        """Return the result of `future`, to which ranks contribute that have made `made` steps."""
        return future.result()

    def require_none_behind(self, made: int) -> None:
        """Raise `DisagreementError` on all ranks if one is in a collective before step `made`."""

    def start_no_earlier(self, step: int) -> None:
        """Let a new generation start in training step `step` or later.

        This rank exchanges in those before. Call it before the first exchange of a step.
        """
        self.next_step = step

    def submit_step(self, step: int) -> None:
        """Note that the exchanges of training step `step` are submitted next.

        A generation that starts in it is too early for this rank.
        """
        self._submitted_steps = step + 1

    def go_on_at_step(self, step: int) -> None:
        """Go on at training step `step`, with nothing in flight; the generation stays."""
        self.start_no_earlier(step)
        self._submitted_steps = step

    def restart_at_step(self, step: int) -> None:
        """Restart at `step` of a checkpoint, which all ranks have loaded; with nothing in flight.

        The members of the `generation` take part from the first step on.
        """
        self.go_on_at_step(step)
        self.generation = self.generation._replace(start=0)

    def takes_part(self, step: int) -> bool:
        """Return True if this rank exchanges in training step `step`."""
        return step >= self.generation.start

    def recover(self, failure: TransportError) -> None:
        """Go on without a lost rank after `failure`, or raise it."""
        raise failure

    def any_gone(self, ranks: Collection[int]) -> bool:
        """Return True if one of `ranks` is lost and the others go on."""
        return False

    def depart(self, why: str, *, finished: bool = False) -> None:
        """Tell the others not to wait for this rank; safe to call twice.

        `finished`: it had nothing more to do, and does not count as lost.
        """

    def end_membership(self, why: str, *, finished: bool = False) -> None:
        """`depart`, and take no part in anything more: this rank goes on alone."""

    def wait_for_all_closed(self) -> None:
        """Stay until all others have ended it too; the process that holds the store calls this."""

    def close(self) -> None:
        """Release the store; call it after `end_membership`."""
