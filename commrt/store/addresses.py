# SPDX-License-Identifier: Apache-2.0
"""Hosts and their addresses: which leads to another host, and which processes share memory.

Asks the system anew at each call, on the caller's thread, and keeps nothing. Sends nothing, but for
names that the system resolves. `network_address` also has `commrt.store.name_server` time one.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore

from commrt.errors import TransportError
from commrt.store.launcher import LOOPBACK
from commrt.store.name_server import warn_if_slow


def is_loopback(address: str) -> bool:
    """Return True if no other machine can reach `address`."""
    number = number_of(address)
    return number is not None and number.is_loopback


def own_address(towards: str) -> str:
    """Return this host's address that leads to `towards`; raises `TransportError` if none does."""
    route, why = _find_route(towards)
    if route is None:
        raise TransportError(
            f"no network of this host leads to {towards} ({why}): does its name resolve here, and"
            " is there a route"
        )
    return route[1]


def network_address(store: Store) -> str | None:
    """Return an address in the network of the ranks: of the host of `store`, as this host sees it.

    A store without a host, such as a file, gives the address of this host's name, unless that is
    the loopback. None if there is none. Also begins to time the name server (`warn_if_slow`), for
    stores that commrt has not opened.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        warn_if_slow(store.host)
        route = _route(store.host)
        return None if route is None else route[0]
    route = _route(socket.gethostname())
    return None if route is None or is_loopback(route[0]) else route[0]


def _route(host: str) -> tuple[str, str] | None:
    return _find_route(host)[0]


def _find_route(host: str) -> tuple[tuple[str, str] | None, str]:
    """Return an address of `host` and ours that leads to it, loopback last; or None, and why."""
    routes = list[tuple[str, str]]()
    why = ""
    try:
        # 9: discard
        for family, kind, _, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            try:
                with socket.socket(family, kind) as probe:
                    probe.connect(target)  # sends nothing: the kernel only chooses
                    routes.append((str(target[0]), str(probe.getsockname()[0])))
            except OSError as error:
                why = str(error)
    except (OSError, UnicodeError) as error:  # the name does not resolve
        why = str(error)
    return min(routes, key=lambda route: is_loopback(route[0]), default=None), why


def host_identity() -> str | None:
    """Return a text that is equal in processes that can share memory; None if this platform cannot.

    It contains the network namespace, because abstract socket names are not visible outside of it.
    """
    try:
        os.close(os.memfd_create("commrt-probe"))
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).close()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except (AttributeError, OSError):
        return None


def number_of(address: str) -> IPv4Address | IPv6Address | None:
    """Return None for a name, which other hosts may resolve to another address."""
    with suppress(ValueError):
        return ip_address(LOOPBACK if address.lower() == "localhost" else address)
    return None
