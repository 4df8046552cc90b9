# SPDX-License-Identifier: Apache-2.0
"""Do all ranks mean the same? Asked on the store before anything is sent, because a mismatch later is a hang."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from commrt.errors import DeadlineExceeded, DisagreementError, PeerLost, Place
from commrt.patience import within

__all__ = ["agree", "forget"]

AGREED = "agreed"
LINGER_S = 5.0
"""How long rank 0 waits for the others to read how it ended: the store may live in its process."""
GRACE_S = 2.0
"""How much later than the deadline a store that never answers is given up: its own deadline comes first."""


def agree(store: Store, rank: int, size: int, topic: str, claim: Mapping[str, str], timeout_s: float) -> None:
    """Return when all `size` ranks made the same `claim` under `topic`; a topic is used once.

    Raises `DisagreementError` on **every** rank if one differs from rank 0, naming the rank and the first
    field that differs; `DeadlineExceeded` with the missing ranks if some do not come, or if the store does not
    answer; `PeerLost` if the store goes away. Cost: about five store operations per rank.
    """
    table = _Table(PrefixStore(topic, store), rank, size, topic, timeout_s)
    holder = "the process that holds the store (rank 0, or torchrun's agent)"
    try:
        within(timeout_s + LINGER_S + GRACE_S, lambda: table.agree(dict(claim)))
    except DeadlineExceeded:
        raise
    except TimeoutError as error:
        what = f"{topic}: {holder} does not answer: it is stopped, or its machine cannot be reached; look there"
        raise DeadlineExceeded(what, Place(rank=rank)) from error
    except RuntimeError as error:
        raise PeerLost(f"{topic}: {holder} ended: look at its output", Place(rank=rank)) from error


def forget(store: Store, size: int, topics: Sequence[str]) -> None:
    """Delete what agreements left on `store`; once all ranks have come to a later one, nobody looks there."""
    for topic in topics:
        shelf = PrefixStore(topic, store)
        for key in ("claim", "verdict", "agreeing", "read", "all read", *map(_here, range(size))):
            with suppress(RuntimeError):
                shelf.delete_key(key)


@dataclass(frozen=True, slots=True)
class _Table:
    """Where the ranks meet for one topic."""

    shelf: Store
    rank: int
    size: int
    topic: str
    timeout_s: float

    def agree(self, claim: dict[str, str]) -> None:
        self.shelf.set(_here(self.rank), "")
        if self.rank == 0:
            self.shelf.set("claim", json.dumps(claim))
        self._wait("claim")
        objection = _difference(self.rank, claim, json.loads(self.shelf.get("claim")))
        if objection:
            self.shelf.set("verdict", objection)
        elif self.shelf.add("agreeing", 1) == self.size:
            self.shelf.compare_set("verdict", "", AGREED)
        self._wait("verdict")
        verdict = self.shelf.get("verdict").decode()
        if verdict != AGREED:
            self._let_all_read(self.size)
            raise DisagreementError(f"{self.topic}: {verdict}. Start every rank with the same code and arguments")

    def _wait(self, key: str) -> None:
        try:
            self.shelf.wait([key], timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            missing = [other for other in range(self.size) if not self.shelf.check([_here(other)])]
            self._let_all_read(self.size - len(missing))
            raise DeadlineExceeded(self._absence(missing), Place(rank=self.rank)) from error

    def _absence(self, missing: list[int]) -> str:
        who = f"ranks {missing} did not come" if missing else "the others did not finish"
        return f"{self.topic}: {who} within {self.timeout_s:g} s: start them, or look at their output"

    def _let_all_read(self, readers: int) -> None:
        """Nobody should learn of an end by a lost connection to the store."""
        if self.shelf.add("read", 1) == readers:
            self.shelf.set("all read", "")
        if self.rank == 0:
            with suppress(RuntimeError):
                self.shelf.wait(["all read"], timedelta(seconds=LINGER_S))


def _here(rank: int) -> str:
    return f"here/{rank}"


def _difference(rank: int, ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    for field in sorted(ours.keys() | theirs.keys()):
        mine, first = ours.get(field, "nothing"), theirs.get(field, "nothing")
        if mine != first:
            return f"rank {rank} disagrees with rank 0 about {field}: {_excerpt(mine, first)}"
    return None


def _excerpt(mine: str, first: str, width: int = 160) -> str:
    """Both texts from shortly before the place where they part."""
    part = next((i for i, (a, b) in enumerate(zip(mine, first, strict=False)) if a != b), min(len(mine), len(first)))
    start = max(0, part - width // 4)
    cut = [("..." if start else "") + text[start : start + width] for text in (mine, first)]
    return f"{cut[0]!r} against {cut[1]!r}"
