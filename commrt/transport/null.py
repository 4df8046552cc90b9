# SPDX-License-Identifier: Apache-2.0
"""In place of a transport that is not connected yet: every group is refused as it is bound.

Touches nothing, on any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from commrt.errors import Place, TransportClosed
from commrt.transport.protocol import Exchange, P2PGroup, Transport


class NullTransport(Transport):
    """For a rank that the other ranks have not admitted yet: binding raises an error."""

    kind = "nothing yet"

    def __init__(self, rank: int, members: Sequence[int], timeout_s: float) -> None:
        self.rank = rank
        self.members = members
        self.timeout_s = timeout_s

    def bind(self, group: P2PGroup) -> Exchange:
        raise TransportClosed("the other ranks have not admitted this rank yet", Place(self.rank))

    def close(self) -> None:
        """Do nothing."""

    abort = close
