# SPDX-License-Identifier: Apache-2.0
"""What the training thread does in a world that goes on without lost ranks: begin, vote on collectives, and end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from commrt.elastic.barrier import Barrier
from commrt.elastic.generations import Generation
from commrt.elastic.recovery import Recovery
from commrt.elastic.store_membership import StoreMembership
from commrt.errors import CommrtError, DisagreementError, PeerLost, Place, TransportError, UsageError
from commrt.runtime.membership import LOST, REFUSALS, Begin
from commrt.runtime.world import World
from commrt.threads.future import Future

__all__ = ["ElasticMembership", "make_elastic"]

T = TypeVar("T")


def make_elastic(world: World) -> ElasticMembership:
    """Return the membership of `world`, one that can go on without lost ranks."""
    if not isinstance(world.membership, ElasticMembership):
        own = world.store, world.transport, world.comm_thread, world.reconnect_options, world.connect_gpu
        world.membership = ElasticMembership(*own)
    return world.membership


class ElasticMembership(Recovery):
    """The membership of a world that goes on without lost ranks. Methods of this class are for the training thread."""

    def others(self) -> int:
        """Return how many attached models depend on this world, without dropped ones."""
        for pause_s in (0.0, 0.01, 0.1):
            if self._dependants:
                Event().wait(pause_s)  # while another thread collects, this one would not
                gc.collect()  # a model and its hooks are a cycle
        return len(self._dependants)

    def begin(self, dependant: object, number: int, *, alone: bool, needed: int = 0, founds: bool = True) -> None:
        """Survive lost ranks from now on, for the model `dependant`, the `number`-th that was attached.

        Only if it is `alone` on all ranks: two models have no common step. Collective. A
        process that takes a lost rank's place passes ``founds=False`` and calls `join_as_replacement` next.
        """
        if self._membership is not None:
            self.end_membership("another model gossips now")
        self._dependants.add(dependant)
        if not alone or self._reconnector.options is None:
            return
        self.needed = needed
        self._membership = StoreMembership(
            PrefixStore(f"elastic {number}", self._store),
            self._transport.rank,
            Generation(self._base.number, dict.fromkeys(self._base.members, 0), lost=self._base.lost),
            lambda: self._transport.timeout_s,
            host=self.host,
            needed=max(needed, 1),
            on_roll_call=self._on_call,
        )
        self._barrier = Barrier(self._membership)
        if founds:
            self._membership.join_first_generation()

    def end_membership(self, why: str, *, finished: bool = False) -> None:
        """Tell the others that this rank goes on without them, because of `why`."""
        self._base = self.generation
        self._ended, self._membership = self._membership or self._ended, None
        if self._ended is not None:  # what a Ctrl-C cut off here is done by the next call
            self._ended.depart(why, finished=finished)
            self._ended.close()

    def end(self, dependant: object) -> None:
        """End the membership for the model `dependant`, which was detached."""
        if dependant in self._dependants:
            self.end_membership("it detached its model", finished=True)
            self.needed = 0
        self._dependants.discard(dependant)

    def join_as_replacement(self, fetch_state: Callable[[], bool]) -> None:
        """See `Membership.join_as_replacement`; then connect with the others."""
        self.on_store.join_as_replacement(fetch_state)
        self._comm_thread.submit(self._follow).result()

    def restart_at_step(self, step: int) -> None:
        """Restart at `step` of a checkpoint, which all ranks have loaded."""
        self.next_step = self.submitted_steps = step
        if self._membership is not None:
            with self._lock:
                self._membership.generation = self._membership.generation._replace(start=0)

    def recover_now(self, failure: TransportError) -> None:
        """Call `recover` from the training thread."""
        self._comm_thread.submit(lambda: self.recover(failure)).result()

    def any_gone(self, ranks: Collection[int]) -> bool:
        """Return True if others form a new generation, or one of `ranks` is lost."""
        return self.is_elastic and (self.is_called or any(self.on_store.is_gone(rank) for rank in ranks))

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Run the body as the collective `what` of all members; see `Barrier.arrive`."""
        if self._membership is None:
            yield
            return
        self._is_refused = False
        try:
            step = max(self.next_step, self.submitted_steps)
            self._next_part_in = self.barrier.arrive(
                what, step, lambda: self._comm_thread.submit(self._follow).result(), self.require_open
            )
            yield
        except REFUSALS as error:
            due = self._next_part_in or self.generation
            while not (isinstance(error, DisagreementError) or self._is_refused or self._refuse(error, due)):
                due = self.generation  # the members repeat the work there
            self.barrier.leave()
            raise
        with suppress(CommrtError, RuntimeError):  # the store's errors come up in the next call
            self.barrier.leave()

    def begin_call(self, begin: Begin, tensor: Tensor, residual: Tensor | None, *, at_once: bool) -> Future[Any] | None:
        """Overwrite `tensor` once all members have the result: each attempt is made on a copy, and begins anew."""
        if self._membership is None:
            return super().begin_call(begin, tensor, residual, at_once=at_once)
        owed = None if residual is None else residual.clone()

        def attempt() -> Tensor | CommrtError:
            """Return the result, or an error that all ranks have alike: they vote on it as on a result."""
            if residual is not None and owed is not None:
                residual.copy_(owed)
            run_now, copy = begin(), tensor.detach().clone()
            try:
                self.submit(lambda: run_now(copy)).result()
            except (DisagreementError, UsageError) as error:
                if self._comm_thread.failure is not None:
                    raise
                return error
            return copy

        done = self.together(attempt)
        if isinstance(done, CommrtError):
            raise done
        with torch.no_grad():
            tensor.copy_(done)
        return None

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which all members do; the survivors repeat it if a rank is lost meanwhile.

        The members vote, so that no rank uses a result that another one can never get. An error of one rank, raised
        before it sends anything, ends the work for all. In a `collective` only.
        """
        if self._membership is None:
            return work()
        while True:
            generation = self._comm_thread.submit(self._current_now).result()
            if self._next_part_in is not None and self._next_part_in.number != generation.number:
                self.barrier.vote(ok=False, generation=self._next_part_in)  # raises if a member refused there
                self._next_part_in = None
                continue
            failure: TransportError | None = None
            self._running_in = generation.number
            try:
                value = work()
            except LOST as error:
                failure = error
            except REFUSALS as error:
                if self._refuse(error, generation):
                    raise
                self._next_part_in = None
                continue
            finally:
                self._running_in = None
            if self.barrier.vote(failure is None, generation):
                self._next_part_in = generation
                self.progress()
                return value
            self._next_part_in = None
            self._comm_thread.submit(partial(self._leave_generation, generation, failure)).result()

    def _refuse(self, error: CommrtError, generation: Generation) -> bool:
        """Tell the others why this rank refuses, so that they do not wait for it; False if they repeat the work."""
        self._is_refused = self.barrier.refuse(str(error), generation)
        refused = PeerLost("a rank refused a collective", Place(self._transport.rank))
        self._comm_thread.submit(partial(self._leave_generation, generation, refused)).result()
        return self._is_refused

    def finish(self) -> bool:
        """Tell the others that this rank has finished, and stay while any of them trains. On the training thread.

        Return True if all others have finished, or are gone.
        """
        self.depart("it closed its world", finished=True)
        self.on_store.stay_while(self.on_store.ranks_in_training)
        return not self.on_store.ranks_alive()

    def wait_for_all_closed(self) -> None:
        """Stay until all others have ended the membership too; the process that holds the store calls it."""
        if self._ended is not None:
            with suppress(CommrtError, RuntimeError):
                self._ended.stay_while(self._ended.ranks_alive)
