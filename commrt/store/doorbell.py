# SPDX-License-Identifier: Apache-2.0
"""Is a process still there? It listens on a port that its kernel closes when it ends, however it ends.

A connection tells nothing once it was broken, and a store does not know who has died. Who is merely stopped still
answers: its kernel does that.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from contextlib import suppress
from threading import Event
from weakref import WeakSet

__all__ = ["Doorbell", "answers", "is_gone", "own_address"]

ANSWER_S = 2.0
"""How long a host may take to answer."""
OVER = (errno.EBADF, errno.EINVAL)
"""What ``accept`` says of a socket that was closed."""
ANY_PORT = 9
"""UDP's discard: no packet is sent there."""


class Doorbell:
    """Of one process; reached from wherever the host `towards` is."""

    def __init__(self, towards: str) -> None:
        host = own_address(towards)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
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


def own_address(towards: str) -> str:
    """The address of this host that leads to another one."""
    family, kind, _, _, target = socket.getaddrinfo(towards, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing: the kernel only chooses
        return str(probe.getsockname()[0])


def is_gone(address: str) -> bool:
    """True if nobody listens at a `Doorbell.address` any more; a host that does not answer may be alive."""
    try:
        _ring(address)
    except ConnectionRefusedError:
        return True
    except OSError:  # too slow, out of reach, or this process has no sockets left
        return False
    return False


def answers(address: str) -> bool:
    """True if somebody does listen there."""
    try:
        _ring(address)
    except OSError:
        return False
    return True


def _ring(address: str) -> None:
    host, port = address.split()
    socket.create_connection((host, int(port)), ANSWER_S).close()


def _answer(listener: socket.socket) -> None:
    while listener.fileno() >= 0:
        try:
            listener.accept()[0].close()
        except OSError as error:
            if error.errno in OVER:
                return
            Event().wait(ANSWER_S)  # no descriptors left; the kernel answers meanwhile


_OPEN: WeakSet[Doorbell] = WeakSet()


def _after_fork() -> None:
    for doorbell in tuple(_OPEN):
        doorbell.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
