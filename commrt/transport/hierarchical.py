# SPDX-License-Identifier: Apache-2.0
"""Several ranks on each of several hosts: shared memory within a host, sockets between hosts.

Both parts of a group run at the same time. Gloo's own threads serve the sockets, so transfers between hosts start
first, and this thread copies within the host meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from commrt.errors import DeadlineExceeded
from commrt.transport.gloo import GlooTransport
from commrt.transport.protocol import (
    CPU,
    EndLoan,
    Exchange,
    P2PGroup,
    Tag,
    capture_nothing,
    require_peers,
    share_nothing,
)
from commrt.transport.shared import SharedTransport

__all__ = ["HierarchicalTransport"]


class HierarchicalTransport:
    """One rank of a group of processes on several hosts; a `Transport` for CPU tensors.

    `local` connects the ranks of this host, `remote` all ranks; both include this one.
    """

    kind = "shared and gloo"
    capture = staticmethod(capture_nothing)
    share = staticmethod(share_nothing)
    can_move_receives = True

    def __init__(self, local: SharedTransport, remote: GlooTransport) -> None:
        self._local, self._remote = local, remote
        self.rank = remote.rank

    @property
    def members(self) -> Sequence[int]:
        """See `Transport.members`."""
        return self._remote.members

    @property
    def timeout_s(self) -> float:
        """See `Transport.timeout_s`."""
        return self._remote.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._local.timeout_s = self._remote.timeout_s = seconds

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """See `Transport.allocate`: shared memory, which sockets can read too."""
        return self._local.allocate(numel, dtype, device)

    allocate_shared = allocate

    def bind(self, group: P2PGroup) -> Exchange:
        """See `Transport.bind`."""
        require_peers(group, self.members)
        run_local = self._local.bind(self._part(group, is_local=True))
        start_remote = self._remote.bind_start(self._part(group, is_local=False))

        def run(tag: Tag) -> EndLoan | None:
            finish_remote = start_remote(tag)
            try:
                return_borrowed = run_local(tag)
            except BaseException as error:
                try:
                    if isinstance(error, DeadlineExceeded):
                        with suppress(DeadlineExceeded):
                            finish_remote()  # raises for a lost peer, which may be why the local one is late
                finally:
                    self._remote.abort()  # or transfers could still write to memory that the caller frees
                raise
            finish_remote()
            return return_borrowed

        return run

    def _part(self, group: P2PGroup, *, is_local: bool) -> P2PGroup:
        """Return the messages of `group` within this host, or those between hosts."""
        near = set(self._local.members)
        sends, recvs = ([m for m in side if (m.peer in near) == is_local] for side in (group.sends, group.recvs))
        return replace(group, sends=sends, recvs=recvs)

    def close(self) -> None:
        """See `Transport.close`."""
        self._local.close()
        self._remote.close()

    def abort(self) -> None:
        """See `Transport.abort`."""
        self._local.abort()
        self._remote.abort()
