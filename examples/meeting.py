# SPDX-License-Identifier: Apache-2.0
"""Agree over the launcher's store which processes are the ranks of the group (torch 2.14 and later).

A death or a new process begins another turn. All that come in a turn become the ranks of the group.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch.distributed as dist

LIMIT_S = 300.0
"""Give up after so long without a process that has the state of training."""
TRIES = 10
"""Give up after so many turns without a step."""
CONNECT_S = 30.0
"""A process that dies while the group connects costs this long."""


class Member(NamedTuple):
    """A process that comes in a turn."""

    turn: int
    """The latest turn whose state it has; -1 for a new process."""
    steps: int
    number: int
    """The launcher's rank, for a fixed order and for messages."""
    handle: str
    about: Any = None
    """What else the others need to know, as JSON has it."""


Order = Callable[[list[Member]], list[Member]]


def latest_first(members: list[Member]) -> list[Member]:
    """Order by the latest turn, then by steps: rank 0 has the state that goes on."""
    return sorted(members, key=lambda each: (-each.turn, -each.steps, each.number))


class Meeting:
    """The turns of one process. The first one waits for `size` processes.

    A later turn closes when nobody has come for `grace_s` seconds. Choose more than a step takes:
    a rank notices a death in its next collective. A rank that comes too late is in the next turn.
    """

    def __init__(self, number: int, size: int, grace_s: float) -> None:
        self._store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no other name for it
        self._number, self._size, self._grace_s = number, size, grace_s
        self._steps, self._tries = -1, 0
        self._has_state_of = -1
        self.turn = -1
        self.members: list[Member] = []
        """Of the present turn, in the order of ranks."""

    def is_called(self) -> bool:
        """Return True if a process waits for the next turn. Takes one question to the store."""
        return self._store.check([f"came {self.turn + 1}"])

    def loaded(self) -> None:
        """Note that this process has the state of rank 0: it may give it in a later turn."""
        self._has_state_of = self.turn

    def end(self) -> None:
        """Note that training is over: who comes from now on leaves."""
        self._store.set("is over", "1")

    def hold(self, steps: int, about: Any = None, order: Order = latest_first) -> bool:
        """Become a rank of the group with all that come; return False once training is over."""
        self._tries = self._tries + 1 if steps == self._steps else 0
        self._steps = steps
        if self._tries == TRIES:
            raise RuntimeError(f"no step in {TRIES} turns: see the errors before")
        handle = dist._get_reconfigure_handle()  # noqa: SLF001  # the API's present name
        while not self._store.check(["is over"]):
            dist.group.WORLD.abort()  # ranks that wait for this one get an error, and come too
            turn = int(self._store.compare_set("turn", "", "0"))
            me = Member(self._has_state_of, steps, self._number, handle, about)
            self._store.append(f"came {turn}", json.dumps(me) + "\n")
            came = json.dumps(order(self._wait(turn)))
            found = self._store.compare_set(f"ranks {turn}", "", came)  # the first one decides
            self._store.compare_set("turn", str(turn), str(turn + 1))
            self.members = [Member(*each) for each in json.loads(found)]
            handles = [each.handle for each in self.members]
            if handle not in handles:
                continue
            self.turn = turn
            if turn == 0:
                self.loaded()  # all begin with the same
            try:
                dist._reconfigure(turn, handles, timeout=timedelta(seconds=CONNECT_S)).wait()  # noqa: SLF001
            except dist.DistBackendError:  # one of them has died since
                continue
            return True
        return False

    def _wait(self, turn: int) -> list[Member]:
        """Return those who come in `turn`, one of the latest group among them."""
        count, end_s = 0, monotonic() + LIMIT_S
        while monotonic() < end_s:
            lines = self._store.get(f"came {turn}").splitlines()
            members = [Member(*json.loads(line)) for line in lines]
            is_enough = len(members) >= self._size if turn == 0 else max(members).turn >= 0
            if is_enough and (turn == 0 or len(members) == count):
                return members
            count = len(members)
            sleep(self._grace_s if turn else 0.1)
        raise TimeoutError(f"no process that has the state came within {LIMIT_S:g} s: start again")
