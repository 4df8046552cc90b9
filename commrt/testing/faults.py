# SPDX-License-Identifier: Apache-2.0
"""Inject faults: a transport that fails, delays or drops transfers, chosen by rank, step and bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

from commrt.errors import TransportError
from commrt.transport.protocol import EndLoan, Exchange, P2PGroup, Tag, Transport

__all__ = ["Fault", "delay_at", "drop_at", "fail_at", "with_faults"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; None matches every rank, step or bucket."""

    kind: Literal["fail", "delay", "drop"]
    rank: int | None = None
    step: int | None = None
    bucket: int | str | None = None
    seconds: float = 0.0

    def matches(self, tag: Tag) -> bool:
        """Return True if the fault happens at `tag`."""
        return self.step in (None, tag.step) and self.bucket in (None, tag.bucket)


fail_at = partial(Fault, "fail")
"""The rank's group raises `TransportError`, and its world then closes the connections."""
delay_at = partial(Fault, "delay")
"""Each bucket takes `seconds` longer at this rank."""
drop_at = partial(Fault, "drop")
"""Messages that the rank sends never arrive."""


@dataclass(slots=True)
class _FaultyBind:
    """Binds groups so that they run with `faults`; in place of a transport's own `bind`."""

    rank: int
    bind: Callable[[P2PGroup], Exchange]
    faults: Sequence[Fault]
    delayed: Tag | None = None
    """What was delayed last: once per bucket, not once per hop."""

    def __call__(self, group: P2PGroup) -> Exchange:
        run_all = self.bind(group)
        to_self = [message for message in group.sends if message.peer == self.rank]
        run_without_sends = self.bind(replace(group, sends=to_self))

        def run(tag: Tag) -> EndLoan | None:
            faults = [fault for fault in self.faults if fault.matches(tag)]
            kinds = {fault.kind for fault in faults}
            if "fail" in kinds:
                raise TransportError("an injected failure", tag.place(self.rank, group.hop))
            if "delay" in kinds and tag != self.delayed:
                self.delayed = tag
                time.sleep(sum(fault.seconds for fault in faults))
            return (run_without_sends if "drop" in kinds else run_all)(tag)

        return run


def with_faults(*faults: Fault) -> Callable[[Transport], Transport]:
    """Return the `wrap` argument of ``run_ranks(..., wrap=with_faults(fail_at(rank=1, step=3)))``."""

    def wrap(transport: Transport) -> Transport:
        own = [fault for fault in faults if fault.rank in (None, transport.rank)]
        cast("Any", transport).bind = _FaultyBind(transport.rank, transport.bind, own)
        return transport

    return wrap
