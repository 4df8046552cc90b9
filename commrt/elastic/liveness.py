# SPDX-License-Identifier: Apache-2.0
"""Liveness probes, which tell whether a rank's process still exists; and reports of failing ranks.

Each process listens on a port that its kernel closes when it ends, however it ends. A broken connection says nothing,
and a store does not know who has died. A process that is only stopped still counts as alive: its kernel answers.
"""

from __future__ import annotations

import errno
import json
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from threading import Event
from typing import TypeVar

from torch.distributed import Store

from commrt.errors import PeerLost, Place, UsageError
from commrt.store.client import (
    StoreCall,
    parse,
    parse_int,
    parse_list,
    require,
    start_call,
)
from commrt.store.rendezvous import own_address
from commrt.threads.comm_thread import release_in_forked_child

__all__ = [
    "Listener",
    "Processes",
    "probe",
    "unless_lost",
]

T = TypeVar("T")

PROBE_S = 2.0
"""How long a host may take to answer a probe."""
PROBE_EVERY_S = 0.1
"""Between two looks while ranks connect."""
CLOSED_ERRNOS = (errno.EBADF, errno.EINVAL)
"""What ``accept`` reports for a socket that was closed."""
ADDRESS = re.compile(r"[0-9A-Za-z.:%_-]{1,255} [0-9]{1,5}")


class Listener:
    """Shows that this process lives, to every process that can reach the host `towards`.

    A thread calls `serve` with each connection. The default closes it.
    """

    def __init__(
        self, towards: str, serve: Callable[[socket.socket], None] = socket.socket.close, name: str = "commrt-liveness"
    ) -> None:
        host = own_address(towards)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        self.address = f"{host} {self._socket.getsockname()[1]}"
        release_in_forked_child(self)
        threading.Thread(target=_accept, args=(self._socket, serve), daemon=True, name=name).start()

    def close(self) -> None:
        """Stop listening, so that the process counts as gone. Safe to call twice."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or the thread would keep it open
        self._socket.close()

    def leave_to_parent(self) -> None:
        """Close the socket in a forked child, which must not answer for its parent."""
        self._socket.close()


def probe(address: str) -> bool | None:
    """Return True if a process listens at a `Listener.address`, False if none does, None if its host is silent.

    A host that does not answer may be alive.
    """
    host, port = address.split()
    try:
        socket.create_connection((host, int(port)), PROBE_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:  # too slow, out of reach, or this process has no sockets left
        return None
    return True


def _accept(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    while listener.fileno() >= 0:
        try:
            client = listener.accept()[0]
        except OSError as error:
            if error.errno in CLOSED_ERRNOS:
                return
            Event().wait(1.0)  # no descriptors left; the kernel answers meanwhile
            continue
        serve(client)


class Processes:
    """The processes of all ranks: which one has a rank's place now, and whether it lives.

    Each process writes its incarnation (how many processes had the rank's place before it) and its address on the
    store. Without a `host` that all can reach (ranks are threads of one process) no process ever counts as gone.
    `call_store` runs a request to the store within a deadline. Safe to use from several threads.
    """

    def __init__(self, store: Store, rank: int, host: str | None, call_store: StoreCall) -> None:
        self._store, self._rank, self._call_store = store, rank, call_store
        self._listener = None if host is None else Listener(host)
        self._addresses: dict[tuple[int, int], str] = {}  # by rank and incarnation
        self.incarnation = 0
        """Of this process."""

    def register(self) -> None:
        """Publish the address of this process, the first of its rank."""
        if self._listener is not None:
            self._publish("", self._listener)

    def replace(self) -> None:
        """Publish this process in place of the last one of its rank; raise `UsageError` if two do so at once."""
        latest = self._latest(self._rank)
        if latest is None or self._listener is None:
            raise UsageError(f"rank {self._rank} has left no address on the store, so no process can take its place")
        self.incarnation = latest[0] + 1
        self._publish(json.dumps(latest), self._listener)

    def _publish(self, before: str, listener: Listener) -> None:
        own = json.dumps([self.incarnation, listener.address])
        stands = self._call_store(lambda: self._store.compare_set(_key(self._rank), before, own))
        if stands != own.encode():
            raise UsageError(
                f"two processes take the place of rank {self._rank} at once, and the other one came first: start one"
            )

    def answers(self, rank: int) -> bool:
        """Return True if the latest process of `rank` lives, as far as this host can tell."""
        latest = self._latest(rank)
        return latest is not None and probe(latest[1]) is True

    def is_gone(self, rank: int, incarnation: int) -> bool:
        """Return True if that process of `rank` does not live. An unreachable host may be alive, and takes 2 s."""
        if self._listener is None:
            return False
        address = self._addresses.get((rank, incarnation))
        if address is None:
            latest = self._latest(rank)
            if latest is None:
                return False
            if latest[0] != incarnation:
                return latest[0] > incarnation  # another process has its place
            address = self._addresses[rank, incarnation] = latest[1]
        return probe(address) is False

    def _latest(self, rank: int) -> tuple[int, str] | None:
        """Return the incarnation and the address of the latest process of `rank`."""
        key = _key(rank)
        text = self._call_store(lambda: self._store.get(key) if self._store.check([key]) else None)
        if text is None:
            return None
        return parse(key, text, _parse_process)

    def close(self) -> None:
        """Stop listening: from now on this process counts as gone. Safe to call twice."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.close()


def _parse_process(text: bytes) -> tuple[int, str]:
    incarnation, address = parse_list(text, 2)
    require(ADDRESS.fullmatch(address) and int(address.split()[1]) < 65536)
    return parse_int(incarnation), address


def _key(rank: int) -> str:
    return f"process/{rank}"


def unless_lost(call: Callable[[], T], is_lost: Callable[[], bool], rank: int) -> T:
    """Return what `call` does on a thread of its own; raises `PeerLost` if `is_lost` says so meanwhile."""
    future = start_call(call)
    while not future.done():
        with suppress(TimeoutError):
            future.exception(PROBE_EVERY_S)
        if not future.done() and is_lost():
            raise PeerLost("a rank was lost while the members connected", Place(rank))
    return future.result()
