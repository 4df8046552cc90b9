# SPDX-License-Identifier: Apache-2.0
"""The records that members keep on the store. One rank changes the head (the current generation and
how far the latest collective is) for all, by a compare-and-set.

Any thread may use it; a method costs one request, where it does not say otherwise. What the records
mean is decided elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from commrt.elastic.records import OPEN, Arrival, Head
from commrt.runtime.generation import Generation, Loss
from commrt.store.client import TimedStore, call_store
from commrt.store.parsing import parse, typed

HEAD = "head"
DEPARTED = "departed"
"""The key under which each process that leaves writes a line: rank, incarnation, why, and whether
it has finished.
"""
ROLL_CALL = 0
"""In place of the number of a collective."""


def arrival_key(generation: Generation, collective: int) -> str:
    """Return the key under which members of `generation` say that they have come to a collective,
    or `ROLL_CALL`.

    Each writes a line: its rank, and the fields of its `Arrival`.
    """
    return f"arrived/{generation.number}.{collective}"


def refusal_key(collective: int) -> str:
    """Return the key under which a rank says why members cannot meet in a collective; the same in
    all generations.
    """
    return f"refused/{collective}"


def joining_key(generation: Generation) -> str:
    """Return the key under which new processes say that they want to be in the generation after
    `generation`.

    Each writes a line: rank, incarnation, and the number of collectives that its state has made.
    """
    return f"joining/{generation.number}"


def wake_key(rank: int, target: int) -> str:
    """Return the key for which `rank` waits, to learn that others form generation `target`."""
    return f"called/{rank}/{target}"


class Roster:
    """The records of one model's members, as `rank` reads and writes them.

    The first one made writes the first head, of the `founders`.
    """

    def __init__(self, store: TimedStore, rank: int, founders: Generation) -> None:
        self.store = store
        self._rank = rank
        # the latest head that was read, also as text; each thread that reads one replaces the pair
        self._known = b"", Head(founders)
        self.change(None, Head(founders))

    @property
    def known(self) -> Head:
        """The latest head that was read; costs no request."""
        return self._known[1]

    def head(self) -> Head:
        """Return the head, also to a process that is no member."""
        return self._parsed(self.store.get(HEAD))

    def change(self, head: Head | None, after: Head) -> Head:
        """Write the head `after` if `head` (None: no head) still stands; return what stands now."""
        before = "" if head is None else head.to_json()
        return self._parsed(self.store.compare_set(HEAD, before, after.to_json()))

    def _parsed(self, text: bytes) -> Head:
        known = self._known
        if text != known[0]:
            known = text, parse(HEAD, text, Head.from_json)
            self._known = known
        return known[1]

    def arrive(self, key: str, arrival: Arrival) -> None:
        """Add this rank to those that have come, under `key`."""
        self.store.append(key, json.dumps([self._rank, *arrival]) + "\n")

    def arrivals(self, key: str) -> dict[int, Arrival]:
        """Return the ranks that have come, in that order, from the lines under `key`: each rank's
        latest. Two requests.
        """
        lines = _parse_lines(key, self.store.read(key), int, int, str, list, int | None)
        return {rank: Arrival(*fields) for rank, *fields in lines}

    def is_roll_call(self, generation: Generation) -> bool:
        """Return True once a member of `generation` has come to its roll call."""
        return bool(self.store.check([arrival_key(generation, ROLL_CALL)]))

    def depart(self, incarnation: int, why: str, *, finished: bool) -> None:
        """Write that process `incarnation` of this rank leaves.

        It asks also a store that did not answer before.
        """
        line = json.dumps([self._rank, incarnation, why, finished]) + "\n"
        connection = self.store.connection
        call_store(lambda: connection.append(DEPARTED, line), rank=self._rank)  # type: ignore[attr-defined]  # torch's stub is behind

    def departed(self, processes: Mapping[int, int]) -> dict[int, Loss]:
        """Return those of `processes`, given with their incarnations, that have left, by rank. Two
        requests.
        """
        lines = _parse_lines(DEPARTED, self.store.read(DEPARTED), int, int, str, bool)
        return {
            rank: Loss(rank, 0, why, finished)
            for rank, incarnation, why, finished in lines
            if processes.get(rank) == incarnation
        }

    def ask_to_join(self, head: Head, incarnation: int) -> None:
        """Write that process `incarnation` wants this rank's place, with the state after the
        collective of `head`.
        """
        line = json.dumps([self._rank, incarnation, head.collective]) + "\n"
        self.store.append(joining_key(head.generation), line)

    def joining(self, head: Head) -> dict[int, int]:
        """Return the processes that want to come and whose state has the latest collective, by
        rank; none while a collective runs. Two requests.
        """
        if head.phase != OPEN:
            return {}
        key = joining_key(head.generation)
        lines = _parse_lines(key, self.store.read(key), int, int, int)
        return {
            rank: process for rank, process, collective in lines if collective == head.collective
        }

    def call_members(self, generation: Generation) -> None:
        """Let all members of `generation` form the next one, or learn that it exists; each one's
        watcher wakes up.
        """
        self._wake([wake_key(rank, generation.number + 1) for rank in generation.ranks])

    def wake_own(self, first: int, last: int) -> None:
        """Wake this rank's watcher for generations `first` to `last`."""
        self._wake([wake_key(self._rank, number) for number in range(first, last + 1)])

    def _wake(self, keys: Sequence[str]) -> None:
        self.store.multi_set(keys, ["1"] * len(keys))


def _parse_lines(key: str, text: bytes, *kinds: Any) -> list[list[Any]]:
    """Return the fields of the lines of `text`, which stands under `key`: each is a JSON list of
    these kinds.
    """

    def read(text: bytes) -> list[list[Any]]:
        return [typed(json.loads(line), *kinds) for line in text.splitlines()]

    return parse(key, text, read)
