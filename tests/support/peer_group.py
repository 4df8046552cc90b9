# SPDX-License-Identifier: Apache-2.0
"""Ranks of one or several hosts, with a thread each, over stand-ins for GPUs' memory and for NCCL."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from time import monotonic

import nccl_stand_in as nccl
import torch
from peer_memory import HostIpcMemory
from torch.distributed import HashStore, PrefixStore

from commrt.program import member_program
from commrt.runtime.executor import bind
from commrt.runtime.reading import bind_reading
from commrt.testing import ranks
from commrt.transport.mapped_memory import MappedMemory
from commrt.transport.nccl import NcclTransport
from commrt.transport.peers import PeersTransport
from commrt.transport.protocol import CPU, Tag

NOW = Tag(7, 3)
TIMEOUT_S = 20.0
ODD = 1003
"""No multiple of anything that chunks are cut at."""


def connect_one(store, rank, members, timeout_s, memory=None, host="host"):
    """A rank's transport, as `commrt.transport.peers.connect` makes it."""
    memory = memory or HostIpcMemory()
    mapped = MappedMemory(PrefixStore("peers", store), rank, members, timeout_s, memory, host)
    own = PrefixStore("nccl", store)
    if mapped.local_peers:
        return PeersTransport(mapped, own, timeout_s, CPU, nccl)
    return NcclTransport(own, rank, members, timeout_s, CPU, nccl)


def on_threads(size, connect):
    """What `connect` gives for each rank; all connect at once."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(connect, range(size)))


def over_peers(store, size, timeout_s):
    """Connect ranks of one host with peers' memory; a `commrt.testing.ranks.Connect`."""
    return on_threads(size, lambda rank: connect_one(store, rank, range(size), timeout_s))


ranks.RECONNECTING[over_peers] = connect_one


class Group:
    """The ranks of some hosts, each with a thread; rank r is on ``hosts[r]``."""

    def __init__(self, hosts):
        self.size, self.store = len(hosts), HashStore()
        self.pool = ThreadPoolExecutor(self.size)
        self.memories = [HostIpcMemory() for _ in hosts]
        self.transports = self.on_all(
            lambda rank: connect_one(self.store, rank, range(self.size), TIMEOUT_S, self.memories[rank], hosts[rank])
        )

    def on_all(self, work):
        return list(self.pool.map(work, range(self.size)))

    def buffers(self, numel, dtype=torch.float32):
        """A buffer of each rank, and its window; None for a rank that is alone on its host."""

        def shared(rank):
            buffer = self.transports[rank].allocate_shared(numel, dtype)
            return buffer, next(iter(self.transports[rank].share([buffer])), None)

        return self.on_all(shared)

    def bound(self, schedule, buffers, rank, members=None):
        members = range(self.size) if members is None else members
        mine = member_program(schedule, tuple(members), rank, self.size)
        buffer, window = buffers[rank]
        if window is None:
            return bind(mine, buffer, self.transports[rank])
        return bind_reading(mine, buffer, window, self.transports[rank])

    def run(self, schedule, buffers, values):
        def run(rank):
            buffers[rank][0].copy_(values[rank])
            self.bound(schedule, buffers, rank).run(NOW)
            self.transports[rank].wait()
            return buffers[rank][0].clone()

        return torch.stack(self.on_all(run))


@contextmanager
def connected(hosts):
    group = Group(hosts)
    try:
        yield group
    finally:
        for transport in group.transports:
            transport.abort()
        group.pool.shutdown()
        for transport in group.transports:
            transport.close()


def values_of(size, numel, dtype):
    """Of many magnitudes, so that sums in another order have other bits."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(size, numel, generator=generator) * 10 ** torch.empty(size, numel).uniform_(
        -3, 3, generator=generator
    )
    return values.to(dtype)


def wait_until(is_so):
    """Wait for what other threads do."""
    end_s = monotonic() + 60
    while not is_so():
        assert monotonic() < end_s
        Event().wait(0.001)
