# SPDX-License-Identifier: Apache-2.0
"""A transport on which all transfers are always done, to measure the cost of the runtime itself."""

from __future__ import annotations

from commrt.transport.protocol import Exchange, P2PGroup, Tag, Transport

__all__ = ["NullTransport"]


def nothing(tag: Tag) -> None:
    """Do nothing: the transfers of this exchange are always done."""


class NullTransport(Transport):
    """Moves nothing."""

    kind = "null"
    timeout_s = 1.0

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.members = range(ranks)

    def bind(self, group: P2PGroup) -> Exchange:
        """Return an exchange that does nothing."""
        return nothing

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    abort = close
