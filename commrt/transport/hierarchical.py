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
from torch.distributed import PrefixStore, Store

from commrt.errors import DeadlineExceeded
from commrt.transport.gloo import GlooTransport
from commrt.transport.protocol import (
    CPU,
    EndLoan,
    Exchange,
    P2PGroup,
    PlainTransport,
    Tag,
    require_peers,
)
from commrt.transport.shared import SharedTransport

__all__ = ["HierarchicalTransport"]


class HierarchicalTransport(PlainTransport):
    """One rank of a group of processes on several hosts; a `Transport` for CPU tensors.

    Connects to all other `members`, of which `neighbours` are on this host. `address` is as for `GlooTransport`.
    """

    kind = "shared and gloo"

    def __init__(
        self,
        store: Store,
        rank: int,
        members: Sequence[int],
        timeout_s: float,
        address: str | None,
        neighbours: Sequence[int],
    ) -> None:
        self.rank, self.members = rank, members
        self._remote = GlooTransport(PrefixStore("gloo", store), rank, members, timeout_s, address)
        try:
            self._local = SharedTransport(PrefixStore("shared", store), rank, neighbours, timeout_s)
        except BaseException:
            self._remote.close()  # others may be connected already, and wait for this rank
            raise

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
