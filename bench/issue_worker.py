# SPDX-License-Identifier: Apache-2.0
"""One rank of the issue benchmark: the host's cost to start an exchange with two peers.

The exchange is two sends and two receives of 1 KiB. `NcclTransport` runs over calls that do nothing, so the time is
that of all work that is not NCCL's. The other variants move their bytes through Gloo's sockets.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from interleaved import Times
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore

from commrt.errors import UsageError
from commrt.transport.gloo import GlooTransport
from commrt.transport.nccl import NcclTransport
from commrt.transport.nccl_communicator import load
from commrt.transport.protocol import CPU, Exchange, P2PGroup, P2PMessage, Tag, Transport

__all__ = ["PEERS", "RANKS", "work"]

HOST, RANKS, NUMEL = "127.0.0.1", 3, 256
ROUNDS, CALLS = 30, 100
TAG = Tag(0, 0)
TORCH = "batch_isend_irecv, issued"
PEERS = {
    TORCH: TORCH,
    "NcclTransport, issued": TORCH,
    "batch_isend_irecv, whole": "batch_isend_irecv, whole",
    "GlooTransport, whole": "batch_isend_irecv, whole",
}
"""Every variant, and the one it is compared with."""


class Idle:
    """A binding of NCCL with communicators that do nothing, and the real groups where they are installed."""

    NCCL_INT8, VERSION = 0, 22809
    available = True

    def __init__(self) -> None:
        self.groupStart = self.groupEnd = lambda: None
        with suppress(UsageError):
            groups: Any = load()
            self.groupStart, self.groupEnd = groups.groupStart, groups.groupEnd
        self.get_version = self.get_build_version = lambda: self.VERSION
        self.get_unique_id = lambda: bytes(128)

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int) -> "Idle":  # noqa: N802, N803  # CuPy's names
        """Return this object, which is a communicator as well."""
        return self

    def send(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Do nothing; the arguments are those of CuPy."""

    recv = send

    def abort(self) -> None:
        """Do nothing."""

    check_async_error = destroy = abort


@dataclass(frozen=True)
class Memory:
    """The tensors that a rank exchanges with the two others, in the order of their ranks."""

    peers: list[int]
    outgoing: list[Tensor]
    incoming: list[Tensor]

    @classmethod
    def of(cls, rank: int) -> "Memory":
        """Return the tensors of `rank`."""
        peers = [peer for peer in range(RANKS) if peer != rank]
        outgoing, incoming = ([torch.full((NUMEL,), value) for _ in peers] for value in (rank + 1.0, 0.0))
        return cls(peers, outgoing, incoming)

    def check(self, name: str) -> None:
        """Raise `RuntimeError` unless all values arrived; then clear them."""
        for peer, came in zip(self.peers, self.incoming, strict=True):
            if not bool((came == peer + 1.0).all()):
                raise RuntimeError(f"{name} brought something else from rank {peer}: nothing was measured")
            came.zero_()

    def bound(self, transport: Transport) -> Exchange:
        """Return the exchange over `transport`."""
        sends = [P2PMessage(peer, data) for peer, data in zip(self.peers, self.outgoing, strict=True)]
        recvs = [P2PMessage(peer, data) for peer, data in zip(self.peers, self.incoming, strict=True)]
        return transport.bind(P2PGroup(sends, recvs))

    def of_torch(self) -> list[dist.P2POp]:
        """Return the exchange for ``batch_isend_irecv``."""
        sends = [dist.P2POp(dist.isend, data, peer) for peer, data in zip(self.peers, self.outgoing, strict=True)]
        recvs = [dist.P2POp(dist.irecv, data, peer) for peer, data in zip(self.peers, self.incoming, strict=True)]
        return sends + recvs


def work(rank: int, port: int, answers: "SimpleQueue[Times]") -> None:
    """Measure all variants interleaved; rank 0 sends the times."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore(HOST, port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=PrefixStore("torch", store), rank=rank, world_size=RANKS)
    memory = Memory.of(rank)
    ways = variants(rank, memory, store)
    for name in (name for name in ways if name.endswith("whole")):
        ways[name]()
        memory.check(name)
    times = measured(ways)
    if rank == 0:
        answers.put(times)
    dist.barrier()
    dist.destroy_process_group()


def variants(rank: int, memory: Memory, store: Store) -> dict[str, Callable[[], float]]:
    """Return the variants; each returns the seconds that count."""
    queued = memory.bound(NcclTransport(PrefixStore("nccl", store), rank, range(RANKS), 60.0, CPU, Idle()))
    over_gloo = memory.bound(GlooTransport(PrefixStore("gloo", store), rank, range(RANKS), 60.0, HOST))
    return {
        TORCH: lambda: by_torch(memory)[0],
        "NcclTransport, issued": lambda: by_commrt(queued),
        "batch_isend_irecv, whole": lambda: by_torch(memory)[1],
        "GlooTransport, whole": lambda: by_commrt(over_gloo),
    }


def by_torch(memory: Memory) -> tuple[float, float]:
    """Return the seconds until all transfers are issued, and until all are done."""
    begin_s = perf_counter()
    works = dist.batch_isend_irecv(memory.of_torch())
    issued_s = perf_counter()
    for transfer in works:
        transfer.wait()
    return issued_s - begin_s, perf_counter() - begin_s


def by_commrt(exchange: Exchange) -> float:
    """Return the seconds until the call returns."""
    begin_s = perf_counter()
    exchange(TAG)
    return perf_counter() - begin_s


def measured(ways: dict[str, Callable[[], float]]) -> Times:
    """Return the mean seconds per call of each round but the first."""
    times: Times = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, way in ways.items():
            times[name].append(sum(way() for _ in range(CALLS)) / CALLS)
    return {name: seconds[1:] for name, seconds in times.items()}
