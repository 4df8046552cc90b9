# SPDX-License-Identifier: Apache-2.0
"""A world that goes on without lost ranks: it moves from generation to generation, with new connections in each.

NCCL can cancel one transfer only by cancelling all of them, and a rank that waits for a lost one keeps others waiting.
So a rank that notices a loss starts a roll call on the store. Each member breaks its connections and answers; those
that answer are the next generation, and connect anew (`commrt.elastic.store_membership`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import TypeVar
from weakref import WeakSet

from torch.distributed import HashStore, Store

from commrt.elastic.barrier import Barrier
from commrt.elastic.generations import Generation
from commrt.elastic.reconnector import Reconnector
from commrt.elastic.store_membership import StoreMembership
from commrt.errors import Evicted, PeerLost, Place, TransportClosed, TransportError
from commrt.runtime.connection import ConnectGpu, ReconnectOptions
from commrt.runtime.membership import LOST, Loss, Membership
from commrt.threads.comm_thread import CommThread, RecoveredError
from commrt.threads.future import Future
from commrt.transport.by_device import TransportByDevice

__all__ = ["Recovery"]

T = TypeVar("T")

ATTEMPTS = 5
"""Generations of the same members, with no exchange done in between, before an error is final."""
_log = logging.getLogger("commrt")


class Recovery(Membership):
    """The generations of one world, and how a rank moves from one to the next.

    Methods run on the communication thread, unless their docstring says otherwise.
    """

    def __init__(
        self,
        store: Store,
        transport: TransportByDevice,
        comm_thread: CommThread,
        reconnect_options: ReconnectOptions | None,
        connect_gpu: ConnectGpu,
    ) -> None:
        super().__init__(transport.members, comm_thread)
        self._store, self._transport = store, transport
        self._reconnector = Reconnector(transport, reconnect_options, connect_gpu)
        self._membership: StoreMembership | None = None
        self._ended: StoreMembership | None = None  # the last one
        self._barrier: Barrier | None = None
        self._base = Generation(0, dict.fromkeys(transport.members, 0))
        self._dependants: WeakSet[object] = WeakSet()
        self._lock = Lock()  # around a change of the generation
        self._called = 0  # the latest generation to which others called this rank
        self._is_broken = False
        self._attempts = 0
        self._running_in: int | None = None  # the generation of the collective part that runs now
        self._next_part_in: Generation | None = None  # the one in which the others begin the next part
        self._is_refused = False  # this rank has told the others that it refuses the collective
        self.submitted_steps = 0
        """The gossip steps that this rank has submitted so far."""

    @property
    def host(self) -> str | None:
        """An address in the network through which the ranks see each other, if it is known."""
        return None if self._reconnector.options is None else self._reconnector.options.towards

    @property
    def is_elastic(self) -> bool:  # type: ignore[override]  # it changes here
        """True if a lost rank does not end this world; the same on all ranks."""
        return self._membership is not None

    @property
    def on_store(self) -> StoreMembership:
        """Raise `RuntimeError` in a world that is not elastic."""
        if self._membership is None:
            raise RuntimeError("this world is not elastic")
        return self._membership

    @property
    def barrier(self) -> Barrier:
        """Raise `RuntimeError` in a world that is not elastic."""
        if self._barrier is None:
            raise RuntimeError("this world is not elastic")
        return self._barrier

    @property
    def generation(self) -> Generation:
        """The one whose connections this rank uses."""
        return self._base if self._membership is None else self._membership.generation

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, in ascending order."""
        return self.generation.ranks

    @property
    def lost(self) -> tuple[Loss, ...]:  # type: ignore[override]  # it changes here
        """The ranks without which the others went on."""
        return self.generation.lost

    @property
    def number(self) -> int:  # type: ignore[override]  # it changes here
        """The number of the generation."""
        return self.generation.number

    def _on_call(self, number: int) -> None:
        """Cancel what runs here and join generation `number`, which other ranks form. On the watcher's thread."""
        with self._lock:
            if number <= self.generation.number:
                return
            self._called = max(self._called, number)
            self._transport.abort()
        with suppress(TransportClosed):
            self._comm_thread.submit(self._current_now)

    @property
    def is_called(self) -> bool:
        """True if other ranks form a new generation, and wait for this rank. On any thread."""
        return self._called > self.generation.number

    def takes_part(self, step: int) -> bool:
        """True if this rank exchanges in training step `step`; False before the step in which its generation starts."""
        return step >= self.generation.start

    def break_connections(self, failure: TransportError) -> None:
        """Break all connections until `ensure_generation`; raise `failure` if this world ends with a lost rank."""
        if self._membership is None or (
            isinstance(failure, TransportClosed) and not (self._is_broken or self.is_called)
        ):
            raise failure
        self._count(failure)
        self._transport.abort()
        self._is_broken = True

    def recover(self, failure: TransportError) -> None:
        """Go on in the next generation after `failure`; raise it if this world ends with a lost rank."""
        self.break_connections(failure)
        self._renew()

    def _count(self, failure: TransportError) -> None:
        self._attempts += 1
        if self._attempts > ATTEMPTS:
            raise failure

    def progress(self) -> None:
        """Record a completed exchange: failures before it do not count any more. On any thread."""
        self._attempts = 0

    def ensure_generation(self, number: int) -> int:
        """Move to generation `number` or a later one, with working connections, and return its number."""
        while (self._is_broken or self.is_called) or self.generation.number < number:
            self._renew()
        return self.generation.number

    def _current_now(self) -> Generation:
        self.ensure_generation(0)
        return self.generation

    def _follow(self) -> None:
        self.ensure_generation(self.on_store.current().number)

    def _renew(self) -> None:
        """Join the next generation, and connect."""
        while True:
            before, generation = self.generation, self._next_generation()
            _log_changes(before, generation, self._transport.rank)
            self.on_store.require_enough(generation, self.next_step)
            try:
                self._connect(generation)
            except TransportClosed:
                raise
            except TransportError as failure:  # a member was lost on the way, or stopped
                self._count(failure)
            else:
                if not self.is_called:
                    break
        self.memory_epoch += 1

    def _next_generation(self) -> Generation:
        membership, before = self.on_store, self.generation
        self._transport.abort()  # or a rank that waits for this one would not answer
        generation = membership.current()
        if generation.number == before.number:
            generation = membership.roll_call(self.next_step, self.require_open)
        with self._lock:
            membership.adopt(generation)
            self._is_broken = False
        if generation.ranks != before.ranks:
            self._attempts = 0
        return generation

    def _connect(self, generation: Generation) -> None:
        """Connect the members; programs that were bound before stay broken. Collective."""
        following = self.on_store.next_member(generation.ranks)
        self._reconnector.connect(generation, lambda: self.is_called or self.on_store.is_gone(following))
        self.require_open()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` on the communication thread, which goes on if it loses a rank; ``result()`` raises that."""
        return self._comm_thread.submit(lambda: self._recovering(task))

    def _recovering(self, task: Callable[[], T]) -> T:
        lost = PeerLost("the ranks formed a new generation meanwhile", Place(self._transport.rank))
        if self._running_in is not None and self._running_in != self.generation.number:
            raise RecoveredError(lost)
        try:
            value = task()
            if self._membership is not None:
                self._transport.wait()
        except LOST as failure:
            self.recover(failure)
            raise RecoveredError(lost if isinstance(failure, TransportClosed) else failure) from failure
        return value

    def _leave_generation(self, generation: Generation, failure: TransportError | None) -> None:
        if self.generation.number == generation.number:
            lost = PeerLost("another rank lost a peer in a collective", Place(self._transport.rank))
            self.recover(failure or lost)

    def require_open(self) -> None:
        """Raise `TransportClosed`, or `Evicted`, if this world was given up; cancel what was begun since."""
        if self._comm_thread.failure is not None:
            self._transport.abort()
            if isinstance(self._comm_thread.failure, Evicted):
                raise self._comm_thread.failure.again() from self._comm_thread.failure
            raise TransportClosed("the world was given up", Place(self._transport.rank)) from self._comm_thread.failure

    def depart(self, why: str, *, finished: bool = False) -> None:
        """Tell the others not to wait for this rank; from any thread, and safe to call twice."""
        if self._membership is not None:
            self._membership.depart(why, finished=finished)

    def close(self) -> None:
        """Release the store; call it after `end_membership`."""
        self._reconnector.options, self._store = None, HashStore()
        if self._ended is not None:
            self._ended.store = HashStore()


def _log_changes(before: Generation, after: Generation, rank: int) -> None:
    level = logging.WARNING if rank == after.ranks[0] else logging.INFO
    for change in after.changes_since(before):
        _log.log(level, "commrt: %s; %d ranks go on", change, len(after.members))
