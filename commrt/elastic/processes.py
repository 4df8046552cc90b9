# SPDX-License-Identifier: Apache-2.0
"""Which processes have the ranks' places, and which of them live.

They are written on the store: for each rank its latest process, and where that listens. Whether a
process lives is asked there, as a store does not know who has died. `Processes` says which thread
calls what.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from commrt.elastic.links import LinkCheck, probe
from commrt.elastic.listener import Listener, send_message
from commrt.errors import UsageError
from commrt.store.client import TimedStore
from commrt.store.parsing import parse, require, typed
from commrt.threads.deadline import Timeouts

HEALTHY_S = 0.1
"""Healthy ranks answer much sooner."""
UNKNOWN = ""
REPLACED = "another process has its place"
NO_ADDRESSES = (UNKNOWN, REPLACED)
"""In place of the address of a process."""
ADDRESS = re.compile(r"[0-9A-Za-z.:%_-]{1,255} [0-9]{1,5}")


class Processes:
    """The processes of all ranks: which one has a rank's place now, and whether it lives.

    On any thread, but for `register` and `replace`, which are the training thread's. `gone` and
    `answers` block until hosts have answered, for about a probe's time at most. Two threads that
    ask at once may forget that a host was silent, and ask it for longer.

    Each process writes its incarnation (how many processes had the rank's place before it) and its
    address on the store. Without a `host` that all can reach (ranks are threads of one process) no
    process ever counts as gone.
    """

    def __init__(
        self, store: TimedStore, rank: int, host: str | None, timeout_s: Callable[[], float]
    ) -> None:
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._listener = None if host is None else Listener(host, send_message)
        self._addresses: dict[tuple[int, int], str] = {}  # by rank and incarnation; they stay
        self._silent = frozenset[str]()  # addresses whose hosts gave no answer the last time
        self.incarnation = 0
        """Of this process; `replace` sets it, before this process is a member."""

    def register(self) -> None:
        """Publish the address of this process, the first of its rank."""
        if self._listener is not None:
            self._publish("", self._listener)

    def replace(self, *, is_new: bool = False) -> None:
        """Publish this process in place of the last one of its rank; raise `UsageError` if two do
        so at once.

        One that `is_new` comes to a place that perhaps no process has had.
        """
        latest = self._latest(self._rank)
        if self._listener is None or (latest is None and not is_new):
            raise UsageError(
                f"rank {self._rank} has left no address on the store, so no process can take its"
                " place"
            )
        self.incarnation = 0 if latest is None else latest[0] + 1
        self._publish("" if latest is None else json.dumps(latest), self._listener)

    def _publish(self, before: str, listener: Listener) -> None:
        own = json.dumps([self.incarnation, listener.address])
        if self._store.compare_set(f"process/{self._rank}", before, own) != own.encode():
            raise self._taken()

    def _taken(self) -> UsageError:
        return UsageError(f"two processes take the place of rank {self._rank} at once: start one")

    def require_latest(self) -> None:
        """Raise `UsageError` if another process has the place of this one."""
        if (latest := self._latest(self._rank)) is not None and latest[0] != self.incarnation:
            raise self._taken()

    def answers(self, rank: int) -> bool:
        """Return True if the latest process of `rank` lives, as far as this host can tell."""
        latest = self._latest(rank)
        return latest is not None and probe([latest[1]], self._probe_s)[latest[1]] is True

    def gone(self, processes: Mapping[int, int]) -> list[int]:
        """Return the ranks of those `processes`, given with their incarnations, that do not live.

        A process on an unreachable host may be alive, and takes longest; but only the first time.
        """
        if self._listener is None:
            return []
        addresses = {rank: self._address(rank, each) for rank, each in processes.items()}
        known = {*addresses.values()}.difference(NO_ADDRESSES)
        found = probe(known - self._silent, self._probe_s) | probe(known & self._silent, HEALTHY_S)
        self._silent = (self._silent - known) | {
            address for address, answer in found.items() if answer is None
        }
        return [
            rank
            for rank, address in addresses.items()
            if address == REPLACED or found.get(address) is False
        ]

    def _address(self, rank: int, incarnation: int) -> str:
        """Return the address of that process of `rank`, or `REPLACED` or `UNKNOWN`."""
        if (rank, incarnation) not in self._addresses:
            if (latest := self._latest(rank)) is None or latest[0] != incarnation:
                return REPLACED if latest is not None and latest[0] > incarnation else UNKNOWN
            self._addresses[rank, incarnation] = latest[1]
        return self._addresses[rank, incarnation]

    def check_links(self, members: Mapping[int, int]) -> LinkCheck:
        """Begin to check who of `members`, given with their incarnations, reaches this process."""
        others = (
            {rank: each for rank, each in members.items() if rank != self._rank}
            if self._listener
            else {}
        )
        addresses = {rank: self._address(rank, each) for rank, each in others.items()}
        known = {
            rank: address for rank, address in addresses.items() if address not in NO_ADDRESSES
        }
        return LinkCheck(known, self._probe_s)

    @property
    def _probe_s(self) -> float:
        return Timeouts.of(self._timeout_s()).probe_s

    def _latest(self, rank: int) -> tuple[int, str] | None:
        """Return the incarnation and the address of the latest process of `rank`."""
        text = self._store.read(key := f"process/{rank}")
        return parse(key, text, _parse_process) if text else None

    def close(self) -> None:
        """Stop listening: from now on this process counts as gone. Safe to call twice."""
        if self._listener is not None:
            self._listener.close()


def _parse_process(text: bytes) -> tuple[int, str]:
    incarnation, address = typed(json.loads(text), int, str)
    require(ADDRESS.fullmatch(address) and int(address.split()[1]) < 65536)
    return incarnation, address
