# SPDX-License-Identifier: Apache-2.0
"""Is a process still there? It listens on a port that its kernel closes when it ends, however it ends.

A connection tells nothing once it was broken, and a store does not know who has died. Who is merely stopped still
answers: its kernel does that.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from weakref import WeakSet

__all__ = ["Doorbell", "is_gone"]

ANSWER_S = 2.0
"""How long a host may take to answer; one that does not is taken for gone."""
ANY_PORT = 9
"""UDP's discard: no packet is sent there."""


class Doorbell:
    """Of one process; reached from wherever the host `towards` is."""

    def __init__(self, towards: str) -> None:
        family, kind, _, _, target = socket.getaddrinfo(towards, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing: the kernel only chooses the address of ours that leads there
            host = str(probe.getsockname()[0])
        self._socket = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        self.address = f"{host} {self._socket.getsockname()[1]}"
        _OPEN.add(self)
        threading.Thread(target=_answer, args=(self._socket,), daemon=True, name="commrt-doorbell").start()

    def close(self) -> None:
        """From now on it is as if the process were gone. Safe to call twice."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or the thread would keep it open
        self._socket.close()

    def leave_to_parent(self) -> None:
        """In a forked child: it must not answer for its parent."""
        self._socket.close()


def is_gone(address: str) -> bool:
    """True if nobody listens at a `Doorbell.address` any more."""
    host, port = address.split()
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except OSError:
        return True
    return False


def _answer(listener: socket.socket) -> None:
    with suppress(OSError):  # it was closed
        while True:
            listener.accept()[0].close()


_OPEN: WeakSet[Doorbell] = WeakSet()


def _after_fork() -> None:
    for doorbell in tuple(_OPEN):
        doorbell.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
