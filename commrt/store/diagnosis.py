# SPDX-License-Identifier: Apache-2.0
"""Whose fault was it? A rank's deadline often expires because its peer waits for a third one.

Every failing rank leaves a report on the store: what it saw, and which peer it was waiting for. Following these from
peer to peer leads to the rank that left none: it is dead, stopped, or elsewhere in its program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torch.distributed import Store

from commrt.errors import TransportError
from commrt.store.asking import ANSWER_S, ask
from commrt.store.hearsay import GARBLED, mapped, number

__all__ = ["diagnose", "leave_report", "linger"]

GRACE_S = 1.0
"""How long a peer may be late with its own report: deadlines do not expire at the same instant."""
LINGER_S = 3.0
"""How long a failing rank that holds the store stays, for the others to read the reports."""

T = TypeVar("T")


def leave_report(store: Store, rank: int, failure: BaseException) -> None:
    """Tell the others what `rank` saw."""
    peer = failure.place.peer if isinstance(failure, TransportError) else None
    report = json.dumps({"peer": peer, "saw": f"{type(failure).__name__}: {failure}"})
    _answered(lambda: store.set(_shelf(rank), report), ANSWER_S)


def diagnose(store: Store, rank: int, size: int, failure: BaseException) -> None:
    """Complete `failure` with what the ranks saw that it was waiting for, directly or through others."""
    if isinstance(failure, TransportError) and failure.place.peer is not None:
        first = failure.place.peer
        sentences = _answered(lambda: list(_trail(store, rank, first)), ANSWER_S + GRACE_S)
        failure.elsewhere = ". ".join(sentences or ())
    _answered(lambda: _count(store, size), ANSWER_S)


def linger(store: Store) -> None:
    """Keep the store of this process alive until the others have read it, or for a while."""
    _answered(lambda: store.wait(["reports read"], timedelta(seconds=LINGER_S)), LINGER_S + ANSWER_S)


def _trail(store: Store, rank: int, peer: int | None) -> Iterator[str]:
    seen = {rank}
    while peer is not None and peer not in seen:
        seen.add(peer)
        try:
            store.wait([_shelf(peer)], timedelta(seconds=GRACE_S))
        except RuntimeError:
            yield f"Rank {peer} reported nothing: look there first"
            return
        report = mapped(store.get(_shelf(peer)))
        yield f"Rank {peer} saw {report['saw']!s:.1000}"
        peer = None if report["peer"] is None else number(report["peer"])


def _count(store: Store, size: int) -> None:
    if store.add("reports", 1) >= size - 1:  # the one at fault leaves none
        store.set("reports read", "")


def _shelf(rank: int) -> str:
    return f"report/{rank}"


def _answered(question: Callable[[], T], limit_s: float) -> T | None:
    """The store's answer, or None: this rank has failed already, and a lost store is no news beside that."""
    with suppress(RuntimeError, TransportError, *GARBLED):
        return ask(question, limit_s)
    return None
