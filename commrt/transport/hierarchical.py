# SPDX-License-Identifier: Apache-2.0
"""Shared memory within a host and Gloo between hosts, for ranks of which some share a host.

The thread that exchanges, or later closes, runs both; Gloo's own threads serve the sockets
meanwhile. Any thread may `allocate`, set `timeout_s` or `abort`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from commrt.errors import DeadlineExceeded
from commrt.transport.gloo import GlooTransport
from commrt.transport.protocol import CPU, EndLoan, Exchange, P2PGroup, Tag, Transport
from commrt.transport.shared import SharedTransport


class HierarchicalTransport(Transport):
    """One rank of several on each of several hosts: shared memory within a host, Gloo between them.

    Both parts of a group run at the same time: Gloo's own threads serve the sockets, so transfers
    between hosts start first, and this thread copies within the host meanwhile. Of all `members`,
    `local_members` are on this host. Both transports get this one's `timeout_s` in each run.
    """

    kind = "shared and gloo"

    def __init__(
        self,
        store: Store,
        rank: int,
        members: Sequence[int],
        timeout_s: float,
        address: str | None,
        local_members: Sequence[int],
    ) -> None:
        self.rank = rank
        self.members = members
        self.timeout_s = timeout_s
        self._remote = GlooTransport(PrefixStore("gloo", store), rank, members, timeout_s, address)
        self._local: Transport = self._remote
        try:
            if len(local_members) > 1:  # a rank alone on its host may have no shared memory
                self._local = SharedTransport(
                    PrefixStore("shared", store), rank, local_members, timeout_s
                )
        except BaseException:
            self._remote.close()  # others may be connected already, and wait for this rank
            raise

    @property
    def per_host(self) -> int:
        return self._local.per_host

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """Return memory that the ranks of this host share, and that sockets can read too."""
        return self._local.allocate(numel, dtype, device)

    def bind(self, group: P2PGroup) -> Exchange:
        local, remote = group.split(self._local.members)
        run_local = self._local.bind(local)
        start_remote = self._remote.bind_start(remote)

        def run(tag: Tag) -> EndLoan | None:
            self._local.timeout_s = self._remote.timeout_s = self.timeout_s
            finish_remote = start_remote(tag)
            try:
                return_borrowed = run_local(tag)
            except BaseException as error:
                try:
                    if isinstance(error, DeadlineExceeded):
                        with suppress(DeadlineExceeded):
                            # raises for a lost peer, which may be why the local one is late
                            finish_remote()
                finally:
                    # or transfers could still write to memory that the caller frees
                    self._remote.abort()
                raise
            finish_remote()
            return return_borrowed

        return run

    def close(self) -> None:
        self._local.close()
        self._remote.close()

    def abort(self) -> None:
        self._local.abort()
        self._remote.abort()
