# SPDX-License-Identifier: Apache-2.0
"""In place of a transport, until this rank has been let in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commrt.errors import Place, TransportClosed
from commrt.transport.protocol import CPU, Exchange, Group, never, zeros

__all__ = ["VacantTransport"]


class VacantTransport:
    """Of a rank that the others do not know yet; carries nothing."""

    kind = "nothing yet"

    def __init__(self, rank: int, members: Sequence[int], timeout_s: float) -> None:
        self.rank, self.members, self.timeout_s = rank, members, timeout_s

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """See `Transport.allocate`."""
        return zeros(numel, dtype, device)

    def bind(self, group: Group) -> Exchange:  # whatever it is
        """Raises `TransportClosed`."""
        raise TransportClosed("this rank has still to be let in by the others", Place(self.rank))

    capture = staticmethod(never)

    def wait(self) -> None:
        """See `Queueing.wait`."""

    def close(self) -> None:
        """See `Transport.close`."""

    def abort(self) -> None:
        """See `Transport.abort`."""
