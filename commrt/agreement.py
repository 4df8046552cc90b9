# SPDX-License-Identifier: Apache-2.0
"""Do all ranks mean the same? Asked on the store before anything is sent, because a mismatch later is a hang."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from commrt.errors import DeadlineExceeded, DisagreementError, Place

__all__ = ["agree"]

AGREED = "agreed"
LINGER_S = 5.0
"""How long rank 0 waits for the others to read a bad verdict."""


def agree(store: Store, rank: int, size: int, topic: str, claim: Mapping[str, str], timeout_s: float) -> None:
    """Return when all `size` ranks made the same `claim` under `topic`; a topic is used once.

    Raises `DisagreementError` on **every** rank if one differs from rank 0, naming the rank and the first
    field that differs; `DeadlineExceeded` with the missing ranks if some do not come.
    Cost: about five store operations per rank.
    """
    shelf = PrefixStore(topic, store)
    shelf.set(f"here/{rank}", "")
    if rank == 0:
        shelf.set("claim", json.dumps(dict(claim)))
    _wait(shelf, "claim", rank, size, topic, timeout_s)
    objection = _difference(rank, claim, json.loads(shelf.get("claim")))
    if objection:
        shelf.set("verdict", objection)
    elif shelf.add("agreeing", 1) == size:
        shelf.compare_set("verdict", "", AGREED)
    _wait(shelf, "verdict", rank, size, topic, timeout_s)
    verdict = shelf.get("verdict").decode()
    if verdict != AGREED:
        _let_all_read(shelf, rank, size)
        raise DisagreementError(f"{topic}: {verdict}. Start every rank with the same code and arguments")


def _let_all_read(shelf: Store, rank: int, size: int) -> None:
    """The store may live in rank 0, and end with it: nobody should learn of a verdict by a lost connection."""
    if shelf.add("read", 1) == size:
        shelf.set("all read", "")
    if rank == 0:
        with suppress(RuntimeError):
            shelf.wait(["all read"], timedelta(seconds=LINGER_S))


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


def _wait(shelf: Store, key: str, rank: int, size: int, topic: str, timeout_s: float) -> None:
    try:
        shelf.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [other for other in range(size) if not shelf.check([f"here/{other}"])]
        who = f"ranks {missing} did not come" if missing else "the others did not finish"
        what = f"{topic}: {who} within {timeout_s:g} s: start them, or look at their output"
        raise DeadlineExceeded(what, Place(rank=rank)) from error
