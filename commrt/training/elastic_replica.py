# SPDX-License-Identifier: Apache-2.0
"""Replicas whose world may lose ranks and gain others while they train: of gossip and local SGD.

Who comes takes the state of one rank (`arrival`), and later gives its own. A replica writes
weights, buffers and states of its model where it takes another's. On the thread that trains; hooks
of gradients run on that of the backward pass, for which it waits.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar, cast
from weakref import WeakMethod

from commrt.buckets.digest import Digest
from commrt.buckets.tensors import Named
from commrt.elastic.elastic_membership import ElasticMembership, end_survival, survive_losses
from commrt.errors import UsageError
from commrt.runtime.untraced import untraced
from commrt.runtime.world import World
from commrt.training.admission import letting_in
from commrt.training.arrival import StateGiver, fetch_state
from commrt.training.backward_pass import at_end_of_backward
from commrt.training.optimizer_steps import attached_to
from commrt.training.packed_state import pack, unpack
from commrt.training.replica import Replica
from commrt.training.request import Request
from commrt.training.riding_rules import RidingRules
from commrt.training.stateful import dump, load
from commrt.training.tensor_bytes import flatten, restore
from commrt.training.unread_buffers import unread_buffers

T = TypeVar("T")
_log = logging.getLogger("commrt")


def call_if_alive(method: WeakMethod[Callable[[], T]]) -> T | None:
    """Call `method` unless its object was dropped; what a world keeps must not keep a replica."""
    call = method()
    return None if call is None else call()


def _is_alone(world: World) -> bool:
    """Return True if no rank trains another model in `world`: two models have no common step.
    Collective.
    """
    others = f"more on rank {world.rank}" if attached_to(world) > 0 else "0"
    return world.all_equal("other models that train alone", others)


def _needs_nobody(_: int) -> int:
    """Return how many of so many ranks must be left for those that come: any number is enough."""
    return 0


@untraced
class ElasticReplica(Replica):
    """A replica that goes on without lost ranks, and that may come to ranks which train already.

    With ``init(up_to=)`` ranks may come, so a server's thread hands out what is packed for them at
    the end of a backward pass, or by `GrowingReplica` where it waits in a merge. Written here of
    others: `World.membership`, an elastic one until `detach`, and `World.config` in `come`.

    Subclasses call `_answer_newcomers` in the first hook of a backward pass. They say what else a
    state is (`_record`, `_follow`, `_note_weights`), when it may be given (`_may_give`), and how a
    process comes by it (`_enter`); `ElasticMembership.collective` calls `_steps_made`.
    """

    def __init__(
        self,
        request: Request,
        params: Sequence[Named],
        rules: RidingRules,
        watched: Digest | None = None,
    ) -> None:
        super().__init__(request, params, rules, watched)
        world = self._world
        self._number = request.number
        self._owners_of_state = [*request.optimizers, *request.also, request.copies]
        self._taken: bytes | None = None
        """Another rank's state, until the first step of this process."""
        admits = world.size > world.founders
        is_founder = world.config is None  # not a process that comes while others train
        # one that comes must not call what the others do not
        is_alone = _is_alone(world) if is_founder else True
        if admits and not is_alone:
            raise UsageError(
                "init(up_to=) with two models that train alone: who comes takes the state of one;"
                " detach() the other one first"
            )
        self._giver = StateGiver(world, self._number) if admits else None
        if isinstance(world.membership, ElasticMembership):
            world.membership.end("another model trains alone now")
        if is_alone and world.reconnect_options is not None:
            survive_losses(
                world,
                self._number,
                needed=None if self._giver is None else _needs_nobody,
                founds=is_founder,
                made=partial(call_if_alive, WeakMethod(self._steps_made)),
            )
        if self._giver is not None and is_founder:
            self._giver.open()

    @abstractmethod
    def _steps_made(self) -> int | None:
        """Return what ranks compare where they meet in a collective; None if they may differ."""

    @abstractmethod
    def _note_weights(self) -> None:
        """Note that all weights were written here, by nobody else."""

    def come(self) -> Self:
        """Become a member while others train, with the state of one, or detach; not collective."""
        membership = cast("ElasticMembership", self._world.membership)
        with letting_in(self, self._world, membership):
            self._enter(membership)
            cast("StateGiver", self._giver).open()
        return self

    def _enter(self, membership: ElasticMembership) -> None:
        """Become a member, with another's state; train alone until its generation starts.

        So it makes all collectives that the others make after the step of that state.
        """
        membership.join_as_replacement(partial(self._fetch, membership))
        membership.go_on_at_step(self.step)

    def _fetch(self, membership: ElasticMembership) -> bool:
        """Take the state of a member; False if none gives it now."""
        packed = fetch_state(self._world, self._number, membership)
        if packed is None:
            return False
        self._install(packed)
        return True

    def _install(self, packed: bytes) -> None:
        """Overwrite model, states and record with those that another rank has `packed`."""
        self._taken = packed
        record, (weights, states) = unpack(packed, dict, 2)
        tensors = [*self.model.parameters(), *self.model.buffers()]
        restore(weights.to(tensors[0].device), tensors, unread_buffers(self.model))
        load(states, self._owners_of_state)
        self._note_weights()
        self._follow(record)

    @abstractmethod
    def _follow(self, record: Mapping[str, Any]) -> None:
        """Take over what another rank's `_record` is."""

    def _retakes_state(self) -> bool:
        """Overwrite all with the state that this process came with, before its first step; return
        False, and do nothing, in any other case.
        """
        if self._taken is None:
            return False
        _log.info(
            "commrt: rank %d takes its state from the others, not from a checkpoint",
            self._world.rank,
        )
        self._install(self._taken)
        return True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the step of `state`; a process that came keeps the others'. Collective."""
        if not self._retakes_state():
            super().load_state_dict(state)

    def _answer_newcomers(self, giver: StateGiver) -> None:
        """Pack the state for those who ask, at the end of the backward pass that has begun."""
        self._taken = None
        if giver.is_asked and self._may_give():
            at_end_of_backward(partial(giver.answer, self._packed))

    def _may_give(self) -> bool:
        """Return True if another rank can go on from this rank's state."""
        return True

    def _packed(self) -> bytes:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return pack(self._record(), flatten(tensors).cpu(), dump(self._owners_of_state))

    def _record(self) -> dict[str, Any]:
        """Return what a process that comes takes over besides weights and states."""
        return {"step": self.step}

    def detach(self) -> None:
        """Remove all hooks, and drop exchanges that are in flight; not collective."""
        super().detach()
        if self._giver is not None:
            self._giver.close()
        end_survival(self._world, self._number)
