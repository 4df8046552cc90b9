# SPDX-License-Identifier: Apache-2.0
"""What ranks do for each other beside their training: they hand out their state."""

from __future__ import annotations

from collections.abc import Callable
from socket import gethostname
from threading import Event
from typing import NamedTuple, TypeVar

from torch.distributed import Store

from commrt.errors import DeadlineExceeded, Place, QuorumLost
from commrt.membership.state_server import StateServer, request_state
from commrt.membership.store_client import STORE_ANSWER_S, call_store, parse
from commrt.model.donor import Donor, Gift, Has, unpacked
from commrt.runtime.world import World
from commrt.threads.patience import Patience

__all__ = ["Due", "Relief"]

READY_S = 3.0
"""How long a donor may take to say whether it has a state, before another is asked; no more than a part of the
deadline, for which those who lack a gradient wait for the one who asks."""
PARTS, WAITS = 4, 3
"""Of the deadline; and of that, for the donor to come to its next forward pass."""
AGAIN_S = 0.01
READY, STATE = b"R", b"S"
"""Kinds of questions: is the state there, and what is it."""

T = TypeVar("T")


class Due(NamedTuple):
    """What a rank that was late has to become before it goes on."""

    version: int
    donors: tuple[int, ...]
    """Who has it, the one to ask first first."""


class Relief:
    """Of one model on one rank; the others find it on a shelf of the store."""

    def __init__(self, world: World, shelf: Store, donor: Donor) -> None:
        self._world, self._shelf, self._donor = world, shelf, donor
        towards = world.elastic.host or gethostname()
        self._service = StateServer(towards, {READY: self._is_ready, STATE: self._give})

    def open(self) -> None:
        """Take callers."""
        self._ask(lambda: self._shelf.set(_key(self._world.rank), self._service.address))

    def _is_ready(self, version: int) -> bytes | None:
        return self._donor.has(version, self._ready_s / WAITS).value or None

    @property
    def _ready_s(self) -> float:
        return min(READY_S, self._world.timeout_s / PARTS)

    def _give(self, version: int) -> bytes | None:
        return self._donor.give(version, self._world.timeout_s / 2)

    def fetch(self, due: Due) -> Gift | None:
        """The state of one of its donors; waits for the first of them to have it.

        None if all of them that live have changed their weights since, outside of a step.
        Raises `QuorumLost` if all of them are gone, `DeadlineExceeded`.
        """
        patience = Patience(self._world.timeout_s, self._ready_s + self._world.timeout_s / 2)
        while True:
            changed = set[int]()
            for rank in due.donors:
                said = self._asked(rank, due.version)
                is_late = patience.left_s <= 0
                if isinstance(said, bytes):
                    return unpacked(said)
                changed |= {rank} if said is Has.OTHERS else set()
            gone = self._require_hope(due, is_late=is_late)
            if changed and changed | gone >= {*due.donors}:
                return None
            Event().wait(AGAIN_S)

    def _asked(self, rank: int, version: int) -> bytes | Has:
        """Who has it may take long to copy it."""
        address = self._address(rank)
        said = None if address is None else request_state(address, READY, version, self._ready_s)
        if address is None or said != Has.IT.value:
            return parse("answer of a service", said or b"", Has)
        return request_state(address, STATE, version, self._world.timeout_s / 2) or Has.NOTHING

    def _require_hope(self, due: Due, *, is_late: bool) -> set[int]:
        """Those of its donors that are gone."""
        elastic = self._world.elastic
        elastic.require_open()
        donors, place = list(due.donors), Place(self._world.rank, due.donors[0], due.version)
        lost = {*donors} - elastic.generation.members.keys()
        gone = {rank for rank in donors if rank in lost or elastic.is_gone(rank)}
        if len(gone) == len(donors):
            raise QuorumLost(f"only ranks {donors} had the weights of step {due.version}, and they are gone", place)
        if is_late:
            what = (
                f"this rank was late, and none of ranks {donors}, whose weights it needs, came to its next forward "
                f"pass or closed its world within {self._world.timeout_s:g} s: look at their output"
            )
            raise DeadlineExceeded(what, place)
        return gone

    def _address(self, rank: int) -> str | None:
        key = _key(rank)
        said = self._ask(lambda: self._shelf.get(key) if self._shelf.check([key]) else None)
        return None if said is None else parse(key, said, bytes.decode)

    def _ask(self, question: Callable[[], T]) -> T:
        return call_store(question, self._world.timeout_s + STORE_ANSWER_S, self._world.rank)

    def close(self) -> None:
        """Take no more callers."""
        self._service.close()


def _key(rank: int) -> str:
    return f"service/{rank}"
