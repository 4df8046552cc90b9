# SPDX-License-Identifier: Apache-2.0
"""Several hosts with several ranks on each: shared memory within a host, sockets between hosts.

Both parts of a group are under way together: sockets are served by threads of their own, so what leaves the host is
begun first, and what stays is copied meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from commrt.errors import DeadlineExceeded
from commrt.transport.gloo import Finish, GlooTransport
from commrt.transport.protocol import CPU, Exchange, Group, Moment, never, require_peers
from commrt.transport.shared import SharedTransport

__all__ = ["SpanningTransport"]


class SpanningTransport:
    """One rank of a group of processes on several hosts; a `Transport` for CPU tensors.

    `near` connects the ranks of this host, this one among them, `far` all ranks.
    """

    kind = "shared and gloo"
    capture = staticmethod(never)

    def __init__(self, near: SharedTransport, far: GlooTransport) -> None:
        self._near, self._far = near, far
        self.rank = far.rank

    @property
    def members(self) -> Sequence[int]:
        """See `Transport.members`."""
        return self._far.members

    @property
    def timeout_s(self) -> float:
        """See `Transport.timeout_s`."""
        return self._far.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._near.timeout_s = self._far.timeout_s = seconds

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """See `Transport.allocate`: neighbours copy from there, and sockets read any memory."""
        return self._near.allocate(numel, dtype, device)

    def bind(self, group: Group) -> Exchange:
        """See `Transport.bind`."""
        require_peers(group, self.members)
        within = _part(group, lambda peer: peer in self._near.members)
        beyond = _part(group, lambda peer: peer not in self._near.members)
        exchange_near, begin_far = self._near.bind(within), self._far.bind_halves(beyond)

        def exchange(moment: Moment) -> None:
            finish_far = begin_far(moment)
            try:
                exchange_near(moment)
            except BaseException as error:
                try:
                    if isinstance(error, DeadlineExceeded):
                        _raise_if_lost(finish_far)  # before a late answer, which may only be waiting for it
                finally:
                    self._far.abort()  # nothing may land any more in memory that is given back
                raise
            finish_far()

        return exchange

    def close(self) -> None:
        """See `Transport.close`."""
        self._near.close()
        self._far.close()

    def abort(self) -> None:
        """See `Transport.abort`."""
        self._near.abort()
        self._far.abort()


def _raise_if_lost(finish: Finish) -> None:
    """Raise if a peer of what should be finished by now is lost; not if it is late, too."""
    with suppress(DeadlineExceeded):
        finish()


def _part(group: Group, has: Callable[[int], bool]) -> Group:
    """The transfers of those peers that it `has`."""
    sends, recvs = ([parcel for parcel in side if has(parcel.peer)] for side in (group.sends, group.recvs))
    return Group(sends, recvs, group.hop)
