# SPDX-License-Identifier: Apache-2.0
"""A world that goes on without lost ranks: it moves from generation to generation, with new
connections in each.

NCCL can cancel one transfer only by cancelling all of them, and a rank that waits for a lost one
keeps others waiting. So a rank that notices a loss starts a roll call on the store. Each member
breaks its connections and answers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore

from commrt.elastic.barrier import Barrier
from commrt.elastic.generations import Generation
from commrt.elastic.store_membership import StoreMembership
from commrt.errors import (
    CommrtError,
    DisagreementError,
    PeerLost,
    Place,
    TransportClosed,
    TransportError,
    UsageError,
)
from commrt.runtime.membership import LOST, REFUSALS, Begin, Membership, count_kept
from commrt.runtime.world import World
from commrt.store.client import call_store
from commrt.store.keys import delete_earlier_models, store_of_model
from commrt.threads.calls import start_call
from commrt.threads.comm_thread import RecoveredError, refusal_after
from commrt.threads.future import Future
from commrt.transport.protocol import CPU

T = TypeVar("T")
ATTEMPTS = 5
MISSED = 3
"""Failures among the same members, with no exchange done in between, after which the next one is
final; and as how many a missed deadline counts. So a second one is final: the roll call after the
first has found no rank at fault.
"""
LOOK_AT_OTHERS_S = 0.5
"""Between two looks whether a rank that should send waits in a collective."""
LOOK_S = 0.05
"""Between two looks whether other ranks make a roll call: less than it waits (`PATIENCE_S`)."""
_log = logging.getLogger("commrt")


def make_elastic(world: World) -> ElasticMembership:
    """Return the membership of `world`, one that can go on without lost ranks."""
    if not isinstance(world.membership, ElasticMembership):
        world.membership = ElasticMembership(world)
    return world.membership


class ElasticMembership(Membership):
    """The generations of one world, how a rank moves from one to the next, and collectives that
    survive lost ranks.

    Methods up to `close` run on the communication thread, unless they say otherwise, the others on
    the training thread.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world.transport.members, world.comm_thread)
        self._world = world
        self._transport = world.transport
        self.is_elastic = False
        founders = Generation(0, dict.fromkeys(world.transport.members, 0))
        self.on_store = StoreMembership(
            HashStore(), world.transport.rank, founders, lambda: world.timeout_s
        )
        """The latest membership; the first one, before the world is elastic, has no other ranks on
        its store.
        """
        self.barrier = Barrier(self.on_store)
        self._dependants: WeakSet[object] = WeakSet()
        self._lock = Lock()  # around a change of the generation
        self.wanted = 0
        """The generation to come to before the next exchange: others form it, or this rank broke
        its connections.
        """
        self.failures = 0
        """Since an exchange was completed; whoever completes one sets it to 0, on any thread."""
        # of the collective part that is next or runs; None once refused
        self._part: Generation | None = None
        # as `next_step`, but for exchanges that the communication thread has not begun
        self._submitted_steps = 0
        self._made: Callable[[], int | None] = lambda: None
        self.while_waiting: Callable[[], None] = lambda: None
        """Called now and then while this rank waits for others to come to a collective, on the
        training thread.
        """
        self._number = 0  # of the model that the latest membership is for

    @property
    def generation(self) -> Generation:
        """The one whose connections this rank uses."""
        return self.on_store.generation

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, in ascending order."""
        return self.generation.ranks

    def _on_call(self, number: int) -> None:
        """Cancel what runs here and join generation `number`, which other ranks form.

        On the watcher's thread.
        """
        self._want(number)
        if self.is_called:
            with suppress(TransportClosed):
                self._comm_thread.submit(self.ensure_generation)

    def _want(self, number: int) -> None:
        """Cancel what runs here, and come to generation `number` before the next exchange.

        On any thread.
        """
        with self._lock:
            if number > self.number:
                self.wanted = max(self.wanted, number)
                self._transport.abort()

    @property
    def is_called(self) -> bool:
        """True if this rank must come to a new generation, for which others may wait.

        On any thread.
        """
        return self.wanted > self.number

    def takes_part(self, step: int) -> bool:
        """True if this rank exchanges in training step `step`; False before the step in which its
        generation starts.
        """
        return step >= self.generation.start

    def break_connections(self, failure: TransportError) -> None:
        """Break all connections until `ensure_generation`; raise `failure` if this world ends with
        a lost rank.
        """
        was_closed = isinstance(failure, TransportClosed) and not self.is_called
        if was_closed or not self.is_elastic:
            raise failure
        self._count(failure)
        self._want(self.number + 1)

    def recover(self, failure: TransportError) -> None:
        """Go on in the next generation after `failure`; raise it if this world ends with a lost
        rank.
        """
        self.break_connections(failure)
        self.ensure_generation()

    def _count(self, failure: TransportError) -> None:
        is_broken = isinstance(failure, PeerLost | TransportClosed)
        if is_broken and self.is_called:  # what others call is no failure
            return
        self.failures += 1 if is_broken else MISSED
        if self.failures > ATTEMPTS:
            raise failure

    def ensure_generation(self, number: int = 0) -> Generation:
        """Move to generation `number` or a later one, with working connections, and return it."""
        while self.number < max(number, self.wanted):
            before = self.generation
            generation = self._next_generation()
            level = (
                logging.WARNING if self._transport.rank == generation.connected[0] else logging.INFO
            )
            for change in generation.changes_since(before):
                _log.log(level, "commrt: %s; %d ranks go on", change, len(generation.connected))
            self.on_store.require_enough(generation, self.next_step)
            try:
                self._connect(generation)
            except TransportClosed:
                raise
            except TransportError as failure:  # a member was lost on the way, or stopped
                self._count(failure)
                self._want(generation.number + 1)
            self.memory_epoch += 1
        return self.generation

    def _follow(self) -> None:
        self.ensure_generation(self.on_store.current().number)

    def _next_generation(self) -> Generation:
        """Join the next generation, without connections yet."""
        membership = self.on_store
        before = self.generation
        self._transport.abort()  # or a rank that waits for this one would not answer
        generation = membership.current()
        if generation.number == before.number:
            generation = membership.roll_call(self.next_step, self.require_open)
        with self._lock:
            membership.adopt(generation)
            self.number = generation.number
            self.lost = generation.lost
        if self._transport.rank in generation.silent:
            self._want(generation.number + 1)  # this rank makes a roll call
        if generation.ranks != before.ranks:
            self.failures = 0
        return generation

    def _connect(self, generation: Generation) -> None:
        """Connect the members, for host memory and each GPU; programs bound before stay broken.

        Collective.
        """
        transport = self._transport
        members = generation.connected
        options = self._world.reconnect_options
        if options is not None and len(members) > 1 and transport.rank in members:
            following = self.on_store.next_member(members)
            connect_host = partial(options.connect, generation.number, members, transport.timeout_s)
            transport.add(CPU, self.wait_for(start_call(connect_host), following))
            for device in transport.gpus:
                connect_gpu = partial(
                    self._world.connect_gpu, f"generation {generation.number}", device, members
                )
                transport.add(device, self.wait_for(start_call(connect_gpu), following))
        self.require_open()

    def wait_for(self, future: Future[T], *ranks: int) -> T:
        """Return the result of `future`; raise `PeerLost` if one of `ranks` is lost, or others form
        a new generation.

        Also raises what `require_open` does.
        """
        while not future.done():
            with suppress(TimeoutError):
                future.exception(LOOK_S)
            self.require_open()
            if not future.done() and (self.is_called or self.on_store.gone(ranks)):
                raise PeerLost("a rank was lost meanwhile", Place(self._transport.rank))
        return future.result()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` on the communication thread, which goes on if it loses a rank; ``result()``
        raises that.
        """
        return self._comm_thread.submit(partial(self._recovering, task, self._part))

    def _recovering(self, task: Callable[[], T], part: Generation | None) -> T:
        lost = PeerLost("the ranks formed a new generation meanwhile", Place(self._transport.rank))
        if part is not None and part.number != self.generation.number:
            raise RecoveredError(lost)
        try:
            value = task()
            if self.is_elastic:
                self._transport.wait()
        except LOST as failure:
            self.recover(failure)
            raise RecoveredError(
                lost if isinstance(failure, TransportClosed) else failure
            ) from failure
        return value

    def _leave_generation(
        self, generation: Generation, failure: TransportError | None
    ) -> Generation:
        if self.generation.number == generation.number:
            lost = PeerLost("another rank lost a peer in a collective", Place(self._transport.rank))
            self.recover(failure or lost)
        return self.generation

    def _run(self, task: Callable[..., T], *args: object) -> T:
        """Run `task` on the communication thread, from the training thread."""
        return self._comm_thread.submit(partial(task, *args)).result()

    def _look(self) -> None:
        self.require_open()
        self.while_waiting()

    def require_open(self) -> None:
        """Raise `TransportClosed`, or `Evicted`, if this world was given up; cancel what was begun
        since.
        """
        if (failure := self._comm_thread.failure) is not None:
            self._transport.abort()
            raise refusal_after(failure) from failure

    def depart(self, why: str, *, finished: bool = False) -> None:
        """Tell the others not to wait for this rank; from any thread, and safe to call twice."""
        self.on_store.depart(why, finished=finished)

    def close(self) -> None:
        """Release the store; call it after `end_membership`."""
        self.on_store.store.connection = HashStore()

    def others(self) -> int:
        """Return how many attached models depend on this world, without dropped ones.

        On the training thread.
        """
        return count_kept(self._dependants.__len__)

    def begin(
        self,
        dependant: object,
        number: int,
        *,
        alone: bool,
        needed: Callable[[int], int] | None = None,
        founds: bool = True,
        made: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Survive lost ranks from now on, for the model `dependant`, the `number`-th that was
        attached.

        See `StoreMembership` for `needed`. ``made()`` is how many steps its loop has made: ranks
        that meet in a collective compare that first.

        Only if it is `alone` on all ranks: two models have no common step. Collective. A process
        that takes a lost rank's place passes ``founds=False`` and calls `join_as_replacement` next.
        """
        if self.is_elastic:
            self.end_membership("another model gossips now")
        self._dependants.add(dependant)
        self._made = made
        if not alone or (options := self._world.reconnect_options) is None:
            return
        now = self.generation
        transport = self._transport
        self.needed = needed(0) if needed else 0
        # others may still read the latest membership, and no earlier one
        if founds and transport.rank == now.ranks[0]:
            call_store(
                partial(delete_earlier_models, self._world.store, self._number), rank=transport.rank
            )
        self._number = number
        store = PrefixStore("elastic", store_of_model(self._world.store, number))
        founders = Generation(now.number, dict.fromkeys(now.members, 0), lost=now.lost)
        join = partial(
            StoreMembership, store, transport.rank, founders, lambda: transport.timeout_s
        )
        self.on_store = join(host=options.towards, needed=needed, on_roll_call=self._on_call)
        self.is_elastic = True
        self.barrier = Barrier(self.on_store)
        if founds:
            self.on_store.join_first_generation()

    def end_membership(self, why: str, *, finished: bool = False) -> None:
        """Tell the others that this rank goes on without them, because of `why`."""
        self.is_elastic = False  # what a Ctrl-C cuts off here is done by the next call
        self.on_store.depart(why, finished=finished)
        self.on_store.close()

    def end(self, dependant: object) -> None:
        """End the membership for the model `dependant`, which was detached."""
        if dependant in self._dependants:
            self.end_membership("it detached its model", finished=sys.exception() is None)
            self.needed = 0
        self._dependants.discard(dependant)

    def join_as_replacement(self, fetch_state: Callable[[], bool]) -> None:
        """See `Membership.join_as_replacement`; then connect with the others."""
        self.on_store.join_as_replacement(fetch_state)
        self._run(self._follow)

    def restart_at_step(self, step: int) -> None:
        """Restart at `step` of a checkpoint, which all ranks have loaded."""
        self.go_on_at_step(step)
        with self._lock:
            self.on_store.generation = self.generation._replace(start=0)

    def go_on_at_step(self, step: int) -> None:
        """Go on at training step `step`, with nothing in flight; the generation stays."""
        self.start_no_earlier(step)
        self._submitted_steps = step

    def submit_step(self, step: int) -> None:
        """Note that the exchanges of training step `step` are submitted next: a generation that
        starts in it is too early for this rank.
        """
        self._submitted_steps = step + 1

    def any_gone(self, ranks: Collection[int]) -> bool:
        """Return True if others form a new generation, or one of `ranks` is lost."""
        return self.is_elastic and (self.is_called or bool(self.on_store.gone(ranks)))

    @contextmanager
    def collective(self, what: str, made: int | None = None) -> Iterator[None]:
        """Run the body as the collective `what` of all members, after the step `made`; see
        `Barrier.arrive`.
        """
        if not self.is_elastic:
            yield
            return
        step = max(self.next_step, self._submitted_steps)
        outer = self._part
        made = self._made() if made is None else made
        try:
            self._part = self.barrier.arrive(
                what, step, partial(self._run, self._follow), self._look, made
            )
            yield
        except REFUSALS as error:
            while not (
                isinstance(error, DisagreementError) or self._part is None or self._refuse(error)
            ):
                pass  # the members repeat the work
            self.barrier.leave()
            raise
        finally:
            # the outer one goes on in the generation of this one
            self._part = None if outer is None else self._part
        with suppress(CommrtError, RuntimeError):  # the store's errors come up in the next call
            self.barrier.leave()

    def outwait(self, future: Future[T], made: int) -> T:
        """Return the result of `future`, to which ranks contribute that have made `made` steps. On
        the training thread.

        Raises `DisagreementError` on all ranks if one has made fewer, and waits in a collective.
        """
        while True:
            try:
                return future.result(LOOK_AT_OTHERS_S)
            except TimeoutError:
                if future.done():  # meanwhile, perhaps with a TimeoutError of its own
                    return future.result()
            self.require_none_behind(made)

    def require_none_behind(self, made: int) -> None:
        """Raise `DisagreementError` on all ranks if one waits in a collective before it has made
        `made` steps.
        """
        if self.is_elastic:
            waiting = self.on_store.ranks_in_collective(self.generation).values()
            if any(arrival.made is not None and arrival.made < made for arrival in waiting):
                with self.collective("an exchange"):  # raises, on that rank too
                    pass

    def begin_call(
        self, begin: Begin, tensor: Tensor, residual: Tensor | None, *, at_once: bool
    ) -> Future[Any] | None:
        """Overwrite `tensor` once all members have the result: each attempt is made on a copy, and
        begins anew.
        """
        if not self.is_elastic:
            return super().begin_call(begin, tensor, residual, at_once=at_once)
        before = None if residual is None else residual.clone()

        def attempt() -> Tensor | CommrtError:
            """Return the result, or an error that all ranks have alike: they vote on it as on a
            result.
            """
            if residual is not None and before is not None:
                residual.copy_(before)
            run_now = begin()
            copy = tensor.detach().clone()
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
        """Return the result of `work`, which all members do; the survivors repeat it if a rank is
        lost meanwhile.

        The members vote on it. An error of one rank, raised before it sends anything, ends the work
        for all. In a `collective` only.
        """
        if not self.is_elastic:
            return work()
        while True:
            generation = self._run(self.ensure_generation)
            due = self._part or generation
            self._part = generation
            if due.number != generation.number:
                self.barrier.vote(ok=False, generation=due)  # raises if a member refused there
                continue
            failure: TransportError | None = None
            try:
                value = work()
            except LOST as error:
                failure = error
            except REFUSALS as error:
                if self._refuse(error):
                    raise
                continue
            if self.barrier.vote(failure is None, generation):
                self.failures = 0
                return value
            self._part = self._run(self._leave_generation, generation, failure)

    def _refuse(self, error: CommrtError) -> bool:
        """Tell the others why this rank refuses, so that they do not wait for it; False if they
        repeat the work.
        """
        generation = self._part or self.generation
        is_refused = self.barrier.refuse(str(error), generation)
        refused = PeerLost("a rank refused a collective", Place(self._transport.rank))
        now = self._run(self._leave_generation, generation, refused)
        self._part = None if is_refused else now
        return is_refused

    def finish(self) -> bool:
        """Say that this rank has finished, and stay while others train; return True if none of them
        is left.
        """
        self.depart("it closed its world", finished=True)
        self.on_store.stay_while(partial(self.on_store.ranks_alive, in_training=True))
        return not self.on_store.ranks_alive()

    def wait_for_all_closed(self) -> None:
        """Stay until all others have ended the membership too."""
        # else this was done before
        if self.on_store.has_begun and self._world.reconnect_options is not None:
            with suppress(CommrtError, RuntimeError):
                self.on_store.stay_while(self.on_store.ranks_alive)
