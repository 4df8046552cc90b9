# SPDX-License-Identifier: Apache-2.0
"""What each rank writes on the store for all others to read: written, gathered, deleted.

Requests wait on the caller's thread, which `commrt.store.client.call_store` may give a limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event
from typing import TypeVar

from torch.distributed import DistNetworkError, Store

from commrt.errors import DeadlineExceeded, Place
from commrt.store.parsing import parse
from commrt.threads.deadline import clock

LINGER_S = 5.0
"""How long the rank that holds the store waits for the others to read the records."""
POLL_S = 0.01

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
    read the records deletes them, unless each of them `stays`, for ranks that expect other members.
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
            f"timed out: ranks {missing} did not come within {timeout_s:g} s: start all of them,"
            " with the same world size, and look at the output of those that are missing",
            Place(rank, peer=next(iter(missing), None)),
        ) from error
    texts = {peer: store.get(key) for peer, key in keys.items()}
    counter = f"read/{members[0]}"
    if not stays and store.add(counter, 1) == len(members):
        for key in (counter, *keys.values()):
            store.delete_key(key)
    return {peer: parse(f"the record of rank {peer}", text, read) for peer, text in texts.items()}


def wait_until_read(store: Store, rank: int, members: Sequence[int]) -> None:
    """Record that `rank` has read all; the first rank, which may hold the store, leaves last."""
    store.add("read", 1)
    deadline_s = clock.now_s() + LINGER_S
    while rank == members[0] and clock.now_s() < deadline_s:
        if store.add("read", 0) >= sum(store.check([f"record/{peer}"]) for peer in members):
            return
        Event().wait(POLL_S)
