# SPDX-License-Identifier: Apache-2.0
"""Reports of failing ranks on the store, so that an error says what happened elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import TypeVar

from torch.distributed import Store

from commrt.errors import TransportError
from commrt.store.client import MALFORMED, STORE_ANSWER_S, call_store, parse_dict, parse_int
from commrt.threads.deadline import Deadline

__all__ = ["diagnose", "leave_report", "wait_for_readers"]

GRACE_S = 1.0
"""How much later than this rank a peer may report: deadlines do not expire at the same instant."""
POLL_S = 0.02
"""Between two questions whether a report is there."""
LINGER_S = 3.0
"""How long a failing rank that holds the store waits for the others to read the reports."""

T = TypeVar("T")


def leave_report(store: Store, rank: int, failure: BaseException) -> None:
    """Write what `rank` saw to `store`."""
    peer = failure.place.peer if isinstance(failure, TransportError) else None
    report = json.dumps({"peer": peer, "saw": f"{type(failure).__name__}: {failure}"})
    _answered(lambda: store.set(_report_key(rank), report), STORE_ANSWER_S)


def diagnose(store: Store, rank: int, size: int, failure: BaseException) -> None:
    """Add to `failure` what the peers saw for which it was waiting, directly or through others."""
    if isinstance(failure, TransportError) and failure.place.peer is not None:
        first = failure.place.peer
        sentences = _answered(lambda: list(_trail(store, rank, first)), STORE_ANSWER_S + GRACE_S)
        failure.elsewhere = ". ".join(sentences or ())
    _answered(lambda: _count(store, size), STORE_ANSWER_S)


def wait_for_readers(store: Store) -> None:
    """Keep the store of this process alive until the others have read the reports, at most `LINGER_S`."""
    _answered(lambda: store.wait(["reports read"], timedelta(seconds=LINGER_S)), LINGER_S + STORE_ANSWER_S)


def _trail(store: Store, rank: int, peer: int | None) -> Iterator[str]:
    seen = {rank}
    while peer is not None and peer not in seen:
        seen.add(peer)
        if not _is_there(store, _report_key(peer), GRACE_S):
            yield f"Rank {peer} reported nothing: look there first"
            return
        report = parse_dict(store.get(_report_key(peer)))
        yield f"Rank {peer} saw {report['saw']!s:.1000}"
        peer = None if report["peer"] is None else parse_int(report["peer"])


def _is_there(store: Store, key: str, limit_s: float) -> bool:
    """Return True once `key` is there, False after `limit_s`.

    It asks again and again. A request that waits would hold up the reports of all groups that share its connection.
    """
    deadline = Deadline(limit_s)
    while not (found := store.check([key])) and deadline.left_s > 0:
        Event().wait(POLL_S)
    return bool(found)


def _count(store: Store, size: int) -> None:
    if store.add("reports", 1) >= size - 1:  # the one at fault leaves none
        store.set("reports read", "")


def _report_key(rank: int) -> str:
    return f"report/{rank}"


def _answered(request: Callable[[], T], limit_s: float) -> T | None:
    """Return the store's answer, or None: this rank has failed already, and a lost store adds nothing to that."""
    with suppress(RuntimeError, TransportError, *MALFORMED):
        return call_store(request, limit_s)
    return None
