# SPDX-License-Identifier: Apache-2.0
"""Inject faults: a transport that fails, delays or drops transfers, chosen by rank, step and bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from commrt.errors import TransportError
from commrt.transport.protocol import EndLoan, Exchange, P2PGroup, Tag, Transport

__all__ = ["Fault", "FaultyTransport", "delay_at", "drop_at", "fail_at", "with_faults"]


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


class FaultyTransport:
    """A transport that injects `faults` into `inner`; a `Transport`."""

    def __init__(self, inner: Transport, faults: Sequence[Fault]) -> None:
        self._inner = inner
        self._faults = [fault for fault in faults if fault.rank in (None, inner.rank)]
        self._delayed: Tag | None = None
        self.kind, self.allocate, self.capture = inner.kind, inner.allocate, inner.capture
        self.one_host, self.can_move_receives = inner.one_host, inner.can_move_receives
        self.rank, self.members = inner.rank, inner.members
        self.allocate_shared = inner.allocate_shared
        self.close, self.abort, self.share = inner.close, inner.abort, inner.share

    @property
    def timeout_s(self) -> float:
        """See `Transport.timeout_s`."""
        return self._inner.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._inner.timeout_s = seconds

    def bind(self, group: P2PGroup) -> Exchange:
        """See `Transport.bind`."""
        run_all = self._inner.bind(group)
        to_self = [message for message in group.sends if message.peer == self.rank]
        run_without_sends = self._inner.bind(replace(group, sends=to_self))

        def run(tag: Tag) -> EndLoan | None:
            faults = [fault for fault in self._faults if fault.matches(tag)]
            kinds = {fault.kind for fault in faults}
            if "fail" in kinds:
                raise TransportError("an injected failure", tag.place(self.rank, group.hop))
            if "delay" in kinds and tag != self._delayed:
                self._delayed = tag  # once per bucket, not once per hop
                time.sleep(sum(fault.seconds for fault in faults))
            return (run_without_sends if "drop" in kinds else run_all)(tag)

        return run


def with_faults(*faults: Fault) -> Callable[[Transport], Transport]:
    """Return the `wrap` argument of ``run_ranks(..., wrap=with_faults(fail_at(rank=1, step=3)))``."""
    return lambda transport: FaultyTransport(transport, faults)
