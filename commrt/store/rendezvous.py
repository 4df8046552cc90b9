# SPDX-License-Identifier: Apache-2.0
"""The store through which the ranks of a launch find each other: rank 0 holds it, unless the launcher does."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from torch.distributed import Store, TCPStore

from commrt.errors import DeadlineExceeded, PeerLost, Place, TransportError
from commrt.store.client import call_store
from commrt.store.launcher import LOOPBACK, Launch

DISCARD_PORT = 9
"""UDP's discard: no packet is sent there."""

_held: dict[tuple[str, int], Store] = {}
"""Stores that live in this process until it ends: the next world uses the same port."""


def meet(launch: Launch, timeout_s: float) -> Store:
    """Return the store of `launch`; its rank 0 makes one if the launcher holds none.

    Raises `DeadlineExceeded` if none answers within `timeout_s`, `TransportError` if the port is taken.
    """
    where = launch.address, launch.port
    if where in _held:
        return _held[where]
    holds_it = launch.rank == 0 and not launch.store_exists
    store = _open(launch, holds_it, timeout_s)
    if holds_it:
        _held[where] = store
    return store


def is_loopback(address: str) -> bool:
    """Return True if no other machine can reach `address`."""
    number = _number(address)
    return number is not None and number.is_loopback


def own_address(towards: str) -> str:
    """Return the address of this host that leads to the host `towards`."""
    family, kind, _, _, target = socket.getaddrinfo(towards, DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing: the kernel only chooses
        return str(probe.getsockname()[0])


def host_identity() -> str | None:
    """Return a text that is equal in two processes if they can share memory; None if this platform cannot.

    It contains the network namespace, because abstract socket names are not visible outside of it.
    """
    try:
        os.close(os.memfd_create("commrt-probe"))
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).close()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except (AttributeError, OSError):
        return None


def _number(address: str) -> IPv4Address | IPv6Address | None:
    """Return None for a name, which other hosts may resolve to another address."""
    with suppress(ValueError):
        return ip_address(_numeric(address))
    return None


def _numeric(address: str) -> str:
    return LOOPBACK if address.lower() == "localhost" else address


def _open(launch: Launch, holds_it: bool, timeout_s: float) -> Store:
    at, place = f"{launch.address}:{launch.port}", Place(rank=launch.rank, peer=0)
    listener = _listener(launch) if holds_it and _number(launch.address) else None
    try:
        return call_store(lambda: _store(launch, holds_it, timeout_s, listener), timeout_s, launch.rank)
    except DeadlineExceeded as error:
        what = (
            f"what listens at {at} did not answer as a store within {timeout_s:g} s: is it rank 0 of this job, and "
            "not stopped? If it is another program, set MASTER_PORT to a free port on every rank"
        )
        raise DeadlineExceeded(what, place) from error
    except (RuntimeError, PeerLost) as error:
        if holds_it and "EADDRINUSE" in f"{error} {error.__cause__}":
            what = f"port {launch.port} is taken on this machine: set MASTER_PORT to a free one on every rank"
            raise TransportError(what, Place(rank=launch.rank)) from error
        what = (
            f"no store at {at} within {timeout_s:g} s: is rank 0 running there, is the port free, "
            "and do MASTER_ADDR and MASTER_PORT say the same on every rank"
        )
        raise DeadlineExceeded(what, place) from error


def _store(launch: Launch, holds_it: bool, timeout_s: float, listener: int | None) -> Store:
    """Open the store so that ``torch.distributed`` groups of this process can share it (multi_tenant)."""
    return TCPStore(
        launch.address,
        launch.port,
        is_master=holds_it,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener,
    )


def _listener(launch: Launch) -> int | None:
    """Return a socket that listens on the launch's address only; torch itself would listen on all.

    None if the port is taken, perhaps by a store of this process, which torch shares; and if the address is not this
    machine's own, as behind NAT.
    """
    with suppress(OSError):
        return listen(_numeric(launch.address), launch.port).detach()
    return None


def listen(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Return a listening socket for `hold`; on a free port if none is given."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)


def hold(listener: socket.socket) -> Store:
    """Return a store in this process for the ranks that connect to `listener`, which it takes over."""
    host, port = listener.getsockname()[:2]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
