# SPDX-License-Identifier: Apache-2.0
"""How a world ends, and in which order: by `close`, by an error, or with its process.

It reports to the other ranks through the store, then ends the transport, on whichever thread finds
the error. Nothing here is collective. As it is imported it asks Python to say when the process
begins to end (`_process_ends`).
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Literal, Protocol

from torch.distributed import HashStore, Store

from commrt.errors import CommrtError, Evicted, TransportClosed, TransportError
from commrt.runtime.connection import ReconnectOptions
from commrt.runtime.membership import Membership
from commrt.runtime.model_hooks import NO_HOOKS, Hooks
from commrt.runtime.untraced import untraced
from commrt.runtime.whereabouts import Trained
from commrt.store.reports import Call, diagnose, leave_report, note_closed, wait_for_readers
from commrt.threads.comm_thread import EXIT_S, CommThread
from commrt.transport.by_device import TransportByDevice

UNFINISHED = "its process ended, and no world.close() before that had said that its data has ended"
ENDED = (
    "the process ended without closing its world: after an error of its own, or as it ran out of"
    " data, for which there is replica.join()"
)
# not empty once Python has begun to end the process, before handlers of atexit: it adds to it
_process_ends: list[bool] = []
threading._register_atexit(partial(_process_ends.append, True))  # type: ignore[attr-defined]  # noqa: SLF001  # nothing else is called before those


class EndingWorld(Protocol):
    """What `Ending` uses of a world; it overwrites `hooks`, `reconnect_options` and `store`."""

    rank: int
    holds_store: bool
    transport: TransportByDevice
    comm_thread: CommThread
    membership: Membership
    hooks: Hooks
    reconnect_options: ReconnectOptions | None
    store: Store
    trained: Callable[[], Trained | None]

    def whereabouts(self, failure: BaseException) -> Call:
        """Return in which call this rank was that `failure` ended."""


@untraced
class Ending:
    """Ends one `world`; `close` lets it `release` the memory of its programs, when no task runs.

    ::

        open --- a task raised, or abort() ------------> failed ------ close() ---> closed
          | `--- later, an exchange on a GPU ended ---> failed late --- close() ------^
          `----- close() ------------------------------------------------------------'
        any of these, in a forked child: left to the parent, for good

    "Failed" is ``comm_thread.failure``, which stays; a world that failed late can still fail. Any
    thread may read the state. `close` is for every thread but the communication thread, `abort` for
    any thread and signal handler; `on_failure` runs on the thread of the task, or on the one that
    watches it, `on_late_failure` on the one that watches a GPU, and `end_with_process` on the one
    that ends the process.
    """

    def __init__(self, world: EndingWorld, release: Callable[[], None]) -> None:
        self._world = world
        self._release = release
        # written by `close_during` and, in a forked child, by `leave_to_parent`
        self._state: Literal["open", "closed", "left to the parent"] = "open"
        self.late_failure: TransportError | None = None
        """The latest error that ended an exchange on a GPU, written by `on_late_failure` only."""

    @property
    def has_begun(self) -> bool:
        """True in all states but "open"."""
        failed = self._world.comm_thread.failure or self.late_failure
        return self._state != "open" or bool(failed)

    @property
    def unraised_failure(self) -> TransportError | None:
        """The error of a world in the state "failed late", which no call has raised; or None."""
        is_told = self._state != "open" or self._world.comm_thread.failure
        return None if is_told else self.late_failure

    def raise_late_failure(self) -> None:
        """Raise `unraised_failure` if there is one."""
        if (failure := self.unraised_failure) is not None:
            raise failure

    def on_failure(self, failure: BaseException) -> None:
        """Tell the other ranks, close the connections, then find out which rank failed first."""
        world = self._world
        if isinstance(failure, Evicted):  # the others go on, and must not hear from this process
            world.transport.abort()
            return
        where = world.whereabouts(failure)
        is_answered = leave_report(world.store, world.rank, failure, where)
        if is_answered:  # by the store: else each further request would only wait
            world.membership.depart(f"it failed: {failure}")
        world.transport.abort()
        if is_answered:
            size = len(world.membership.ranks)
            one_host = world.transport.one_host
            diagnose(world.store, world.rank, size, failure, where, one_host=one_host)
            if world.holds_store:
                wait_for_readers(world.store)

    def on_late_failure(self, failure: TransportError) -> None:
        """Note what ended an exchange on a GPU: here no call waits for it, but other ranks may."""
        world = self._world
        if not world.membership.is_elastic:  # else each exchange has a call that waits for it
            self.late_failure = failure
            leave_report(world.store, world.rank, failure, world.whereabouts(failure))
            world.transport.abort_host()

    def abort(self, reason: BaseException) -> None:
        """See `World.abort`."""
        if self._state == "left to the parent":
            return
        world = self._world
        is_news = False
        try:
            is_news = world.comm_thread.give_up(reason) and not isinstance(reason, Evicted)
            if is_news:
                world.membership.depart(f"it gave up: {_text_of(reason)}")
                leave_report(world.store, world.rank, reason)
        finally:  # a second Ctrl-C may end the report
            world.transport.abort()
        # the others know nothing of this rank's own errors
        is_own = isinstance(reason, Exception) and not isinstance(reason, CommrtError)
        if is_news and is_own and world.holds_store:
            wait_for_readers(world.store)

    def close(self) -> None:
        """See `World.close`."""
        if _process_ends:
            self._world.membership.depart(UNFINISHED)
        self.close_during(sys.exception())

    def close_during(self, error: BaseException | None) -> None:
        """Close the world while `error` passes, if any; again from the start after a Ctrl-C."""
        world = self._world
        world.comm_thread.require_other_thread()
        if self._state == "left to the parent":
            return
        if error is not None and world.membership.is_elastic:
            self.abort(error)
        if not self.has_begun:
            world.hooks.before_close()
        self._state = "closed"
        try:
            world.comm_thread.close()
        except BaseException:  # the communication thread still runs
            world.transport.abort()
            raise
        # no task runs any more; the other ranks still count on this process
        self._release()
        before_leave = world.hooks.before_leave
        world.hooks = NO_HOOKS
        before_leave()
        # the others go on without this rank, but may need its store
        world.membership.end_membership("it closed its world", finished=True)
        if world.holds_store and isinstance(world.comm_thread.failure, Evicted | None):
            world.membership.wait_for_all_closed()
        is_whole = error is None and world.comm_thread.failure is None
        if is_whole and not world.membership.is_elastic and len(world.membership.ranks) > 1:
            trained = world.trained()
            note_closed(world.store, world.rank, None if trained is None else trained.step)
        # nobody needs anything of this process
        try:
            world.transport.close()
        finally:
            world.membership.close()
            world.reconnect_options = None
            # torch's own may end now: its next group must not find what this one left there
            world.store = HashStore()

    def end_with_process(self) -> None:
        """Close the world, without waiting for the deadline of a transfer that may be running.

        With backup workers the other ranks may still need this rank's state, but not that of a
        program that failed. What ends a process does not show here, so it may be ``sys.exit()`` in
        the middle of training: its data has not ended.
        """
        world = self._world
        if world.hooks is not NO_HOOKS and not hasattr(sys, "last_value"):
            world.membership.depart(UNFINISHED)
            self.close()
        if failure := self.unraised_failure:
            what = f"the process ends after a failure that no call has raised: {failure}"
            warnings.warn(what, stacklevel=1)
        self.abort(TransportClosed(ENDED))
        with suppress(TimeoutError):
            world.comm_thread.close(EXIT_S)
            self.close()

    def leave_to_parent(self) -> None:
        """Close the world in a forked child and tell nobody: to others the parent is this rank."""
        self._state = "left to the parent"
        self._world.comm_thread.leave_to_parent()


def _text_of(error: BaseException) -> str:
    """Return `error`'s message; its name too if that says little, as for ``SystemExit(143)``."""
    return (str(error) if isinstance(error, Exception) else "") or repr(error)
