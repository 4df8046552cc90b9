# SPDX-License-Identifier: Apache-2.0
"""Which processes live, and which of them reach this one with more than small packets.

The members of a generation send to each other, so each must reach all others. A rank that answers a
roll call therefore asks every member's `Listener` for a message that no single packet holds.
`next_generation` says who must leave where two do not reach each other.

It touches sockets of its own only. `Processes` calls `probe` on any thread, and makes a `LinkCheck`
for roll calls, on the communication thread; both block that thread for as long as they are told.
All are asked at once: a host that is out of reach takes longest, and there may be many of them.
Sockets keep the time of the machine, whatever a test's clock says.
"""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from commrt.elastic.listener import MESSAGE

RECEIVED_NBYTES = 1 << 16
"""At most so much is taken at once."""
UNASKED = (OSError, UnicodeError)
"""What beginning a connection raises: this process has no sockets left, or the host is no name."""


def _begin_connection(address: str) -> tuple[socket.socket, int]:
    """Return a socket that connects to a `Listener.address`,
    and the error number if that failed.
    """
    host, port = address.split()
    family, kind, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind)
    connection.setblocking(False)
    error = connection.connect_ex(target)
    return connection, 0 if error == errno.EINPROGRESS else error


def probe(addresses: Collection[str], limit_s: float) -> dict[str, bool | None]:
    """Return, by `Listener.address`, whether a process listens there; None if its host is silent.

    Blocks until all have answered, at most `limit_s`; a host that is silent then may be alive.
    """
    found = dict[str, bool | None].fromkeys(addresses)
    end_s = monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for address in found:
            with suppress(*UNASKED):
                connection, error = _begin_connection(address)
                if error == 0:
                    selector.register(connection, selectors.EVENT_WRITE, address)
                else:
                    found[address] = False if error == errno.ECONNREFUSED else None
                    connection.close()
        while selector.get_map() and (left_s := end_s - monotonic()) > 0:
            for key, _ in selector.select(left_s):
                connection = key.fileobj  # type: ignore[assignment]
                error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                found[key.data] = {0: True, errno.ECONNREFUSED: False}.get(error)
                selector.unregister(connection)
                connection.close()
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return found


@dataclass(slots=True)
class _Missing:
    """What is still missing of the message of `rank` on one connection."""

    rank: int
    nbytes: int = len(MESSAGE)


class LinkCheck:
    """Asks ranks for their `Listener`'s `MESSAGE`, at their `addresses`. The thread that makes it
    uses it, and closes it.

    It asks again after `again_s`, and after twice as long each time, over one connection more:
    where packets are lost or late, a message may need longer.
    """

    def __init__(self, addresses: Mapping[int, str], again_s: float) -> None:
        self._unreached = set(addresses)  # the ranks that have not sent a whole message so far
        self._addresses = addresses
        self._again_s = again_s
        self._selector = selectors.DefaultSelector()
        self._ask()

    def _ask(self) -> None:
        self._asked_s = monotonic()
        for rank in self._unreached:
            with suppress(*UNASKED):  # asked again later
                # an error comes up when it is read
                connection, _ = _begin_connection(self._addresses[rank])
                self._selector.register(connection, selectors.EVENT_READ, _Missing(rank))

    def look(self, wait_s: float = 0.0) -> set[int]:
        """Receive for at most `wait_s` what ranks send; return those that sent no whole message.

        Returns sooner when no connection is left, also if each has refused or broken: a caller that
        looks again pauses itself.
        """
        if monotonic() - self._asked_s >= self._again_s:
            self._again_s *= 2
            self._ask()
        end_s = monotonic() + wait_s
        while self._selector.get_map():
            for key, _ in (ready := self._selector.select(max(end_s - monotonic(), 0.0))):
                self._receive(key)
            if not ready:
                break
        return set(self._unreached)

    def _receive(self, key: selectors.SelectorKey) -> None:
        connection = key.fileobj
        missing: _Missing = key.data
        with suppress(OSError):  # it refused, or broke
            if nbytes := len(connection.recv(RECEIVED_NBYTES)):  # type: ignore[union-attr]  # a socket
                missing.nbytes -= nbytes
                if missing.nbytes > 0:
                    return
                self._unreached.discard(missing.rank)
        self._end(connection)

    def _end(self, connection: object) -> None:
        self._selector.unregister(connection)  # type: ignore[arg-type]
        connection.close()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close all connections."""
        for key in list((self._selector.get_map() or {}).values()):
            self._end(key.fileobj)
        self._selector.close()
