# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other on the store: records, claims that must be equal, what they saw when
they failed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Event
from typing import TypeVar

from torch.distributed import DistNetworkError, Store

from commrt.errors import (
    DeadlineExceeded,
    DisagreementError,
    PeerLost,
    Place,
    TransportError,
    UsageError,
)
from commrt.store.client import MALFORMED, call_store, parse, parse_int, require, typed
from commrt.threads.deadline import Deadline, clock

TOPIC = "topic"
LINGER_S = 5.0
REPORTS_LINGER_S = 3.0
"""How long the rank that holds the store waits for the others to read the records, and a failing
one the reports.
"""
POLL_S = 0.01
GRACE_S = 1.0
BROKEN_GRACE_S = 0.1
"""How much later than this rank a peer may report: after a deadline, and after a connection that
Gloo breaks, at the deadline itself. A rank of one host breaks its connections after its report.
"""

T = TypeVar("T")


def gather(
    store: Store,
    rank: int,
    members: Sequence[int],
    record: object,
    timeout_s: float,
    read: Callable[[bytes], T],
    *,
    stays: bool = False,
) -> dict[int, T]:
    """Write `record` as JSON to the store, and return those of all `members`, parsed by `read`.

    Each gathering of some members needs a prefix of the store for itself. The last of them to have
    read the records deletes them, unless they are to `stay` for ranks that expect other members.
    Raises `DeadlineExceeded` with those that do not come.
    """
    store.set(f"record/{rank}", json.dumps(record))
    keys = {peer: f"record/{peer}" for peer in members}
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    except DistNetworkError:
        raise
    except RuntimeError as error:
        missing = [peer for peer, key in keys.items() if not store.check([key])]
        raise DeadlineExceeded(
            f"ranks {missing} did not come within {timeout_s:g} s: start all of them, with the same"
            " world size, and look at the output of those that are missing",
            Place(rank, next(iter(missing), None)),
        ) from error
    texts = {peer: store.get(key) for peer, key in keys.items()}
    counter = f"read/{members[0]}"
    if not stays and store.add(counter, 1) == len(members):
        for key in (counter, *keys.values()):
            store.delete_key(key)
    return {peer: parse(f"the record of rank {peer}", text, read) for peer, text in texts.items()}


def wait_until_read(store: Store, rank: int, members: Sequence[int]) -> None:
    """Record that `rank` needs no more of what `gather` left; the first rank, which may hold the
    store, leaves last.
    """
    store.add("read", 1)
    deadline_s = clock.now_s() + LINGER_S
    while rank == members[0] and clock.now_s() < deadline_s:
        if store.add("read", 0) >= sum(store.check([f"record/{peer}"]) for peer in members):
            return
        Event().wait(POLL_S)


def find_disagreement(
    topic: str, claims: Mapping[int, Mapping[str, str]]
) -> DisagreementError | None:
    """Return the error for the first of these `claims` that differs from the first one; None if
    they are equal.
    """
    (first, expected), *others = claims.items()
    for rank, claim in others:
        differing = [
            name for name in claim.keys() | expected.keys() if claim.get(name) != expected.get(name)
        ]
        if differing:
            about = min(differing, key=lambda name: (name != TOPIC, name))
            texts = _excerpt(claim.get(about, "nothing"), expected.get(about, "nothing"))
            return DisagreementError(
                f"{topic}: rank {rank} disagrees with rank {first} about {about}: {texts}. Start"
                " every rank with the same code and arguments",
                about,
            )
    return None


