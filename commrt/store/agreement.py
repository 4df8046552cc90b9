# SPDX-License-Identifier: Apache-2.0
"""Records of all ranks, gathered on the store; claims that must be equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from threading import Event
from typing import TypeVar

from torch.distributed import DistNetworkError, Store

from commrt.errors import DeadlineExceeded, DisagreementError, Place
from commrt.store.client import parse
from commrt.threads.clock import now_s

__all__ = ["LINGER_S", "TOPIC", "excerpt", "find_disagreement", "first_difference", "gather", "wait_until_read"]

TOPIC = "topic"
LINGER_S, LINGER_POLL_S = 5.0, 0.01
"""How long the rank that holds the store waits for the others to read the records, and how often it looks."""

T = TypeVar("T")


def gather(
    store: Store, rank: int, members: Sequence[int], record: object, timeout_s: float, read: Callable[[bytes], T]
) -> dict[int, T]:
    """Write `record` as JSON to the store, and return those of all `members`, parsed by `read`.

    Each gathering needs a prefix of the store for itself. Raises `DeadlineExceeded` with the ranks that do not come.
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
            f"ranks {missing} did not come within {timeout_s:g} s: start all of them, with the same world size, and "
            "look at the output of those that are missing",
            Place(rank, next(iter(missing), None)),
        ) from error
    return {peer: parse(f"the record of rank {peer}", store.get(key), read) for peer, key in keys.items()}


def wait_until_read(store: Store, rank: int, members: Sequence[int]) -> None:
    """Record that `rank` needs no more of what `gather` left; the first rank, which may hold the store, leaves last."""
    store.add("read", 1)
    deadline_s = now_s() + LINGER_S
    while rank == members[0] and now_s() < deadline_s:
        if store.add("read", 0) >= sum(store.check([f"record/{peer}"]) for peer in members):
            return
        Event().wait(LINGER_POLL_S)


def find_disagreement(topic: str, claims: Mapping[int, Mapping[str, str]]) -> DisagreementError | None:
    """Return the error for the first of these `claims` that differs from the first one; None if they are equal."""
    (first, expected), *others = claims.items()
    for rank, claim in others:
        if (about := first_difference(claim, expected)) is not None:
            texts = excerpt(claim.get(about, "nothing"), expected.get(about, "nothing"))
            return DisagreementError(
                f"{topic}: rank {rank} disagrees with rank {first} about {about}: {texts}. Start every rank with the "
                "same code and arguments",
                about,
            )
    return None


def first_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return the first name under which the claims differ; the topic comes before all others."""
    names = sorted(ours.keys() | theirs.keys(), key=lambda name: (name != TOPIC, name))
    return next((name for name in names if ours.get(name) != theirs.get(name)), None)


def excerpt(mine: str, first: str, width: int = 160) -> str:
    """Return both texts from shortly before the place where they differ."""
    part = next((i for i, (a, b) in enumerate(zip(mine, first, strict=False)) if a != b), min(len(mine), len(first)))
    start = max(0, part - width // 4)
    cut = [("..." if start else "") + text[start : start + width] for text in (mine, first)]
    return f"{cut[0]!r} against {cut[1]!r}"
