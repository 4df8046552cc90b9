# SPDX-License-Identifier: Apache-2.0
"""Watches a running job from outside, by what its ranks write to their store (``COMMRT_LIVE=1``).

On the thread of the command; it only reads the store.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Event
from time import time
from typing import NamedTuple

from torch.distributed import DistError, TCPStore

from commrt.errors import CommrtError, TransportError, UsageError
from commrt.store.client import call_store
from commrt.store.late import Late, LateWatch
from commrt.store.live import PERIOD_S, Record, lost_of, read

ENDED = "ended"
LOST = "lost"
CONNECT_S = 5.0
"""How long the job's store may take to answer."""


class Row(NamedTuple):
    """How one rank gets on; rates are of the time since the look before."""

    rank: int
    host: str
    step: int
    steps_per_s: float | None
    exposed: float | None
    """The share of time that it waited for others in steps."""
    state: str
    """``computes``, ``waits for bucket 0``, ``ended``, ``lost``, or how it is late."""


class Look(NamedTuple):
    """One look at a job."""

    rows: Sequence[Row]
    late: Sequence[Late]


def connect(address: str) -> TCPStore:
    """Return a connection to the store at `address`, such as ``node1:29500``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(
            f"--watch {address!r:.80}: give MASTER_ADDR:MASTER_PORT of the job, such as node1:29500"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()  # torch's tries print frames
        return call_store(
            lambda: TCPStore(host, int(port), timeout=timedelta(seconds=CONNECT_S)), CONNECT_S
        )
    except (OSError, OverflowError, RuntimeError, CommrtError) as error:
        raise TransportError(
            f"no store at {address} ({error}): is the job running? Start it with"
            f" `torchrun --master-port {port}`, without --standalone: otherwise torchrun takes a"
            " random port"
        ) from error


def looks(store: TCPStore) -> Iterator[Look]:
    """Yield a look per second, until all ranks have closed their worlds, or the store ends."""
    watch = LateWatch()
    before: dict[int, Record] = {}
    with suppress(CommrtError, DistError):
        while True:
            records = call_store(lambda: read(store))
            late = watch.look(records, time())
            words = {each.rank: f"{each.what}: {each.late_s:.3g} s" for each in late}
            words |= dict.fromkeys(lost_of(records), LOST)
            yield Look([_row(each, before.get(each.rank), words) for each in records], late)
            lost = lost_of(records)
            if records and all(each.closed or each.rank in lost for each in records):
                return
            before = {each.rank: each for each in records}
            Event().wait(PERIOD_S)


def end_of(last: Look, address: str) -> str:
    """Return how the job at `address` ended, of which `last` was the last look."""
    running = [row.rank for row in last.rows if row.state not in (ENDED, LOST)]
    if last.rows and not running:
        return "the job has ended: all ranks have closed their worlds, or their processes ended"
    left = f"; ranks {running} had not said that they end" if running else ""
    return (
        f"the store at {address} is gone or does not answer{left}: the job has ended, or the host"
        " of its store cannot be reached. Look at the job's output"
    )


def _row(now: Record, before: Record | None, late: dict[int, str]) -> Row:
    steps_per_s = exposed = None
    if before is not None and now.number > before.number:  # else of the process that it replaces
        passed_s = now.time_s - before.time_s
        steps_per_s = (now.steps - before.steps) / passed_s
        # a wait counts where it ends, and may have begun long before
        exposed = min((now.exposed_s - before.exposed_s) / passed_s, 1.0)
    state = "computes" if now.bucket is None else f"waits for bucket {now.bucket}"
    state = ENDED if now.closed else late.get(now.rank, state)
    return Row(now.rank, now.host, now.step, steps_per_s, exposed, state)
