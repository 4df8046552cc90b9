# SPDX-License-Identifier: Apache-2.0
"""Connect ranks that are threads of this process, by each transport."""

import nccl_stand_in
from peer_group import on_threads, over_peers
from torch.distributed import HashStore, PrefixStore

from commrt.store.launcher import LOOPBACK
from commrt.testing.ranks import RECONNECTING, over_threads
from commrt.transport.gloo import GlooTransport
from commrt.transport.hierarchical import HierarchicalTransport
from commrt.transport.nccl import NcclTransport
from commrt.transport.protocol import CPU
from commrt.transport.shared import SharedTransport


def over_nccl(store, ranks, timeout_s):
    """Connect the ranks by `NcclTransport` over the stand-in for NCCL; a `commrt.testing.ranks.Connect`."""
    return on_threads(ranks, lambda rank: nccl_of_one(store, rank, range(ranks), timeout_s))


def nccl_of_one(store, rank, members, timeout_s):
    return NcclTransport(PrefixStore("nccl", store), rank, members, timeout_s, CPU, nccl_stand_in)


RECONNECTING[over_nccl] = nccl_of_one


def local(ranks, timeout_s):
    return over_threads(HashStore(), ranks, timeout_s)


def gloo(ranks, timeout_s):
    store = HashStore()
    return on_threads(ranks, lambda rank: GlooTransport(store, rank, range(ranks), timeout_s, "127.0.0.1"))


def over_shared(store, ranks, timeout_s):
    """Connect the ranks by `SharedTransport`; a `commrt.testing.ranks.Connect`."""
    return on_threads(ranks, lambda rank: SharedTransport(store, rank, range(ranks), timeout_s))


RECONNECTING[over_shared] = SharedTransport


def shared(ranks, timeout_s):
    return over_shared(HashStore(), ranks, timeout_s)


def hierarchical(hosts, timeout_s):
    """The transports of ranks, where rank r is on host ``hosts[r]``."""
    store = HashStore()

    def one(rank):
        local_members = [peer for peer, host in enumerate(hosts) if host == hosts[rank]]
        return HierarchicalTransport(store, rank, range(len(hosts)), timeout_s, LOOPBACK, local_members)

    return on_threads(len(hosts), one)


def pairs_on_a_host(ranks, timeout_s):
    return hierarchical([rank // 2 for rank in range(ranks)], timeout_s)


def two_hosts_in_turn(ranks, timeout_s):
    return hierarchical([rank % 2 for rank in range(ranks)], timeout_s)


def nccl(ranks, timeout_s):
    return over_nccl(HashStore(), ranks, timeout_s)


def peers(ranks, timeout_s):
    return over_peers(HashStore(), ranks, timeout_s)
