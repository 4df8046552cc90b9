# SPDX-License-Identifier: Apache-2.0
"""A port on which a process listens and answers, so that others can tell that it lives.

The kernel closes the port when the process ends, however it ends. A broken connection says nothing.
A process that is only stopped still counts as alive: its kernel answers. Callers are in `links`.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Event

from commrt.errors import TransportError
from commrt.store.addresses import own_address
from commrt.store.rendezvous import listen
from commrt.threads.forking import release_in_forked_child
from commrt.threads.starting import start_thread

CLOSED_ERRNOS = (errno.EBADF, errno.EINVAL)
"""What ``accept`` reports for a socket that was closed."""
MESSAGE = bytes(1 << 15)
"""What `send_message` sends to each caller: larger than usual packets, to notice if those are
dropped.
"""


class Listener:
    """Shows that this process lives, to every process that can reach the host `towards`.

    A thread of its own, which begins here, calls `serve` with each connection. The default closes
    it. `close` is safe on any thread.
    """

    def __init__(
        self,
        towards: str,
        serve: Callable[[socket.socket], None] = socket.socket.close,
        name: str = "commrt-liveness",
    ) -> None:
        host = own_address(towards)
        try:
            self._socket = listen(host)
        except OSError as error:
            raise TransportError(
                f"this process cannot listen at {host} ({error}): is there a limit on open files"
                " (`ulimit -n`)"
            ) from error
        self.address = f"{host} {self._socket.getsockname()[1]}"
        """Host and port; a `StateServer` adds its password, when it is made."""
        release_in_forked_child(self)
        start_thread(_accept, name, self._socket, serve)

    def close(self) -> None:
        """Stop listening, so that the process counts as gone. Safe to call twice."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or the thread would keep it open
        self._socket.close()

    def leave_to_parent(self) -> None:
        """Close the socket in a forked child, which must not answer for its parent."""
        self._socket.close()


def send_message(client: socket.socket) -> None:
    """Send `MESSAGE` to `client`, which is not waited for, and close the connection."""
    with client, suppress(OSError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(MESSAGE))
        client.setblocking(False)
        client.send(MESSAGE)


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