def _excerpt(mine: str, first: str, width: int = 160) -> str:
    """Return both texts from shortly before the place where they differ."""
    part = next(
        (i for i, (a, b) in enumerate(zip(mine, first, strict=False)) if a != b),
        min(len(mine), len(first)),
    )
    start = max(0, part - width // 4)
    cut = [("..." if start else "") + text[start : start + width] for text in (mine, first)]
    return f"{cut[0]!r} against {cut[1]!r}"


KEY = "world configuration"


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """The world, and the model that it trains."""

    size: int
    """The number of ranks at the start."""
    places: int
    """For how many ranks there is a place."""
    host: str | None
    """The one host of all ranks, if they exchange through shared memory; None if they use a
    network.
    """
    model: int
    """The number of the attached model: 0 for the first."""
    claim: Mapping[str, str]
    """What must be the same on every rank, by name."""
    transport: str | None = None
    """The one that COMMRT_TRANSPORT requires."""

    @staticmethod
    def read(store: Store) -> WorldConfig | None:
        """Return the configuration on `store`, None before there is one; raise `UsageError` if
        training has ended.
        """
        if not store.check([KEY]):
            return None
        config = parse(KEY, store.get(KEY), _parse_config)
        if config is None:
            raise UsageError(
                "this process comes to a world whose training has ended: a process that takes the"
                " place of a lost rank must start earlier; to train anew, start all ranks again"
            )
        return config

    def publish(self, store: Store) -> None:
        """Write this configuration to `store` unless one is there or was withdrawn.

        Every rank calls it.
        """
        store.compare_set(KEY, "", json.dumps(asdict(self)))

    @staticmethod
    def withdraw(store: Store) -> None:
        """Record that training has ended."""
        store.set(KEY, json.dumps(None))

    def require_place(
        self, rank: int, size: int, places: int, host: str | None, transport: str | None = None
    ) -> None:
        """Raise unless a process on `host` that starts as `rank` of `size` can take that rank's
        place.
        """
        if transport != self.transport:
            raise DisagreementError(
                f"rank {rank} starts with COMMRT_TRANSPORT={transport or 'unset'}, and the others"
                f" train with {self.transport or 'unset'}: set it as they did"
            )
        if size != self.size:
            raise DisagreementError(
                f"rank {rank} starts with a world of {size} ranks, and {self.size} ranks train"
                " already: set the launcher's variables as they were for the process that it"
                " replaces"
            )
        if places != self.places:
            raise DisagreementError(
                f"rank {rank} starts with places for {places} ranks, and the others with"
                f" {self.places}: call init(up_to=) as they did"
            )
        if self.host not in {None, host}:
            raise UsageError(
                f"rank {rank} starts on another host than the other ranks, which run on one host"
                " through shared memory: start it there, or start all ranks with"
                " COMMRT_TRANSPORT=gloo"
            )

    def require_same(self, rank: int, model: int, claim: Mapping[str, str]) -> None:
        """Raise unless the model that `rank` attaches is the one that the others train."""
        if model != self.model:
            raise UsageError(
                f"the others train their attached model number {self.model}, and this process,"
                f" which takes the place of rank {rank}, attaches its number {model}: start all"
                " ranks again"
            )
        another = 0 if rank else 1
        topic = f"this process takes the place of rank {rank}"
        if error := find_disagreement(topic, {another: self.claim, rank: claim}):
            raise error


def _parse_config(text: bytes) -> WorldConfig | None:
    """Return None if it was withdrawn."""
    if (fields := json.loads(text)) is None:
        return None
    config = WorldConfig(**fields)
    parse_int(config.size, 1)
    parse_int(config.places, config.size)
    parse_int(config.model)
    require(isinstance(config.host, str | None) and isinstance(config.transport, str | None))
    require(all(isinstance(value, str) for value in dict(config.claim).values()))
    return config


def leave_report(store: Store, rank: int, failure: BaseException) -> bool:
    """Write what `rank` saw to `store`; return False if that does not answer."""
    peer = failure.place.peer if isinstance(failure, TransportError) else None
    report = json.dumps([peer, f"{type(failure).__name__}: {failure}"])

    def write() -> bool:
        store.set(key := f"report/{rank}", report)
        return bool(store.check([key]))  # torch does not wait for an answer to `set`

    return bool(_answered(write))


def diagnose(
    store: Store, rank: int, size: int, failure: BaseException, *, one_host: bool = False
) -> None:
    """Add to `failure` what the peers saw for which it was waiting, directly or through others.

    If all are on `one_host`, who breaks a connection has reported already, or is dead.
    """
    broken_grace_s = 0.0 if one_host else BROKEN_GRACE_S
    if isinstance(failure, TransportError) and failure.place.peer is not None:
        first = failure.place.peer
        kind = type(failure).__name__
        sentences = _answered(
            lambda: list(_trail(store, rank, first, kind, broken_grace_s)), GRACE_S
        )
        failure.elsewhere = ". ".join(sentences or ())
    _answered(lambda: _count(store, size))


def wait_for_readers(store: Store) -> None:
    """Keep the store of this process alive until the others have read the reports, at most
    `REPORTS_LINGER_S`.
    """
    _answered(
        lambda: store.wait(["reports read"], timedelta(seconds=REPORTS_LINGER_S)), REPORTS_LINGER_S
    )


def _trail(
    store: Store, rank: int, peer: int | None, saw: str, broken_grace_s: float
) -> Iterator[str]:
    seen = {rank}
    while peer is not None and peer not in seen:
        seen.add(peer)
        deadline = Deadline(broken_grace_s if saw.startswith(PeerLost.__name__) else GRACE_S)
        while not store.check([f"report/{peer}"]) and deadline.left_s > 0:
            # a request that waits would hold up all groups that share its connection
            Event().wait(POLL_S)
        if not store.check([f"report/{peer}"]):
            yield f"Rank {peer} reported nothing: look there first"
            return
        reporter, (peer, saw) = (
            peer,
            typed(json.loads(store.get(f"report/{peer}")), int | None, str),
        )
        yield f"Rank {reporter} saw {saw:.1000}"


def _count(store: Store, size: int) -> None:
    if store.add("reports", 1) >= size - 1:  # the one at fault leaves none
        store.set("reports read", "")


def _answered(request: Callable[[], T], waits_s: float = 0.0) -> T | None:
    """Return the store's answer, or None: this rank has failed already, and a lost store adds
    nothing to that.
    """
    with suppress(RuntimeError, TransportError, *MALFORMED):
        return call_store(request, waits_s)
    return None
