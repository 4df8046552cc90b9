# SPDX-License-Identifier: Apache-2.0
"""The ranks of a world, what it asks of an attached model, and checks that ranks make the same
calls.

Here the ranks stay the same; `commrt.elastic` has a membership that goes on without lost ranks.

Calls are compared before any data is sent: a mismatch that is noticed later is a hang. A call of
`World.run` is compared through the transport, by its *ranks* only: the ranks that send or receive
in its schedule. So a dead rank is noticed at once, and other ranks need not come. What all ranks
agree on (`World.agree`) is compared in the same way by all members.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Event
from typing import Any, NamedTuple, TypeVar

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
from commrt.threads.comm_thread import CommThread
from commrt.threads.future import Future

T = TypeVar("T")
RunNow = Callable[[Tensor], object]
"""Overwrites a tensor, on the communication thread."""
Begin = Callable[[], RunNow]
"""Checks on the training thread what concerns this rank alone.

What all ranks refuse alike is for the other thread.
"""
LOST = (PeerLost, DeadlineExceeded, TransportClosed)
"""Errors that may mean that a rank is lost. All others are errors of this rank, or of the program.
"""
REFUSALS = (UsageError, DisagreementError, ScheduleError)
"""Errors of a collective after which the world goes on."""


@dataclass(slots=True)
class Hooks:
    """Functions of the attached model that its world calls, on the training thread.

    By default they do nothing.
    """

    before_collective: Callable[[], None] = lambda: None
    when_all_came: Callable[[], None] = lambda: None
    """To a collective, before its work begins."""
    before_close: Callable[[], None] = lambda: None
    """Only if the world has not failed."""
    before_leave: Callable[[], None] = lambda: None
    """Later in `World.close`: no task runs any more, and the other ranks still count on this
    process.
    """
    on_collective_error: Callable[[BaseException], None] = lambda _: None


NO_HOOKS = Hooks()


class Loss(NamedTuple):
    """A rank that is not a member any more."""

    rank: int
    step: int
    """The one in which the others noticed; with backup workers they may have gone on without it
    long before.
    """
    why: str
    finished: bool = False
    """It closed its world in good order."""
    by: int | None = None
    """The rank that proposed to go on without it."""

    def __str__(self) -> str:
        return f"rank {self.rank} is lost, as the others noticed in step {self.step}: {self.why}"


class Membership:
    """All ranks of a world, for as long as it lives: a lost rank ends it."""

    is_elastic = False
    """True if a lost rank does not end this world; the same on all ranks."""
    needed = 0
    """So many ranks make a step of backup workers; 0 without them."""
    number = 0
    """Of the generation whose connections this rank uses."""
    lost: tuple[Loss, ...] = ()
    memory_epoch = 0
    """Grows when memory that was sent from must be left alone: a broken peer may still read it."""

    def __init__(self, ranks: Collection[int], comm_thread: CommThread) -> None:
        self._all = tuple(ranks)
        self._comm_thread = comm_thread
        self.next_step = 0
        """The first training step in which a new generation can start for this rank; written by
        `start_no_earlier` only.
        """

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, in ascending order."""
        return self._all

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` on the communication thread; ``result()`` raises what ended it."""
        return self._comm_thread.submit(task)

    def begin_call(
        self, begin: Begin, tensor: Tensor, residual: Tensor | None, *, at_once: bool
    ) -> Future[Any] | None:
        """Let what `begin` returns overwrite `tensor`, and `residual` too; return None if that is
        done.

        All members do so, on the training thread, in a `collective`. If possible that thread does
        it `at_once`.
        """
        run_now = begin()
        comm_thread = self._comm_thread
        return (comm_thread.run if at_once else comm_thread.submit)(lambda: run_now(tensor))

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which all members do.

        On the training thread, in a `collective`.
        """
        return work()

    def collective(self, what: str) -> AbstractContextManager[None]:
        """Run the body as the collective `what` of all members. On the training thread."""
        return nullcontext()

    def start_no_earlier(self, step: int) -> None:
        """Let a new generation start in training step `step` or later, as this rank exchanges in
        those before.

        On the communication thread, before the first exchange of a step.
        """
        self.next_step = step

    def takes_part(self, step: int) -> bool:
        """Return True if this rank exchanges in training step `step`."""
        return True

    def recover(self, failure: TransportError) -> None:
        """Go on without a lost rank after `failure`, or raise it. On the communication thread."""
        raise failure

    def any_gone(self, ranks: Collection[int]) -> bool:
        """Return True if one of `ranks` is lost and the others go on. On the training thread."""
        return False

    def depart(self, why: str, *, finished: bool = False) -> None:
        """Tell the others not to wait for this rank; from any thread, and safe to call twice."""

    def end_membership(self, why: str, *, finished: bool = False) -> None:
        """Tell the others that this rank goes on without them, because of `why`.

        On the training thread.
        """

    def wait_for_all_closed(self) -> None:
        """Stay until all others have ended the membership too; the process that holds the store
        calls it.
        """

    def close(self) -> None:
        """Release the store; call it after `end_membership`."""


def count_kept(count: Callable[[], int]) -> int:
    """Return ``count()`` of models, without those that only wait to be collected: a model and its
    hooks are a cycle.
    """
    for pause_s in (0.0, 0.01, 0.1):
        if count():
            Event().wait(pause_s)  # while another thread collects, this one would not
            gc.collect()
    return count()
