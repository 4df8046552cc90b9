# SPDX-License-Identifier: Apache-2.0
"""Do all ranks mean the same? Asked on the store before anything is sent, because a mismatch later is a hang.

The first verdict stands and is every rank's: a rank that gives up waiting gives the verdict that some are missing, and
one that is interrupted the verdict that it left, so nobody leaves with a yes from a question that another left with an
error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event
from time import monotonic

from torch.distributed import DistNetworkError, PrefixStore, Store

from commrt.errors import DeadlineExceeded, DisagreementError, PeerLost, Place, TransportError
from commrt.store.asking import ANSWER_S, ask, forget, settle
from commrt.store.hearsay import listed, mapped, require, understood

__all__ = ["QUESTION", "agree", "disagreement", "tell_of_leaving"]

QUESTION = "question"
AGREED, DIFFERENT, LATE, LEFT = "agreed", "different", "late", "left"
LINGER_S = 5.0
"""How long rank 0 waits for the others to read a verdict."""


def agree(
    store: Store,
    rank: int,
    members: Sequence[int],
    topic: str,
    claim: Mapping[str, str],
    timeout_s: float,
    shelf: str | None = None,
) -> None:
    """Return when all `members` made the same `claim` under `topic`.

    A `shelf` of the store, by default named by the topic, is used once: where its name does not depend on the topic,
    ranks that ask different things disagree about it.

    Raises `DisagreementError` on **every** rank if one differs from the first, naming the rank and the first field that
    differs; `DeadlineExceeded` with the missing ranks if some do not come, or with rank 0 if the store gives no answer;
    `PeerLost` if a rank left by an interrupt, or the store is gone. The store may live in the first rank, and end with
    it: that one returns after all have read the verdict, or `LINGER_S` seconds later, and leaves nothing on the store.
    Cost: about seven store operations per rank, and two more per rank on the first.
    """
    question = _Question(PrefixStore(shelf or topic, store), rank, members, timeout_s, monotonic() + timeout_s)
    try:
        verdict, reason, about = ask(lambda: question.verdict({QUESTION: topic, **claim}), timeout_s + ANSWER_S, rank)
    except BaseException as error:
        question.withdrawn.set()
        if not isinstance(error, TransportError):  # or the store gives no answers
            tell_of_leaving(question.shelf, rank, error)
        raise
    with suppress(RuntimeError, TransportError):  # the verdict is known
        ask(lambda: question.leave(verdict), LINGER_S + ANSWER_S, rank)
    if verdict == DIFFERENT:
        raise _disagreement(topic, reason, about)
    if verdict == LATE:
        raise DeadlineExceeded(f"{topic}: {reason}", Place(rank=rank))
    if verdict == LEFT:
        raise PeerLost(f"{topic}: {reason}", Place(rank=rank))


def disagreement(topic: str, claims: Mapping[int, Mapping[str, str]]) -> DisagreementError | None:
    """What `agree` would raise where ranks have made these `claims`, in order; None if they are equal."""
    (first, expected), *others = claims.items()
    for rank, claim in others:
        if (about := _first_difference(claim, expected)) is not None:
            return _disagreement(topic, _difference(about, rank, claim, first, expected), about)
    return None


def tell_of_leaving(shelf: Store, rank: int, error: BaseException) -> None:
    """End the question on `shelf` for all: those who wait for the verdict, and those who wait for the claim."""

    def tell() -> None:
        # An abandoned thread may hold the connection until its wait ends.
        ours: Store = shelf.clone()  # type: ignore[attr-defined]  # torch's stub is behind
        reason = f"rank {rank} left it by a {type(error).__name__}: look at its output"
        settle(ours, "verdict", json.dumps([LEFT, reason, ""]))
        settle(ours, "claim", "{}")
        ours.set(f"read/{rank}", "")

    with suppress(AttributeError, RuntimeError, TransportError):  # not every torch can clone
        ask(tell, ANSWER_S, rank)


@dataclass(frozen=True, slots=True)
class _Question:
    """One topic: its shelf of the store, who asks, and until when."""

    shelf: Store
    rank: int
    members: Sequence[int]
    """The first of them asks, and the others compare with it."""
    timeout_s: float
    deadline_s: float
    withdrawn: Event = field(default_factory=Event)
    """The asker has left, and its thread must not speak for it any more."""

    def verdict(self, claim: Mapping[str, str]) -> list[str]:
        """The verdict that stands, its reason, and what it is about."""
        self.shelf.set(f"here/{self.rank}", "")
        if self.rank == self.members[0]:
            settle(self.shelf, "claim", json.dumps(dict(claim)))
        if self._come(["claim"], self.deadline_s):
            self._vote(claim, understood("claim", self.shelf.get("claim"), _texts))
        if not self._come(["verdict"], self.deadline_s):
            self._give(LATE, self._whom_it_waits_for())
        if self.withdrawn.is_set():
            return [LEFT, "", ""]
        return understood("verdict", self.shelf.get("verdict"), _verdict)

    def leave(self, verdict: str) -> None:
        """The first goes last, and clears the shelf unless a rank may still come to read."""
        self.shelf.set(f"read/{self.rank}", "")
        if self.rank != self.members[0]:
            return
        is_over = verdict in (AGREED, DIFFERENT)
        readers = set(self.members) - set(() if is_over else self._missing())
        all_read = self._come([f"read/{rank}" for rank in readers], monotonic() + LINGER_S)
        if all_read and is_over:
            ours = (f"{what}/{rank}" for what in ("here", "read") for rank in self.members)
            for key in ("agreeing", *ours):
                self.shelf.delete_key(key)
            for key in ("claim", "verdict"):
                forget(self.shelf, key)

    def _vote(self, claim: Mapping[str, str], first: Mapping[str, str]) -> None:
        about = _first_difference(claim, first)
        if self.withdrawn.is_set():
            return
        if about is not None:
            self._give(DIFFERENT, _difference(about, self.rank, claim, self.members[0], first), about)
        elif self.shelf.add("agreeing", 1) == len(self.members):
            self._give(AGREED, "")

    def _give(self, verdict: str, reason: str, about: str = "") -> None:
        if not self.withdrawn.is_set():
            settle(self.shelf, "verdict", json.dumps([verdict, reason, about]))

    def _missing(self) -> list[int]:
        return [rank for rank in self.members if not self.shelf.check([f"here/{rank}"])]

    def _whom_it_waits_for(self) -> str:
        missing = self._missing()
        who = f"ranks {missing} did not come" if missing else "all ranks came, but not all of them answered"
        return f"{who} within {self.timeout_s:g} s: start them, or look at their output"

    def _come(self, keys: list[str], deadline_s: float) -> bool:
        left_s = max(deadline_s - monotonic(), 0.001)  # torch takes 0 for no limit
        try:
            self.shelf.wait(keys, timedelta(seconds=left_s))
        except DistNetworkError:
            raise
        except RuntimeError:
            return False
        return True


def _texts(said: bytes) -> Mapping[str, str]:
    found = mapped(said)
    require(all(isinstance(text, str) for text in found.values()))
    return found


def _verdict(said: bytes) -> list[str]:
    found = listed(said, 3)
    require(all(isinstance(text, str) for text in found) and found[0] in (AGREED, DIFFERENT, LATE, LEFT))
    return found


def _first_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """A name; that of the question goes before all others."""
    names = sorted(ours.keys() | theirs.keys(), key=lambda name: (name != QUESTION, name))
    return next((name for name in names if ours.get(name) != theirs.get(name)), None)


def _difference(about: str, rank: int, claim: Mapping[str, str], first_rank: int, first: Mapping[str, str]) -> str:
    texts = _excerpt(claim.get(about, "nothing"), first.get(about, "nothing"))
    return f"rank {rank} disagrees with rank {first_rank} about {about}: {texts}"


def _disagreement(topic: str, reason: str, about: str) -> DisagreementError:
    return DisagreementError(f"{topic}: {reason}. Start every rank with the same code and arguments", about)


def _excerpt(mine: str, first: str, width: int = 160) -> str:
    """Both texts from shortly before the place where they part."""
    part = next((i for i, (a, b) in enumerate(zip(mine, first, strict=False)) if a != b), min(len(mine), len(first)))
    start = max(0, part - width // 4)
    cut = [("..." if start else "") + text[start : start + width] for text in (mine, first)]
    return f"{cut[0]!r} against {cut[1]!r}"
