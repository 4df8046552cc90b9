# SPDX-License-Identifier: Apache-2.0
"""Choose and connect the transport between ranks, the same on all of them; connect again in a new generation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed import PrefixStore, Store

from commrt.errors import CommrtError, TransportError, UsageError
from commrt.store.agreement import LINGER_S, find_disagreement, gather, wait_until_read
from commrt.store.client import (
    STORE_ANSWER_S,
    call_store,
    clone_connection,
    parse_int,
    parse_list,
    require,
)
from commrt.store.launcher import GPU_TRANSPORTS, chosen_transport, launched
from commrt.transport.channel import host_identity
from commrt.transport.gloo import GlooTransport
from commrt.transport.hierarchical import HierarchicalTransport
from commrt.transport.protocol import QueueingTransport, Transport
from commrt.transport.shared import SharedTransport

__all__ = [
    "Connect",
    "ConnectGpu",
    "ReconnectOptions",
    "connect_gpu",
    "connect_hosts",
    "default_device",
    "local_rank",
    "require_gpu",
]


def connect_hosts(
    store: Store, rank: int, members: Sequence[int], timeout_s: float, host: str | None = None, choice: str = ""
) -> Transport:
    """Connect `members` for CPU tensors. Collective. `choice` is what else must be equal on all of them.

    COMMRT_TRANSPORT chooses the transport. By default it is shared memory on one Linux host, Gloo where each member has
    a host of its own, and both at once otherwise. `host` is the address at which Gloo listens.
    """
    starts = _compare_starts(store, rank, members, timeout_s, choice)
    kind, hosts = starts[rank].transport, [starts[peer].host for peer in members]
    shared_store, gloo_store = PrefixStore("shared", store), PrefixStore("gloo", store)
    if kind == "gloo":
        return GlooTransport(gloo_store, rank, members, timeout_s, host)
    if kind not in CHOSEN_BY_HOST:
        raise UsageError(f"COMMRT_TRANSPORT={kind} is offered, and connect_hosts() does not connect it: unset it")
    if len(set(hosts)) == 1:
        return SharedTransport(shared_store, rank, members, timeout_s)
    gloo = GlooTransport(gloo_store, rank, members, timeout_s, host)
    if len(set(hosts)) == len(members):
        return gloo
    neighbours = [peer for peer in members if starts[peer].host == starts[rank].host]
    try:
        return HierarchicalTransport(SharedTransport(shared_store, rank, neighbours, timeout_s), gloo)
    except BaseException:
        gloo.close()  # others may be connected already, and wait for this rank
        raise


_log = logging.getLogger("commrt")
CHOSEN_BY_HOST = (None, "shared", *GPU_TRANSPORTS)
"""Values of COMMRT_TRANSPORT with which host memory travels as the hosts allow."""


class _Start(NamedTuple):
    """What a rank tells the others before they connect."""

    size: int
    transport: str | None
    host: str
    choice: str


def _compare_starts(
    store: Store, rank: int, members: Sequence[int], timeout_s: float, choice: str = ""
) -> dict[int, _Start]:
    """Return what all `members` start with; all but the host is the same."""
    own = _Start(len(members), chosen_transport(), host_identity() or f"none that rank {rank} can share", choice)
    starts: dict[int, _Start] = {}
    try:
        for some in (members[:1], members):  # a rank that differs from the first one need not wait for all
            found = call_store(
                partial(gather, store, rank, some, own, timeout_s, _parse_start), timeout_s + STORE_ANSWER_S
            )
            starts = {**found, rank: own}
            _require_same_start(starts)
        if own.transport == "shared" and len({start.host for start in starts.values()}) > 1:
            raise UsageError(  # after all ranks have read why
                "COMMRT_TRANSPORT=shared, but not all ranks are on one Linux host and in one network namespace: "
                "unset it, or start them all on one"
            )
    except CommrtError:
        with suppress(RuntimeError, TransportError):  # the error is known
            call_store(lambda: wait_until_read(store, rank, members), LINGER_S + STORE_ANSWER_S)
        raise
    call_store(lambda: store.add("read", 1), STORE_ANSWER_S, rank)
    return starts


def _require_same_start(starts: Mapping[int, _Start]) -> None:
    claims = {
        peer: {
            "world size": str(start.size),
            "COMMRT_TRANSPORT": start.transport or "not set",
            "COMMRT_CLUSTER or COMMRT_SCHEDULES": start.choice,
        }
        for peer, start in starts.items()
    }
    if error := find_disagreement("init", claims):
        raise error


def _parse_start(text: bytes) -> _Start:
    size, transport, host, choice = parse_list(text, 4)
    require(isinstance(transport, str | None) and isinstance(host, str) and isinstance(choice, str))
    return _Start(parse_int(size), transport, host, choice)


def connect_gpu(
    store: Store,
    rank: int,
    members: Sequence[int],
    timeout_s: float,
    device: torch.device,
    on_failure: Callable[[TransportError], None],
) -> QueueingTransport:
    """Connect `members` for tensors on the GPU `device` of this rank, through NCCL. Collective.

    `on_failure` is called with an error that ends an exchange for which nobody waits.
    """
    from commrt.transport.nccl import NcclTransport  # noqa: PLC0415  # needs CuPy

    nccl = NcclTransport(PrefixStore("nccl", store), rank, members, timeout_s, device, on_failure=on_failure)
    asked = chosen_transport()
    if asked == "nccl":
        return nccl
    try:
        return _beside_peers(nccl, store, device, on_failure, required=asked == "peers")
    except BaseException:
        nccl.abort()  # others may be connected already, and wait for this rank
        raise


def _beside_peers(
    rest: QueueingTransport,
    store: Store,
    device: torch.device,
    on_failure: Callable[[TransportError], None],
    *,
    required: bool,
) -> QueueingTransport:
    """Return windows in peers' memory beside `rest`, or `rest` where the ranks of a host cannot map it."""
    from commrt.transport.nccl_communicator import ShutdownNotices  # noqa: PLC0415  # as above
    from commrt.transport.neighbours import Neighbours  # noqa: PLC0415
    from commrt.transport.peer_memory import CudaPeerMemory  # noqa: PLC0415
    from commrt.transport.peers import PeersTransport  # noqa: PLC0415

    memory, host = CudaPeerMemory(device), host_identity() or f"none that rank {rest.rank} can share"
    own_store = PrefixStore("peers", clone_connection(store))
    neighbours = Neighbours(own_store, rest.rank, rest.members, rest.timeout_s, memory, host)
    if neighbours.ranks:
        return PeersTransport(rest, neighbours, ShutdownNotices(own_store, rest.rank), memory, device, on_failure)
    if required and neighbours.refusal:
        raise UsageError(
            f"COMMRT_TRANSPORT=peers, but GPUs cannot read each other's memory: {neighbours.refusal}. Unset it"
        )
    if neighbours.refusal:
        _log.info("GPUs of this host exchange through NCCL, not through each other's memory: %s", neighbours.refusal)
    return rest


