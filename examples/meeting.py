# SPDX-License-Identifier: Apache-2.0
"""Agree over the launcher's store which processes are the ranks of the group (torch 2.14 and
later).

A death or a new process begins another turn. All that come in a turn become the ranks of the group.

Each process holds a socket, and in a turn the others connect to it. The kernel breaks the
connection when the process ends: so a turn need not wait for the dead, and closes when all others
have come.
"""

from __future__ import annotations

import json
import os
import socket
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
REACH_S = 1.0
"""A host that does not answer for so long may live."""
BACKLOG = 1024
"""At least as many as there are processes."""


class Member(NamedTuple):
    """A process that comes in a turn."""

    turn: int
    """The latest turn whose state it has; -1 for a new process."""
    steps: int
    number: int
    """The launcher's rank, for a fixed order and for messages."""
    handle: str
    address: str
    """Of its socket; no other process has the same."""
    about: Any = None
    """What else the others need to know, as JSON has it."""


class Lives:
    """Tells which processes have ended. Waits only for the first connection to each."""

    def __init__(self) -> None:
        place = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        family, kind, _, _, store = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:  # which sends nothing
            way.connect(store)
            own = way.getsockname()[0]  # where other hosts find this one
        # accepts nothing
        self._own = socket.create_server((own, 0), family=family, backlog=BACKLOG)
        self.address = f"{own} {self._own.getsockname()[1]}"
        self._others: dict[str, socket.socket | None] = {}
        self._ended = set[str]()

    def has_ended(self, address: str) -> bool:
        """Return True if the process with the socket at `address` is gone.

        One that is stopped is not.
        """
        if address in self._ended:
            return True
        try:
            if address not in self._others:
                self._others[address] = None  # if the host cannot be reached: it may live
                self._others[address] = other = socket.create_connection(address.split(), REACH_S)
                other.setblocking(False)
            other = self._others[address]
            if other is None or other.recv(1):
                return False
        except ConnectionError:  # refused, or reset
            pass
        except OSError:  # nothing to receive, or out of reach
            return False
        self._ended.add(address)
        return True


Order = Callable[[list[Member]], list[Member]]


def latest_first(members: list[Member]) -> list[Member]:
    """Order by the latest turn, then by steps: rank 0 has the state that goes on."""
    return sorted(members, key=lambda each: (-each.turn, -each.steps, each.number))


class Meeting:
    """The turns of one process. The first one waits for `size` processes.

    A later turn closes when all ranks of the latest group have come or ended: it waits for one that
    still computes, or is stopped. If nobody has come for `grace_s` seconds, it closes without those
    that are missing: their hosts may be lost. A rank that comes too late is in the next turn.
    """

    def __init__(self, number: int, size: int, grace_s: float) -> None:
        self._store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no other name for it
        self._number = number
        self._size = size
        self._grace_s = grace_s
        self._lives = Lives()
        self._steps = -1
        self._tries = 0
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
        while not self._is_over():
            dist.group.WORLD.abort()  # ranks that wait for this one get an error, and come too
            handle = dist._get_reconfigure_handle()  # noqa: SLF001  # the API's present name
            turn = int(self._store.compare_set("turn", "", "0"))
            me = Member(self._has_state_of, steps, self._number, handle, self._lives.address, about)
            self._store.append(f"came {turn}", json.dumps(me) + "\n")
            if not (members := self._wait(turn)):
                continue
            came = json.dumps(order(members))
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
            except RuntimeError:  # one of them has died since
                continue
            return True
        return False

    def _is_over(self) -> bool:
        return self._store.check(["is over"])

    def _wait(self, turn: int) -> list[Member]:
        """Return those who come in `turn`, one of them with the state;
        none once training is over.
        """
        before = self._store.get(f"ranks {turn - 1}") if turn else "[]"
        latest = [Member(*each).address for each in json.loads(before)]
        count = 0
        now_s = monotonic()
        end_s = now_s + LIMIT_S
        since_s = now_s
        while now_s < end_s:
            if self._is_over():
                return []
            came = [
                Member(*json.loads(line)) for line in self._store.get(f"came {turn}").splitlines()
            ]
            if len(came) > count:
                count = len(came)
                since_s = now_s
            there = {each.address for each in came}
            members = [each for each in came if not self._lives.has_ended(each.address)]
            if turn == 0:
                is_enough = len(members) >= self._size
            elif now_s > since_s + self._grace_s:
                is_enough = True
            else:
                is_enough = all(each in there or self._lives.has_ended(each) for each in latest)
            if is_enough and (turn == 0 or any(each.turn >= 0 for each in members)):
                return members
            sleep(min(max(0.01, (now_s - since_s) / 10), 0.5))
            now_s = monotonic()
        raise TimeoutError(f"no process that has the state came within {LIMIT_S:g} s: start again")
