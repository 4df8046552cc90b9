# SPDX-License-Identifier: Apache-2.0
"""Injected faults: transfers that fail, are delayed or dropped, chosen by rank, step and bucket.

`with_faults` replaces the method `bind` of a transport; nothing else of it changes. Faults happen
on the thread that runs the rank's groups, mostly its communication thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

from commrt.errors import TransportError
from commrt.transport.protocol import EndLoan, Exchange, P2PGroup, Tag, Transport


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; None matches every rank, step or bucket."""

    kind: Literal["fail", "delay", "drop"]
    rank: int | None = None
    step: int | None = None
    bucket: int | str | None = None
    seconds: float = 0.0


fail_at = partial(Fault, "fail")
"""The rank's group raises `TransportError`, and its world then closes the connections."""
delay_at = partial(Fault, "delay")
"""Each bucket takes `seconds` longer at this rank."""
drop_at = partial(Fault, "drop")
"""Messages that the rank sends never arrive."""


def with_faults(*faults: Fault) -> Callable[[Transport], Transport]:
    """Return the ``wrap=`` of `run_ranks`, such as ``with_faults(fail_at(rank=1, step=3))``."""

    def wrap(transport: Transport) -> Transport:
        own = [fault for fault in faults if fault.rank in (None, transport.rank)]
        cast("Any", transport).bind = partial(_bind, transport.bind, transport.rank, own, set())
        return transport

    return wrap


def _bind(
    bind: Callable[[P2PGroup], Exchange],
    rank: int,
    faults: Sequence[Fault],
    delayed: set[Tag],
    group: P2PGroup,
) -> Exchange:
    """Bind `group` with `faults`; `delayed` has those that were: once per bucket, not per hop."""
    run_all = bind(group)
    run_without_sends = bind(
        replace(group, sends=[message for message in group.sends if message.peer == rank])
    )

    def run(tag: Tag) -> EndLoan | None:
        found = [
            each
            for each in faults
            if each.step in (None, tag.step) and each.bucket in (None, tag.bucket)
        ]
        kinds = {fault.kind for fault in found}
        if "fail" in kinds:
            raise TransportError("an injected failure", tag.place(rank, group.hop))
        if "delay" in kinds and tag not in delayed:
            delayed.add(tag)
            time.sleep(sum(fault.seconds for fault in found))
        return (run_without_sends if "drop" in kinds else run_all)(tag)

    return run
