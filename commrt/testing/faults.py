# SPDX-License-Identifier: Apache-2.0
"""Faults as data: a transport that fails, delays or loses what it is told to, keyed by rank and step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from commrt.errors import Place, TransportError
from commrt.transport.protocol import Exchange, Group, Moment, Transport

__all__ = ["Fault", "FaultyTransport", "delay_at", "drop_at", "fail_at", "with_faults"]


class Kind(Enum):
    """What happens."""

    FAIL = "fail"
    DELAY = "delay"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong; None matches every rank, step or bucket."""

    kind: Kind
    rank: int | None = None
    step: int | None = None
    bucket: int | str | None = None
    seconds: float = 0.0

    def strikes(self, moment: Moment) -> bool:
        """True if it happens at `moment`."""
        return self.step in (None, moment.step) and self.bucket in (None, moment.bucket)


def fail_at(rank: int | None = None, step: int | None = None, bucket: int | str | None = None) -> Fault:
    """The rank's exchange raises `TransportError`; its world then drops the connections."""
    return Fault(Kind.FAIL, rank, step, bucket)


def delay_at(
    rank: int | None = None, step: int | None = None, bucket: int | str | None = None, *, seconds: float
) -> Fault:
    """Each bucket takes `seconds` longer on the wire at this rank."""
    return Fault(Kind.DELAY, rank, step, bucket, seconds)


def drop_at(rank: int | None = None, step: int | None = None, bucket: int | str | None = None) -> Fault:
    """What the rank sends never arrives."""
    return Fault(Kind.DROP, rank, step, bucket)


class FaultyTransport:
    """A transport around another one that lets `faults` happen; a `Transport`."""

    def __init__(self, inner: Transport, faults: Sequence[Fault]) -> None:
        self._inner = inner
        self._faults = [fault for fault in faults if fault.rank in (None, inner.rank)]
        self._delayed: Moment | None = None
        self.kind, self.allocate, self.capture = inner.kind, inner.allocate, inner.capture
        self.rank, self.members = inner.rank, inner.members

    @property
    def timeout_s(self) -> float:
        """See `Transport.timeout_s`."""
        return self._inner.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._inner.timeout_s = seconds

    def bind(self, group: Group) -> Exchange:
        """See `Transport.bind`."""
        whole = self._inner.bind(group)
        without_sends = self._inner.bind(Group([p for p in group.sends if p.peer == self.rank], group.recvs, group.hop))

        def exchange(moment: Moment) -> None:
            struck = [fault for fault in self._faults if fault.strikes(moment)]
            kinds = {fault.kind for fault in struck}
            if Kind.FAIL in kinds:
                raise TransportError("an injected failure", Place(self.rank, None, *moment, group.hop))
            self._delay(sum(fault.seconds for fault in struck), moment)
            (without_sends if Kind.DROP in kinds else whole)(moment)

        return exchange

    def _delay(self, seconds: float, moment: Moment) -> None:
        if seconds and moment != self._delayed:
            self._delayed = moment
            time.sleep(seconds)

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()

    def abort(self) -> None:
        """See `Transport.abort`."""
        self._inner.abort()


def with_faults(*faults: Fault) -> Callable[[Transport], Transport]:
    """For ``run_ranks(..., wrap=with_faults(fail_at(rank=1, step=3)))``."""
    return lambda transport: FaultyTransport(transport, faults)
