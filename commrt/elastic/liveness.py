# SPDX-License-Identifier: Apache-2.0
"""Liveness probes, which tell whether a rank's process still exists.

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

from commrt.errors import UsageError
from commrt.store.client import TimedStore, parse, parse_int, parse_list, require
from commrt.store.rendezvous import own_address
from commrt.threads.comm_thread import release_in_forked_child

__all__ = ["Listener", "Processes", "probe"]

PROBE_S = 2.0
"""How long a host may take to answer a probe."""
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
    """The processes of all ranks: which one has a rank's place now, and whether it lives. On any thread.

    Each process writes its incarnation (how many processes had the rank's place before it) and its address on the
    store. Without a `host` that all can reach (ranks are threads of one process) no process ever counts as gone.
    """

    def __init__(self, store: TimedStore, rank: int, host: str | None) -> None:
        self._store, self._rank = store, rank
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
        if self._store.compare_set(f"process/{self._rank}", before, own) != own.encode():
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
        if (rank, incarnation) not in self._addresses:
            if (latest := self._latest(rank)) is None or latest[0] != incarnation:
                return latest is not None and latest[0] > incarnation  # another process has its place
            self._addresses[rank, incarnation] = latest[1]
        return probe(self._addresses[rank, incarnation]) is False

    def _latest(self, rank: int) -> tuple[int, str] | None:
        """Return the incarnation and the address of the latest process of `rank`."""
        text = self._store.read(key := f"process/{rank}")
        return parse(key, text, _parse_process) if text else None

    def close(self) -> None:
        """Stop listening: from now on this process counts as gone. Safe to call twice."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.close()


def _parse_process(text: bytes) -> tuple[int, str]:
    incarnation, address = parse_list(text, 2)
    require(ADDRESS.fullmatch(address) and int(address.split()[1]) < 65536)
    return parse_int(incarnation), address
