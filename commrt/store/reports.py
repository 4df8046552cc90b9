# SPDX-License-Identifier: Apache-2.0
"""What failing ranks leave on the store, so that the error of each names what its peers saw.

For the thread that ends a world (`commrt.runtime.ending`), which may have to wait. Writes to the
store, and to the error that it is given. No error of the store leaves these functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import TypeVar

from torch.distributed import Store

from commrt.errors import PeerLost, TransportError
from commrt.store.client import call_store
from commrt.store.parsing import MALFORMED, typed
from commrt.threads.deadline import Deadline

LINGER_S = 3.0
"""How long a failing rank that holds the store waits for the others to read the reports."""
POLL_S = 0.01
GRACE_S = 1.0
BROKEN_GRACE_S = 0.1
"""How much later than this rank a peer may report after a deadline or a broken connection.

Gloo breaks one at the deadline itself. A rank of one host breaks its connections after its report.
"""

CLOSED = (
    "Rank {peer} had closed its world or process group and makes no more calls: if it ran out of"
    " data, wrap the loop in replica.join(), with DDP in model.join(), or let ranks without a batch"
    " call replica.average(); other calls are for all ranks"
)

T = TypeVar("T")


def leave_report(store: Store, rank: int, failure: BaseException) -> bool:
    """Write what `rank` saw to `store`; return False if that does not answer."""
    peer = failure.place.peer if isinstance(failure, TransportError) else None
    report = json.dumps([peer, f"{type(failure).__name__}: {failure}"])

    key = f"report/{rank}"

    def write() -> bool:
        store.set(key, report)
        return bool(store.check([key]))  # torch does not wait for an answer to `set`

    return bool(_answered(write))


def note_closed(store: Store, rank: int) -> None:
    """Write to `store` that `rank` has closed its world, without a failure."""
    _answered(lambda: store.set(_closed_key(rank), ""))


def _closed_key(rank: int) -> str:
    return f"has closed/{rank}"


def diagnose(
    store: Store, rank: int, size: int, failure: BaseException, *, one_host: bool = False
) -> None:
    """Set ``failure.elsewhere`` to what the peers saw for which it waited, or others for it.

    Counts this rank on the store among those that have read the reports. If all are on `one_host`,
    who breaks a connection has reported already, or is dead.
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
    """Keep this process's store until the others have read the reports, at most `LINGER_S`."""
    _answered(lambda: store.wait(["reports read"], timedelta(seconds=LINGER_S)), LINGER_S)


def _trail(
    store: Store, rank: int, peer: int | None, saw: str, broken_grace_s: float
) -> Iterator[str]:
    seen = {rank}
    while peer is not None and peer not in seen:
        seen.add(peer)
        if store.check([_closed_key(peer)]):
            yield CLOSED.format(peer=peer)
            return
        deadline = Deadline(broken_grace_s if saw.startswith(PeerLost.__name__) else GRACE_S)
        while not store.check([f"report/{peer}"]) and deadline.left_s > 0:
            # a request that waits would hold up all groups that share its connection
            Event().wait(POLL_S)
        if not store.check([f"report/{peer}"]):
            yield f"Rank {peer} reported nothing: look there first"
            return
        waited_for, saw = typed(json.loads(store.get(f"report/{peer}")), int | None, str)
        yield f"Rank {peer} saw {saw:.1000}"
        peer = waited_for


def _count(store: Store, size: int) -> None:
    if store.add("reports", 1) >= size - 1:  # the one at fault leaves none
        store.set("reports read", "")


def _answered(request: Callable[[], T], waits_s: float = 0.0) -> T | None:
    """Return the store's answer or None: to this rank's failure a lost store adds nothing."""
    with suppress(RuntimeError, TransportError, *MALFORMED):
        return call_store(request, waits_s)
    return None
