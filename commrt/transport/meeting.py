# SPDX-License-Identifier: Apache-2.0
"""How the ranks of one host find each other: each listens for those above it and calls those below it.

Addresses are random names in Linux's abstract namespace, so there is no file to clean up; they are told on the
store together with a password, since everybody on the host may read the names from ``/proc/net/unix``.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from math import ceil
from pathlib import Path
from time import monotonic

from torch.distributed import Store

from commrt.errors import DeadlineExceeded, PeerLost, Place
from commrt.membership.store_client import parse, require

__all__ = ["host_identity", "meet"]

RANK = struct.Struct("<I")
PASSWORD_NBYTES = 16


def host_identity() -> str | None:
    """Equal in two processes if they can share memory through `meet`; None if this platform has no means to.

    The network namespace belongs to it, since abstract names do not reach beyond one.
    """
    try:
        os.close(os.memfd_create("commrt-probe"))
        _socket().close()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except (AttributeError, OSError):
        return None


def meet(store: Store, rank: int, members: Sequence[int], timeout_s: float) -> dict[int, socket.socket]:
    """A connected socket to each other member.

    Raises `DeadlineExceeded` with the ranks that did not come, `PeerLost` for one that came and left.
    """
    deadline = monotonic() + timeout_s
    below, above = ([peer for peer in members if peer < rank], [peer for peer in members if peer > rank])
    ends: dict[int, socket.socket] = {}
    name, password = secrets.token_hex(16), secrets.token_bytes(PASSWORD_NBYTES)
    try:
        with _socket() as listener:
            listener.bind(_address(name))
            listener.listen(socket.SOMAXCONN)  # strangers may call too
            store.set(str(rank), f"{name} {password.hex()}")
            _wait_for_addresses(store, rank, below, timeout_s)
            for peer in below:
                ends[peer] = _call(store, rank, peer)
            ends.update(_callers(listener, password, above, deadline))
        if silent := set(members) - {rank, *ends}:
            raise _missing(store, rank, sorted(silent), timeout_s)  # noqa: TRY301  # all ends are closed below
    except BaseException:
        for end in ends.values():
            end.close()
        raise
    return ends


def _wait_for_addresses(store: Store, rank: int, below: Collection[int], timeout_s: float) -> None:
    try:
        store.wait([str(peer) for peer in below], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise _missing(store, rank, below, timeout_s) from error


def _call(store: Store, rank: int, peer: int) -> socket.socket:
    """Connect to a rank that listens already; the kernel takes the call even if that process is busy."""
    name, password = parse(f"address of rank {peer}", store.get(str(peer)), _told)
    end = _socket()
    try:
        end.setblocking(False)  # so many callers as there are ranks fit in the queue
        end.connect(_address(name))
        end.send(RANK.pack(rank) + password)
    except OSError as error:
        end.close()
        raise PeerLost(
            "the peer listens no more: it failed while the world was starting; look at its own output",
            Place(rank, peer),
        ) from error
    return end


def _told(said: bytes) -> tuple[str, bytes]:
    name, password = said.decode().split()
    require(len(name) == 2 * PASSWORD_NBYTES and bytes.fromhex(name))
    return name, bytes.fromhex(password)


def _callers(
    listener: socket.socket, password: bytes, expected: Collection[int], deadline: float
) -> Iterator[tuple[int, socket.socket]]:
    """Peers as they come, until all have or the deadline is over; strangers are shown out."""
    unnamed: dict[int, socket.socket] = {}
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    here = 0
    while here < len(expected) and (left_s := deadline - monotonic()) > 0:
        for fd, _ in poller.poll(ceil(left_s * 1000)):
            if fd == listener.fileno():
                end = listener.accept()[0]
                end.setblocking(False)
                unnamed[end.fileno()] = end
                poller.register(end, select.POLLIN)
                continue
            end = unnamed.pop(fd)
            poller.unregister(fd)
            caller = _introduction(end, password)
            if caller is not None and caller in expected:
                here += 1
                yield caller, end
            else:
                end.close()
    for end in unnamed.values():
        end.close()


def _introduction(end: socket.socket, password: bytes) -> int | None:
    """The rank of a caller who knows the password."""
    try:
        said = end.recv(RANK.size + len(password))
    except OSError:
        return None
    known = secrets.compare_digest(said[RANK.size :], password)
    return int(RANK.unpack_from(said)[0]) if known else None


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(name: str) -> str:
    return f"\0commrt-{name}"


def _missing(store: Store, rank: int, silent: Collection[int], timeout_s: float) -> DeadlineExceeded:
    """Names those of `silent` that never came; the others may only have waited for them."""
    peers = [peer for peer in silent if not store.check([str(peer)])] or list(silent)
    return DeadlineExceeded(
        f"ranks {peers} did not come within {timeout_s:g} s: start all of them, with the same world size, and look at "
        "the output of those that are missing",
        Place(rank, peers[0]),
    )
