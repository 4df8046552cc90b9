# SPDX-License-Identifier: Apache-2.0
"""Compare a claim over all ranks before anything is sent; and the configuration that replacement ranks must match.

The first verdict stands for every rank. A rank that gives up waiting writes the verdict "late", and one that is
interrupted the verdict "left". So no rank sees agreement where another one sees an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from threading import Event
from time import monotonic

from torch.distributed import DistNetworkError, PrefixStore, Store

from commrt.errors import DeadlineExceeded, DisagreementError, PeerLost, Place, TransportError, UsageError
from commrt.membership.store_client import (
    STORE_ANSWER_S,
    call_store,
    delete_once,
    parse,
    parse_dict,
    parse_int,
    parse_list,
    require,
    set_once,
)

__all__ = ["TOPIC", "WorldConfig", "agree", "announce_leaving", "find_disagreement"]

TOPIC = "topic"
AGREED, DIFFERENT, LATE, LEFT = "agreed", "different", "late", "left"
LINGER_S = 5.0
"""How long the first rank waits for the others to read a verdict."""


def agree(
    store: Store,
    rank: int,
    members: Sequence[int],
    topic: str,
    claim: Mapping[str, str],
    timeout_s: float,
    prefix: str | None = None,
) -> None:
    """Return when all `members` made the same `claim` under `topic`.

    `prefix` is where the keys of this comparison stand on the store, by default the topic; it is used once. If it does
    not depend on the topic, ranks that compare different topics disagree about it.

    Raises on every rank: `DisagreementError` with the rank and the first field that differ from the first rank;
    `DeadlineExceeded` with the missing ranks, or with rank 0 if the store gives no answer; `PeerLost` if a rank was
    interrupted or the store is gone. The first rank may hold the store: it returns after all have read the verdict, at
    the latest `LINGER_S` later, and deletes its keys. Cost: seven store operations per rank, two more per rank on the
    first.
    """
    comparison = _Comparison(PrefixStore(prefix or topic, store), rank, members, timeout_s, monotonic() + timeout_s)
    try:
        verdict, reason, about = call_store(
            lambda: comparison.verdict({TOPIC: topic, **claim}), timeout_s + STORE_ANSWER_S, rank
        )
    except BaseException as error:
        comparison.withdrawn.set()
        if not isinstance(error, TransportError):  # or the store gives no answers
            announce_leaving(comparison.prefix, rank, error)
        raise
    with suppress(RuntimeError, TransportError):  # the verdict is known
        call_store(lambda: comparison.leave(verdict), LINGER_S + STORE_ANSWER_S, rank)
    if verdict == DIFFERENT:
        raise _disagreement(topic, reason, about)
    if verdict == LATE:
        raise DeadlineExceeded(f"{topic}: {reason}", Place(rank=rank))
    if verdict == LEFT:
        raise PeerLost(f"{topic}: {reason}", Place(rank=rank))


def find_disagreement(topic: str, claims: Mapping[int, Mapping[str, str]]) -> DisagreementError | None:
    """Return the error that `agree` would raise for these `claims`, in order of rank; None if they are equal."""
    (first, expected), *others = claims.items()
    for rank, claim in others:
        if (about := _first_difference(claim, expected)) is not None:
            return _disagreement(topic, _difference(about, rank, claim, first, expected), about)
    return None


def announce_leaving(prefix: Store, rank: int, error: BaseException) -> None:
    """End the comparison under `prefix` on all ranks, because `rank` leaves it with `error`."""

    def tell() -> None:
        # An abandoned thread may hold the connection until its wait ends.
        ours: Store = prefix.clone()  # type: ignore[attr-defined]  # torch's stub is behind
        reason = f"rank {rank} left it by a {type(error).__name__}: look at its output"
        set_once(ours, "verdict", json.dumps([LEFT, reason, ""]))
        set_once(ours, "claim", "{}")
        ours.set(f"read/{rank}", "")

    with suppress(AttributeError, RuntimeError, TransportError):  # not every torch can clone
        call_store(tell, STORE_ANSWER_S, rank)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """One comparison as one rank sees it."""

    prefix: Store
    rank: int
    members: Sequence[int]
    """The first of them writes its claim, and the others compare with it."""
    timeout_s: float
    deadline_s: float
    withdrawn: Event = field(default_factory=Event)
    """This rank has left, and its thread must not write for it any more."""

    def verdict(self, claim: Mapping[str, str]) -> list[str]:
        """Return the verdict that stands, its reason, and the field that it is about."""
        self.prefix.set(f"here/{self.rank}", "")
        if self.rank == self.members[0]:
            set_once(self.prefix, "claim", json.dumps(dict(claim)))
        if self._come(["claim"], self.deadline_s):
            self._vote(claim, parse("claim", self.prefix.get("claim"), _texts))
        if not self._come(["verdict"], self.deadline_s):
            self._give(LATE, self._missing_ranks_text())
        if self.withdrawn.is_set():
            return [LEFT, "", ""]
        return parse("verdict", self.prefix.get("verdict"), _verdict)

    def leave(self, verdict: str) -> None:
        """Leave after reading; the first rank leaves last, and deletes the keys unless a rank may still read them."""
        self.prefix.set(f"read/{self.rank}", "")
        if self.rank != self.members[0]:
            return
        is_over = verdict in (AGREED, DIFFERENT)
        readers = set(self.members) - set(() if is_over else self._missing())
        all_read = self._come([f"read/{rank}" for rank in readers], monotonic() + LINGER_S)
        if all_read and is_over:
            ours = (f"{what}/{rank}" for what in ("here", "read") for rank in self.members)
            for key in ("agreeing", *ours):
                self.prefix.delete_key(key)
            for key in ("claim", "verdict"):
                delete_once(self.prefix, key)

    def _vote(self, claim: Mapping[str, str], first: Mapping[str, str]) -> None:
        about = _first_difference(claim, first)
        if self.withdrawn.is_set():
            return
        if about is not None:
            self._give(DIFFERENT, _difference(about, self.rank, claim, self.members[0], first), about)
        elif self.prefix.add("agreeing", 1) == len(self.members):
            self._give(AGREED, "")

    def _give(self, verdict: str, reason: str, about: str = "") -> None:
        if not self.withdrawn.is_set():
            set_once(self.prefix, "verdict", json.dumps([verdict, reason, about]))

    def _missing(self) -> list[int]:
        return [rank for rank in self.members if not self.prefix.check([f"here/{rank}"])]

    def _missing_ranks_text(self) -> str:
        missing = self._missing()
        who = f"ranks {missing} did not come" if missing else "all ranks came, but not all of them answered"
        return f"{who} within {self.timeout_s:g} s: start them, or look at their output"

    def _come(self, keys: list[str], deadline_s: float) -> bool:
        left_s = max(deadline_s - monotonic(), 0.001)  # torch takes 0 for no limit
        try:
            self.prefix.wait(keys, timedelta(seconds=left_s))
        except DistNetworkError:
            raise
        except RuntimeError:
            return False
        return True


def _texts(said: bytes) -> Mapping[str, str]:
    found = parse_dict(said)
    require(all(isinstance(text, str) for text in found.values()))
    return found


def _verdict(said: bytes) -> list[str]:
    found = parse_list(said, 3)
    require(all(isinstance(text, str) for text in found) and found[0] in (AGREED, DIFFERENT, LATE, LEFT))
    return found


def _first_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return the first name under which the claims differ; the topic comes before all others."""
    names = sorted(ours.keys() | theirs.keys(), key=lambda name: (name != TOPIC, name))
    return next((name for name in names if ours.get(name) != theirs.get(name)), None)


