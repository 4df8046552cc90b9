# SPDX-License-Identifier: Apache-2.0
"""Ranks tell each other where they are, choose one transport for host memory, and connect it.

On whichever thread calls. Reads the store, and writes what each rank tells and how many have read
it (``read``). Raises the process's limit on open files, and keeps nothing. A world keeps
`ReconnectOptions`, to connect again in a new generation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pkgutil import resolve_name
from socket import gethostname
from typing import NamedTuple, Protocol, cast

from torch.distributed import PrefixStore, Store

from commrt.errors import CommrtError, TransportError, UsageError
from commrt.store.addresses import host_identity, is_loopback, network_address, own_address
from commrt.store.client import call_store
from commrt.store.disagreement import find_disagreement
from commrt.store.environment import variable
from commrt.store.launcher import LOOPBACK
from commrt.store.parsing import require, typed
from commrt.store.records import LINGER_S, gather, wait_until_read
from commrt.transport.names import TRANSPORTS, chosen_transport
from commrt.transport.open_files import raise_limit
from commrt.transport.protocol import Transport


class HostTransport(Protocol):
    """A class of transports for host memory: those in `TRANSPORTS`, or `HierarchicalTransport`."""

    kind: str
    one_host: bool

    def __call__(
        self,
        store: Store,
        rank: int,
        members: Sequence[int],
        timeout_s: float,
        address: str | None,
        local_members: Sequence[int],
        /,
    ) -> Transport:
        """Connect `rank` with `members`; `local_members` are on its host, which has `address`."""


class Start(NamedTuple):
    """What the ranks have told each other before they connect."""

    hosts: Mapping[int, str]
    """The host of each member, as `shared_host` says."""
    towards: str | None
    """An address in the network between the ranks; None if no rank knows one."""


def connect_hosts(store: Store, rank: int, start: Start, timeout_s: float) -> Transport:
    """Connect the members for CPU tensors, after `compare_starts`. Collective.

    COMMRT_TRANSPORT chooses the transport, or else the hosts (`suited`).
    """
    hosts = start.hosts
    connects = transport_called(chosen_transport()) or suited([*hosts.values()])
    local_members = [peer for peer, host in hosts.items() if host == hosts[rank]]
    address = listening_address(start)
    return connects(
        PrefixStore(connects.kind, store), rank, [*hosts], timeout_s, address, local_members
    )


def listening_address(start: Start) -> str | None:
    """Return the address at which the others reach this host; None with GLOO_SOCKET_IFNAME.

    Raises `UsageError` if no rank knows an address in their network.
    """
    if variable("GLOO_SOCKET_IFNAME"):
        return None
    if start.towards is None:
        raise UsageError(
            f"the name of this host, {gethostname()}, leads to no address that other hosts reach: "
            "set GLOO_SOCKET_IFNAME to its network card, or start the ranks with a MASTER_ADDR "
            "instead of a file"
        )
    return own_address(start.towards)


def transport_called(name: str | None) -> HostTransport | None:
    """Return the transport for host memory that COMMRT_TRANSPORT names; None if it names none."""
    return cast("HostTransport", resolve_name(TRANSPORTS[name])) if name in TRANSPORTS else None


def shared_host(identity: str | None, rank: int) -> str:
    """Return the name under which `rank` shares the memory of its host, whose `host_identity` this
    is; a name of its own for None.
    """
    return identity or f"none that rank {rank} can share"


def suited(hosts: Sequence[str]) -> HostTransport:
    """Return the transport for ranks on `hosts`, which `shared_host` names.

    It is shared memory on one host, Gloo where each rank has a host of its own, and both at once
    otherwise.
    """
    between = (
        "commrt.transport.hierarchical:HierarchicalTransport"
        if len(set(hosts)) < len(hosts)
        else TRANSPORTS["gloo"]
    )
    is_one_host = len(set(hosts)) == 1
    return cast("HostTransport", resolve_name(TRANSPORTS["shared"] if is_one_host else between))


def compare_starts(
    store: Store,
    rank: int,
    members: Sequence[int],
    timeout_s: float,
    choice: tuple[str, str] = ("", ""),
) -> Start:
    """Tell and ask where `members` are, once all else that they start with is the same. Collective.

    `choice` is what else must be equal, with its name. Raises `DisagreementError`, and `UsageError`
    if COMMRT_TRANSPORT cannot be.
    """
    raise_limit()
    asked = chosen_transport()
    starts = dict[int, _Told]()
    claim = {
        "world size": str(len(members)),
        "COMMRT_TRANSPORT": asked or "not set",
        choice[0]: choice[1],
    }
    identity = host_identity()
    own = _Told(shared_host(identity, rank), claim, network_address(store) or "")
    try:
        # a rank that differs from the first one need not wait for all
        for some in (members[:1], members):
            found = call_store(
                partial(gather, store, rank, some, own, timeout_s, _parse_told, stays=True),
                timeout_s,
            )
            starts = {**found, rank: own}
            claims = {peer: each.claim for peer, each in starts.items()}
            if error := find_disagreement("init", claims):
                raise error
        hosts = {peer: starts[peer].host for peer in members}
        connects = transport_called(asked)
        if connects is not None and connects.one_host and len(set(hosts.values())) > 1:
            raise UsageError(  # after all ranks have read why
                f"COMMRT_TRANSPORT={asked}, but not all ranks are on one Linux host and in one"
                " network namespace: unset it, or start them all on one"
            )
    except CommrtError:
        # The first rank, which may hold the store, stays until all have read why they end, so that
        # each says that, and not that the store is gone.
        with suppress(RuntimeError, TransportError):
            call_store(lambda: wait_until_read(store, rank, members), LINGER_S)
        raise
    call_store(lambda: store.add("read", 1), rank=rank)
    is_near = set(hosts.values()) == {identity}
    seen = [own.address, *(starts[peer].address for peer in members)]
    return Start(hosts, LOOPBACK if is_near else _towards(seen))


class _Told(NamedTuple):
    """What one rank tells the others before they connect."""

    host: str
    claim: Mapping[str, str]
    address: str
    """`network_address`, as this rank sees it; empty if there is none."""


def _towards(addresses: Sequence[str]) -> str | None:
    """Return the first of `addresses` that leads into a network; a loopback one if all are.

    On the host of the store, its name may resolve to the loopback. Then another rank's address
    leads there.

    >>> _towards(["127.0.1.1", "", "10.0.0.1"]), _towards(["127.0.0.1"]), _towards(["", ""])
    ('10.0.0.1', '127.0.0.1', None)
    """
    return min(filter(None, addresses), key=is_loopback, default=None)


def _parse_told(text: bytes) -> _Told:
    start = _Told(*typed(json.loads(text), str, dict, str))
    require(all(isinstance(value, str) for value in start.claim.values()))
    require(not start.address or ip_address(start.address))
    return start


Connect = Callable[[int, Sequence[int], float], Transport]
"""(generation, members, timeout_s) -> a host-memory transport; collective, once per generation."""


class ReconnectOptions(NamedTuple):
    """What a world needs to go on without a rank."""

    connect: Connect
    towards: str | None = None
    """An address in the network between the ranks; None if they need no liveness checks."""
    places: int = 0
    """For how many ranks there is a place, if more than began may come."""