def require_gpu(device: torch.device | str) -> torch.device:
    """Return `device` with its index; raises `UsageError` unless it is a GPU that NCCL can use."""
    chosen = torch.device(device)
    if chosen.type != "cuda" or not torch.cuda.is_available():
        raise UsageError(f"{device} is no NVIDIA GPU of this machine: CPU tensors need no connect()")
    from commrt.transport.nccl_communicator import load  # noqa: PLC0415  # CuPy is there only with a GPU

    load()  # raises here, before anybody waits for this rank
    return torch.device("cuda", torch.cuda.current_device()) if chosen.index is None else chosen


def default_device(local_rank: int) -> torch.device:
    """Return the GPU of a rank, or the CPU where there is none; raises `UsageError` for more ranks than GPUs.

    Each rank of a host may see all GPUs, or only its own.
    """
    gpus = torch.cuda.device_count()
    if gpus > 1 and local_rank >= gpus:
        raise UsageError(
            f"local rank {local_rank} has no GPU of its own, as this process sees {gpus}: start no more ranks on a "
            "host than it has GPUs"
        )
    return torch.device("cuda", local_rank if gpus > 1 else 0) if gpus else torch.device("cpu")


def local_rank() -> int:
    """Return this rank's number on its host, as the launcher says; 0 if it says nothing."""
    with suppress(UsageError):
        if (launch := launched()) is not None:
            return launch.local_rank
    return 0


Connect = Callable[[int, Sequence[int], float], Transport]
"""(generation, members, timeout_s) -> a transport for host memory among them; collective, once per generation."""
ConnectGpu = Callable[[str, torch.device], QueueingTransport]
"""(name, device) -> a transport for that GPU's memory among the members; collective, each name once."""


class ReconnectOptions(NamedTuple):
    """What a world needs to go on without a rank."""

    connect: Connect
    towards: str | None = None
    """An address in the network through which the ranks see each other; None if they need no liveness checks."""
