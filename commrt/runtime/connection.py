# SPDX-License-Identifier: Apache-2.0
"""How ranks that have met connect: through what, and that all ranks choose the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch.distributed import PrefixStore, Store

from commrt.errors import DisagreementError, TransportError, UsageError
from commrt.membership.agreement import agree
from commrt.membership.launcher import chosen_transport, launched
from commrt.membership.store_client import STORE_ANSWER_S, call_store, parse
from commrt.transport.gloo import GlooTransport
from commrt.transport.media import Queueing
from commrt.transport.meeting import host_identity
from commrt.transport.protocol import Transport
from commrt.transport.shared import SharedTransport
from commrt.transport.spanning import SpanningTransport

__all__ = ["connect_gpu", "connect_hosts", "gpu", "local_rank", "own_device"]


def connect_hosts(
    store: Store, rank: int, members: Sequence[int], timeout_s: float, host: str | None = None
) -> Transport:
    """What carries CPU tensors: shared memory between `members` on one Linux host, else Gloo; or what was chosen."""
    choice = chosen_transport()
    claim = {"world size": str(len(members)), "COMMRT_TRANSPORT": choice or "not set"}
    here = host_identity() or f"none that rank {rank} can share"
    call_store(lambda: store.set(f"host/{rank}", here), timeout_s + STORE_ANSWER_S, rank)
    agree(store, rank, members, "init", claim, timeout_s)  # after it, all have said where they are
    shares, reaches = PrefixStore("shared", store), PrefixStore("gloo", store)
    if choice == "gloo":
        return GlooTransport(reaches, rank, members, timeout_s, host)
    if choice == "shared":
        _require_one_host(here, store, rank, members, timeout_s)
    hosts = _hosts(store, rank, members, timeout_s)
    if len(set(hosts)) == 1:
        return SharedTransport(shares, rank, members, timeout_s)
    far = GlooTransport(reaches, rank, members, timeout_s, host)
    if len(set(hosts)) == len(members):
        return far
    neighbours = [peer for peer, its in zip(members, hosts, strict=True) if its == here]
    try:
        return SpanningTransport(SharedTransport(shares, rank, neighbours, timeout_s), far)
    except BaseException:
        far.close()  # others may be connected already, and wait for this rank
        raise


def _require_one_host(here: str, store: Store, rank: int, members: Sequence[int], timeout_s: float) -> None:
    """Raise on every rank, and on the one that holds the store after the others have read why."""
    try:
        agree(store, rank, members, "host", {"host": here}, timeout_s)
    except DisagreementError as error:
        raise UsageError(
            "COMMRT_TRANSPORT=shared, but not all ranks are on one Linux host and in one network namespace: "
            "unset it, or start them all on one"
        ) from error


def _hosts(store: Store, rank: int, members: Sequence[int], timeout_s: float) -> list[str]:
    """Of each member."""
    said = call_store(lambda: store.multi_get([f"host/{peer}" for peer in members]), timeout_s + STORE_ANSWER_S, rank)
    return [parse("host", its, bytes.decode) for its in said]


def gpu(device: torch.device | str) -> torch.device:
    """`device` with its number; raises `UsageError` if it is no GPU that NCCL and this version reach."""
    chosen = torch.device(device)
    if chosen.type != "cuda" or not torch.cuda.is_available():
        raise UsageError(f"{device} is no NVIDIA GPU of this machine: CPU tensors need no connect()")
    from commrt.transport.binding import load  # noqa: PLC0415  # CuPy is there only with a GPU

    load()  # refuses here, before anybody waits for this rank
    return torch.device("cuda", torch.cuda.current_device()) if chosen.index is None else chosen


def own_device(local_rank: int) -> torch.device:
    """Of a rank on this host, whose ranks may see a GPU each or all of them; raises `UsageError` if it has none."""
    gpus = torch.cuda.device_count()
    if gpus > 1 and local_rank >= gpus:
        raise UsageError(
            f"local rank {local_rank} has no GPU of its own, as this process sees {gpus}: start no more ranks on a "
            "host than it has GPUs"
        )
    return torch.device("cuda", local_rank if gpus > 1 else 0) if gpus else torch.device("cpu")


def connect_gpu(
    store: Store,
    rank: int,
    members: Sequence[int],
    timeout_s: float,
    device: torch.device,
    on_failure: Callable[[TransportError], None],
) -> Queueing:
    """What carries tensors on `device`, a rank's only GPU: NCCL; `on_failure` learns what no caller was waiting for."""
    from commrt.transport.nccl import NcclTransport  # noqa: PLC0415  # needs CuPy

    return NcclTransport(PrefixStore("nccl", store), rank, members, timeout_s, device, on_failure=on_failure)


def local_rank() -> int:
    """What a launcher says of it; 0 if none does, or what one left says nothing."""
    with suppress(UsageError):
        if (launch := launched()) is not None:
            return launch.local_rank
    return 0
