# SPDX-License-Identifier: Apache-2.0
"""What ranks of a running job tell of themselves on the store, for whoever watches the job.

Records lie outside of all prefixes, so that the store's address is enough to find them. Of several
worlds that share a store the latest one's are there. Writes nothing else; on any thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store

from commrt.store.parsing import parse

PREFIX = "commrt live"
PERIOD_S = 1.0
"""How often a rank writes its record."""


@dataclass(frozen=True, slots=True)
class Record:
    """One rank, at `time_s`; times are seconds since 1970 by the clock of its host."""

    rank: int
    host: str
    number: int
    """Counts this rank's records."""
    time_s: float
    step: int
    """The next step, counted from 0."""
    steps: int
    """Steps that this rank has made since `attach`."""
    since_s: float
    """When it was first seen at this number of steps."""
    exposed_s: float
    """Seconds that it has waited in these steps."""
    bucket: int | None
    """The bucket for which it waits now; None while it computes, or if that is not known."""
    closed: bool = False
    """True if it has closed its world or failed, or its process ends."""
    lost: tuple[int, ...] = ()
    """Ranks that its world has lost, and that were not replaced."""


def base_of(store: Store) -> Store:
    """Return the store below all prefixes of `store`."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return store


def publish(store: Store, record: Record, size: int) -> None:
    """Write the `record` of one of `size` ranks to `store`, which has no prefix."""
    store.set(f"{PREFIX}/size", str(size))
    store.set(f"{PREFIX}/{record.rank}", json.dumps(asdict(record)))


def read(store: Store) -> Sequence[Record]:
    """Return the records on `store`, by rank; empty if no rank writes any."""
    if not store.check([f"{PREFIX}/size"]):
        return []
    size = parse("the number of ranks", store.get(f"{PREFIX}/size"), int)
    keys = [f"{PREFIX}/{rank}" for rank in range(size)]
    there = keys if store.check(keys) else [key for key in keys if store.check([key])]
    return [parse("what a rank says of itself", store.get(key), _record) for key in there]


def lost_of(records: Sequence[Record]) -> set[int]:
    """Return the ranks that the newest record names as lost: its own rank was none of them."""
    newest = max(records, key=lambda record: record.time_s, default=None)
    return set(newest.lost) if newest else set()


def _record(text: bytes) -> Record:
    fields: dict[str, Any] = json.loads(text)
    return Record(**fields)