def _difference(about: str, rank: int, claim: Mapping[str, str], first_rank: int, first: Mapping[str, str]) -> str:
    texts = _excerpt(claim.get(about, "nothing"), first.get(about, "nothing"))
    return f"rank {rank} disagrees with rank {first_rank} about {about}: {texts}"


def _disagreement(topic: str, reason: str, about: str) -> DisagreementError:
    return DisagreementError(f"{topic}: {reason}. Start every rank with the same code and arguments", about)


def _excerpt(mine: str, first: str, width: int = 160) -> str:
    """Return both texts from shortly before the place where they differ."""
    part = next((i for i, (a, b) in enumerate(zip(mine, first, strict=False)) if a != b), min(len(mine), len(first)))
    start = max(0, part - width // 4)
    cut = [("..." if start else "") + text[start : start + width] for text in (mine, first)]
    return f"{cut[0]!r} against {cut[1]!r}"


KEY = "world configuration"


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """The world, and the model that it trains."""

    size: int
    """Of the world."""
    host: str | None
    """The one host of all ranks, if they exchange through shared memory; None if they use a network."""
    model: int
    """The number of the attached model: 0 for the first."""
    claim: Mapping[str, str]
    """What must be the same on every rank, by name."""
    transport: str | None = None
    """The one that COMMRT_TRANSPORT requires."""

    @staticmethod
    def read(store: Store) -> WorldConfig | None:
        """Return the configuration on `store`, None before there is one; raise `UsageError` if training has ended."""
        if not store.check([KEY]):
            return None
        config = parse(KEY, store.get(KEY), _parse_config)
        if config is None:
            raise UsageError(
                "this process comes to a world whose training has ended: a process that takes the place of a lost "
                "rank must start earlier; to train anew, start all ranks again"
            )
        return config

    def publish(self, store: Store) -> None:
        """Write this configuration to `store` unless one is there or was withdrawn. Every rank calls it."""
        store.compare_set(KEY, "", json.dumps(asdict(self)))

    @staticmethod
    def withdraw(store: Store) -> None:
        """Record that training has ended."""
        store.set(KEY, json.dumps(None))

    def require_place(self, rank: int, size: int, host: str | None, transport: str | None = None) -> None:
        """Raise unless a process on `host` that starts as `rank` of `size` can take that rank's place."""
        if transport != self.transport:
            raise DisagreementError(
                f"rank {rank} starts with COMMRT_TRANSPORT={transport or 'unset'}, and the others train with "
                f"{self.transport or 'unset'}: set it as they did"
            )
        if size != self.size:
            raise DisagreementError(
                f"rank {rank} starts with a world of {size} ranks, and {self.size} ranks train already: set the "
                "launcher's variables as they were for the process that it replaces"
            )
        if self.host not in {None, host}:
            raise UsageError(
                f"rank {rank} starts on another host than the others, who train on one host through shared memory: "
                "start it there, or start all ranks with COMMRT_TRANSPORT=gloo"
            )

    def require_same(self, rank: int, model: int, claim: Mapping[str, str]) -> None:
        """Raise unless the model that `rank` attaches is the one that the others train."""
        if model != self.model:
            raise UsageError(
                f"the others train their attached model number {self.model}, and this process, which takes the place "
                f"of rank {rank}, attaches its number {model}: start all ranks again"
            )
        for name in sorted(self.claim.keys() | claim.keys()):
            mine, theirs = claim.get(name, "nothing"), self.claim.get(name, "nothing")
            if mine != theirs:
                raise DisagreementError(
                    f"this process takes the place of rank {rank}, and differs from the others in {name}: "
                    f"{mine!r:.200} against {theirs!r:.200}. Start it with the same program and options"
                )


def _parse_config(text: bytes) -> WorldConfig | None:
    """Return None if it was withdrawn."""
    if json.loads(text) is None:
        return None
    config = WorldConfig(**parse_dict(text))
    parse_int(config.size, 1)
    parse_int(config.model)
    require(isinstance(config.host, str | None) and isinstance(config.transport, str | None))
    require(all(isinstance(value, str) for value in dict(config.claim).values()))
    return config
