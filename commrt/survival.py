# SPDX-License-Identifier: Apache-2.0
"""How a world goes on without a rank: all break their connections, and those who are left connect anew.

NCCL can end a transfer only by ending all, and who waits for the lost rank is waited for by others. So the loss passes
from rank to rank, as broken connections, until all know of it and come together (`commrt.membership`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar
from weakref import WeakSet

import torch
from torch.distributed import Store

from commrt.agreement import agree
from commrt.errors import DeadlineExceeded, DisagreementError, PeerLost, Place, TransportClosed, TransportError
from commrt.lane import Lane
from commrt.membership import Membership
from commrt.transport.media import Media, Queueing
from commrt.transport.protocol import Transport

__all__ = ["LOST", "ConnectGpu", "Reconnect", "Survival"]

LOST = (PeerLost, DeadlineExceeded)
"""What may mean that a rank is gone; all else is an error of this one, or of the program."""

Reconnect = Callable[[int, Sequence[int], float], Transport]
"""(generation, members, timeout_s) -> what carries host memory among them; collective, once in each generation."""
ConnectGpu = Callable[[str, torch.device], Queueing]
"""(name, device) -> what carries that GPU's memory among the members; collective, each name once."""

T = TypeVar("T")
_log = logging.getLogger("commrt")


class Survival:
    """Of one world; on its lane, except where it says otherwise."""

    def __init__(
        self, store: Store, transport: Media, lane: Lane, reconnect: Reconnect | None, connect_gpu: ConnectGpu
    ) -> None:
        self.membership = Membership(store, transport.rank, transport.members)
        self.dependants: WeakSet[object] = WeakSet()
        """Those that go on without a lost rank: they `let_go`, and `reform` when it suits them."""
        self.apart_until: float = 0
        """The step from which this rank exchanges with the others again; infinite until they have connected."""
        self.room = 0
        """Grows when memory that was sent from must be left alone: a broken peer may still read it."""
        self._store, self._transport, self._lane = store, transport, lane
        self._reconnect, self._connect_gpu = reconnect, connect_gpu
        self._votes = 0
        self._has_left = False

    @property
    def is_possible(self) -> bool:
        """True if a lost rank does not end this world: one dependant says when, and it is known how to connect."""
        return self._reconnect is not None and len(self.dependants) == 1

    @property
    def is_apart(self) -> bool:
        """True from `let_go` until this rank exchanges with the others again."""
        return self.apart_until > 0

    @property
    def is_broken(self) -> bool:
        """True from `let_go` to `reform`."""
        return self.apart_until == inf

    def let_go(self, failure: TransportError) -> None:
        """Break all connections because of `failure`, until `reform`; raises it if this world ends with a lost rank.

        The others notice it when they next wait for this rank, and do the same.
        """
        if not self.is_possible:
            raise failure
        if not self.is_broken:
            self.membership.miss(failure)
            self._transport.abort()
            self.apart_until = inf
            self.room += 1

    def reform(self, step: int) -> None:
        """Connect anew with those who are left, before `step`; collective, waits for all whom nobody misses.

        Raises `LeftBehind` if they did not wait for this rank.
        """
        begin: float = inf
        while begin == inf:
            before = len(self.membership.lost)
            begin = self.membership.assemble(step, self._transport.timeout_s, self._require_open)
            self._tell(before)
            try:
                self._connect()
            except LOST as failure:  # one was lost on the way
                self.membership.miss(failure)
                begin = inf
        self.apart_until = begin
        self.room += 1

    def reach(self, step: int) -> None:
        """This rank is at `step`."""
        if step >= self.apart_until:
            self.apart_until = 0

    def _tell(self, before: int) -> None:
        members, rank = self.membership.members, self._transport.rank
        for loss in self.membership.lost[before:]:
            _log.warning(
                "rank %d goes on without rank %d from step %d, with %s: %s", rank, *loss[:2], members, loss.why
            )

    def _connect(self) -> None:
        """What was bound before stays broken."""
        members, generation = self.membership.members, self.membership.generation
        if self._reconnect is not None and len(members) > 1:
            self._transport.replace_host(self._reconnect(generation, members, self._transport.timeout_s))
            for device in self._transport.gpus:
                self._transport.add(device, self._connect_gpu(f"generation {generation}", device))
        self._require_open()

    def _require_open(self) -> None:
        """Who gave this world up meanwhile ended what was there then."""
        if self._lane.failure is not None:
            self._transport.abort()
            raise TransportClosed("the world was given up", Place(self._transport.rank)) from self._lane.failure

    def all_whole(self, failure: TransportError | None) -> bool:
        """Has nobody seen a `failure` in what all did together? The same answer everywhere; not on the lane."""
        self._votes += 1
        rank, members = self._transport.rank, self.membership.members
        claim = {"outcome": "whole" if failure is None else "a rank was lost"}
        try:
            agree(self._store, rank, members, "together", claim, self._transport.timeout_s, f"vote {self._votes}")
        except DisagreementError:
            failure = failure or PeerLost("another rank lost one in what all did together", Place(rank))
        except LOST as error:
            failure = failure or error
        if failure is not None:
            missing = failure
            self._lane.submit(lambda: self.let_go(missing)).result()
        return failure is None

    def leave(self, why: str) -> None:
        """The others need not wait for this rank; from any thread."""
        if self.is_possible and not self._has_left:
            self._has_left = True
            self.membership.leave(why)
