# SPDX-License-Identifier: Apache-2.0
"""A world that goes on without lost ranks: it moves from generation to generation, with new
connections in each.

NCCL can cancel one transfer only by cancelling all of them, and a rank that waits for a lost one
keeps others waiting. So a rank that notices a loss starts a roll call on the store. Each member
breaks its connections and answers. `ElasticMembership` says which thread calls what, and what it
writes of others.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore

from commrt.elastic.barrier import Barrier
from commrt.elastic.member import Member
from commrt.errors import (
    CommrtError,
    DisagreementError,
    PeerLost,
    Place,
    TransportClosed,
    TransportError,
    UsageError,
)
from commrt.runtime.connection import ReconnectOptions
from commrt.runtime.generation import Generation
from commrt.runtime.gpu_connection import connect_gpu_of
from commrt.runtime.membership import LOST, REFUSALS, Begin, Membership
from commrt.runtime.world import World
from commrt.store.client import call_store
from commrt.store.keys import delete_earlier_models, store_of_model
from commrt.threads.calls import start_call
from commrt.threads.comm_thread import RecoveredError
from commrt.threads.future import Future
from commrt.threads.refusals import refusal_after
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
CALL_LOOK_S = 0.05
"""Between two looks whether other ranks make a roll call: less than it waits (`PATIENCE_S`)."""
_log = logging.getLogger("commrt")


def survive_losses(
    world: World,
    model: int,
    *,
    needed: Callable[[int], int] | None = None,
    founds: bool = True,
    made: Callable[[], int | None] = lambda: None,
) -> ElasticMembership:
    """Let `world`, which can connect again, survive lost ranks from now on, for the `model`-th that
    was attached; return its membership, which it has from now on.

    See `Member` for `needed`. ``made()`` is how many steps the model's loop has made: ranks that
    meet in a collective compare that first. Collective. A process that takes a lost rank's place
    passes ``founds=False`` and calls `ElasticMembership.join_as_replacement` next.
    """
    before = world.membership
    membership = ElasticMembership(world, model, needed=needed, made=made)
    # others may still read the latest membership, and no earlier one
    if founds and world.rank == before.ranks[0]:
        earlier = before.model if isinstance(before, Ended | ElasticMembership) else 0
        call_store(partial(delete_earlier_models, world.store, earlier), rank=world.rank)
    world.membership = membership
    if founds:
        membership.member.join_first_generation()
    return membership


def end_survival(world: World, model: int) -> None:
    """Tell the others that this rank goes on without them, if `world` survives lost ranks for the
    `model`-th that was attached and is detached now. On the training thread.
    """
    membership = world.membership
    if isinstance(membership, ElasticMembership) and membership.model == model:
        membership.end("it detached its model", finished=sys.exception() is None)


class ElasticMembership(Membership):
    """The generations of one world, how a rank moves from one to the next, and collectives that
    survive lost ranks.

    Methods stand below by the thread that may call them; those of its parent that it replaces are
    called as there. Written here of others: the connections of the world's transport, the world's
    `membership` when this one ends, and the member's generation (`restart_at_step`) and connection
    to the store (`close`).

    The communication thread writes the attributes of the generation, `history`, and `failures`,
    which `BackupExchange` and `GossipExchange` set to 0 there. The training thread sets `failures`
    to 0 at the end of `together`, where all members have exchanged, and the generation in
    `restart_at_step`, where nothing is in flight.
    """

    is_elastic = True

    def __init__(
        self,
        world: World,
        model: int,
        *,
        needed: Callable[[int], int] | None,
        made: Callable[[], int | None],
    ) -> None:
        now = world.membership.generation
        founders = Generation(now.number, dict.fromkeys(now.members, 0), lost=now.lost)
        super().__init__(founders, world.comm_thread, world.membership)
        self.model = model
        """The number of the model that it is for."""
        self._world = world
        self._transport = world.transport
        self._lock = Lock()  # around a change of the generation, and of `wanted`
        self.wanted = 0
        """The generation to come to before the next exchange: others form it, or this rank broke
        its connections. Only grows; written by `_want`, on any thread.
        """
        # where the members vote next on the collective that runs; None once it was refused, and
        # outside of one; the training thread's, but `submit` reads it
        self._due: Generation | None = None
        self._made = made
        self.while_waiting: Callable[[], None] = lambda: None
        """Called now and then while this rank waits for others to come to a collective, on the
        training thread. Local SGD sets it, once, when it attaches.
        """
        store = PrefixStore("elastic", store_of_model(world.store, self.model))
        self.member = Member(
            store,
            world.rank,
            founders,
            lambda: self._transport.timeout_s,
            host=cast("ReconnectOptions", world.reconnect_options).towards,
            needed=needed,
            on_roll_call=self._on_call,
        )
        self.needed = self.member.needed
        self.barrier = Barrier(self.member)
        """Of the collectives; the exchanges of local SGD vote with it too."""

    # on any thread

    @property
    def is_called(self) -> bool:
        """True if this rank must come to a new generation, for which others may wait."""
        return self.wanted > self.number

    def _on_call(self, number: int) -> None:
        """Cancel what runs here and join generation `number`, which other ranks form.

        On the thread of `Member` that watches the store for roll calls.
        """
        self._want(number)
        if self.is_called:
            with suppress(TransportClosed):
                self._comm_thread.submit(self.ensure_generation)

    def _want(self, number: int) -> None:
        """Cancel what runs here, and come to generation `number` before the next exchange."""
        with self._lock:
            if number > self.number:
                self.wanted = max(self.wanted, number)
                self._transport.abort()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` on the communication thread, which goes on if it loses a rank; ``result()``
        raises that.
        """
        return self._comm_thread.submit(partial(self._do_or_recover, task, self._due))

    def require_open(self) -> None:
        """Raise `TransportClosed`, or `Evicted`, if this world was given up; cancel what was begun
        since.
        """
        if (failure := self._comm_thread.failure) is not None:
            self._transport.abort()
            raise refusal_after(failure) from failure

    def any_gone(self, ranks: Collection[int]) -> bool:
        """Return True if others form a new generation, or one of `ranks` is lost."""
        return self.is_called or bool(self.member.gone(ranks))

    def depart(self, why: str, *, finished: bool = False) -> None:
        """Tell the others not to wait for this rank; safe to call twice."""
        self.member.depart(why, finished=finished)

    # on the communication thread: from one generation to the next

    def ensure_generation(self, number: int = 0) -> Generation:
        """Move to generation `number` or a later one, with working connections, and return it."""
        while self.number < max(number, self.wanted):
            before = self.generation
            # 1. break all connections, or a rank that waits for this one would not answer
            self._transport.abort()
            # 2. agree with the others who goes on
            generation = self._next_generation()
            self._note_changes(before, generation)
            if generation.ranks != before.ranks:
                self.failures = 0
            # 3. a silent member, left without connections, calls all to another roll call
            if self._transport.rank in generation.silent:
                self._want(generation.number + 1)
            # 4. connect with those that go on
            try:
                self._connect(generation)
            except TransportClosed:
                raise
            except TransportError as failure:  # a member was lost on the way, or stopped
                self._count(failure)
                self._want(generation.number + 1)
        return self.generation

    def _next_generation(self) -> Generation:
        """Join the next generation, without connections yet."""
        member = self.member
        generation = member.current()
        if generation.number == self.number:
            generation = member.roll_call(self.next_step, self.require_open)
        with self._lock:
            member.adopt(generation)
            self._use(generation)
        return generation

    def _note_changes(self, before: Generation, generation: Generation) -> None:
        changes = generation.changes_since(before)
        self.history += tuple([f"step {generation.start}: {change}" for change in changes])
        is_first = self._transport.rank == generation.connected[0]
        level = logging.WARNING if is_first else logging.INFO
        for change in changes:
            _log.log(level, "commrt: %s; %d ranks go on", change, len(generation.connected))

    def _connect(self, generation: Generation) -> None:
        """Connect the members, for host memory and each GPU; programs bound before stay broken.

        Collective.
        """
        transport = self._transport
        members = generation.connected
        options = self._world.reconnect_options
        if options is not None and len(members) > 1 and transport.rank in members:
            following = self.member.next_member(members)
            connect_host = partial(options.connect, generation.number, members, transport.timeout_s)
            transport.add(CPU, self.wait_for(start_call(connect_host), following))
            for device in transport.gpus:
                name = f"generation {generation.number}"
                connect_gpu = partial(connect_gpu_of, self._world, name, device, members)
                transport.add(device, self.wait_for(start_call(connect_gpu), following))
        self.require_open()

    def wait_for(self, future: Future[T], *ranks: int) -> T:
        """Return the result of `future`; raise `PeerLost` if one of `ranks` is lost, or others form
        a new generation.

        Also raises what `require_open` does.
        """
        while not future.done():
            with suppress(TimeoutError):
                future.exception(CALL_LOOK_S)
            self.require_open()
            if not future.done() and (self.is_called or self.member.gone(ranks)):
                raise PeerLost("a rank was lost meanwhile", Place(self._transport.rank))
        return future.result()

    def break_connections(self, failure: TransportError) -> None:
        """Break all connections until `ensure_generation`; raise `failure` if it is final."""
        was_closed = isinstance(failure, TransportClosed) and not self.is_called
        if was_closed or self._world.membership is not self:
            raise failure
        self._count(failure)
        self._want(self.number + 1)

    def _count(self, failure: TransportError) -> None:
        is_broken = isinstance(failure, PeerLost | TransportClosed)
        if is_broken and self.is_called:  # what others call is no failure
            return
        self.failures += 1 if is_broken else MISSED
        if self.failures > ATTEMPTS:
            raise failure

    def recover(self, failure: TransportError) -> None:
        """Go on in the next generation after `failure`; raise it if it is final."""
        self.break_connections(failure)
        self.ensure_generation()

    def _do_or_recover(self, task: Callable[[], T], due: Generation | None) -> T:
        """Do `task`, in generation `due` if one is given; move on if a rank is lost, and raise
        that.
        """
        lost = self._peer_lost("the ranks formed a new generation meanwhile")
        if due is not None and due.number != self.number:
            raise RecoveredError(lost)
        try:
            value = task()
            self._transport.wait()
        except LOST as failure:
            self.recover(failure)
            is_own = not isinstance(failure, TransportClosed)
            raise RecoveredError(failure if is_own else lost) from failure
        return value

    def _leave(self, due: Generation, error: CommrtError) -> Generation:
        """Leave generation `due` after `error`, unless that was done; return the one after it."""
        if self.number == due.number:
            refused = self._peer_lost("a rank refused a collective")
            self.recover(error if isinstance(error, TransportError) else refused)
        return self.generation

    def _follow(self) -> None:
        """Come to the generation that stands on the store."""
        self.ensure_generation(self.member.current().number)

    def _peer_lost(self, why: str) -> PeerLost:
        return PeerLost(why, Place(self._transport.rank))

    # on the training thread: collectives

    def _run(self, task: Callable[..., T], *args: object) -> T:
        """Run `task` on the communication thread."""
        return self._comm_thread.submit(partial(task, *args)).result()

    @contextmanager
    def collective(self, what: str, made: int | None = None) -> Iterator[None]:
        """Run the body as the collective `what` of all members, after the step `made`; see
        `Barrier.arrive`.
        """
        step = max(self.next_step, self._submitted_steps)
        outer = self._due
        made = self._made() if made is None else made
        try:
            self._due = self.barrier.arrive(
                what, step, partial(self._run, self._follow), self._look, made
            )
            yield
        except REFUSALS as error:
            if self._due is not None and not isinstance(error, DisagreementError):
                with suppress(*REFUSALS):  # the others wait for a vote, and learn of it there
                    self.together(partial(_raise, error))
            self.barrier.leave()
            raise
        finally:
            # the outer one goes on in the generation of this one
            self._due = None if outer is None else self._due
        with suppress(CommrtError, RuntimeError):  # the store's errors come up in the next call
            self.barrier.leave()

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which all members do; the survivors repeat it if a rank is
        lost meanwhile.

        The members vote on it. An error of one rank, raised before it sends anything, ends the work
        for all. In a `collective` only.
        """
        while True:
            # 1. come to the latest generation; the members may vote in an earlier one
            here = self._run(self.ensure_generation)
            due = self._due or here
            self._due = here
            # 2. work, if that is the one where the work is due
            error: CommrtError = self._peer_lost("another rank lost a peer in a collective")
            is_done = False
            if due.number == here.number:
                try:
                    value = work()
                    is_done = True
                except (*LOST, *REFUSALS) as raised:
                    error = raised
            # 3. vote once, where all members of `due` do
            if not isinstance(error, REFUSALS):
                if self.barrier.vote(is_done, due):
                    self.failures = 0
                    return value
            elif self.barrier.refuse(str(error), due):
                self._run(self._leave, due, error)
                self._due = None
                raise error
            # 4. somebody could not: leave that generation, and work again
            self._due = self._run(self._leave, due, error)

    def begin_call(
        self, begin: Begin, tensor: Tensor, residual: Tensor | None, *, at_once: bool
    ) -> Future[Any] | None:
        """Overwrite `tensor` once all members have the result: each attempt is made on a copy, and
        begins anew.
        """
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

    def outwait(self, future: Future[T], made: int) -> T:
        """Return the result of `future`, to which ranks contribute that have made `made` steps.

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
        waiting = self.member.ranks_in_collective(self.generation).values()
        if any(arrival.made is not None and arrival.made < made for arrival in waiting):
            with self.collective("an exchange"):  # raises, on that rank too
                pass

    def _look(self) -> None:
        self.require_open()
        self.while_waiting()

    # on the training thread: to come and to leave

    def join_as_replacement(self, fetch_state: Callable[[], bool]) -> None:
        """See `Member.join_as_replacement`; then connect with the others."""
        self.member.join_as_replacement(fetch_state)
        self._run(self._follow)

    def restart_at_step(self, step: int) -> None:
        """Restart at `step` of a checkpoint, which all ranks have loaded."""
        with self._lock:
            super().restart_at_step(step)
            self.member.generation = self.generation

    # on the thread that closes the world, and `end` on the training thread

    def finish(self) -> bool:
        """Say that this rank has finished, and stay while others train; return True if none of them
        is left.
        """
        self.depart("it closed its world", finished=True)
        self.member.stay_while(partial(self.member.ranks_alive, in_training=True))
        return not self.member.ranks_alive()

    def end(self, why: str, *, finished: bool = False) -> None:
        """Tell the others that this rank goes on without them; the world does not survive lost
        ranks from now on.
        """
        self.end_membership(why, finished=finished)
        self._world.membership = Ended(self, self._world)

    def end_membership(self, why: str, *, finished: bool = False) -> None:
        """Tell the others that this rank goes on without them, because of `why`.

        What a Ctrl-C cuts off here is done by the next call.
        """
        self.member.depart(why, finished=finished)
        self.member.close()

    def wait_for_all_closed(self) -> None:
        """Stay until all others have ended the membership too."""
        # else this was done before
        if self.member.has_begun and self._world.reconnect_options is not None:
            with suppress(CommrtError, RuntimeError):
                self.member.stay_while(self.member.ranks_alive)

    def close(self) -> None:
        """Release the store, with a stand-in for the member's connection; call it after
        `end_membership`.
        """
        self.member.store.connection = HashStore()


class Ended(Membership):
    """The members of a world that survived lost ranks until its model was detached."""

    def __init__(self, elastic: ElasticMembership, world: World) -> None:
        now = elastic.generation
        super().__init__(now._replace(start=0), world.comm_thread, elastic)
        self.model = elastic.model
        """The number of the model that was detached."""
        self._elastic = elastic

    def wait_for_all_closed(self) -> None:
        """Stay until all others have ended that membership too."""
        self._elastic.wait_for_all_closed()

    def close(self) -> None:
        """Release the store."""
        self._elastic.close()


def _raise(error: CommrtError) -> None:
    raise error
