# SPDX-License-Identifier: Apache-2.0
"""Shuts the sockets on which Gloo listens to strangers, once all ranks have connected.

Gloo listens for as long as its transport lives (torch 2.14). It accepts every connection, keeps it,
and aborts a process without free descriptors. The sockets are Gloo's, so they cannot be closed
here. A filter in the kernel drops what arrives for them; connections that exist are not affected.

Called on the thread that connects, and looks at all sockets of the process; closes none.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SO_ATTACH_FILTER = 26
"""Linux's number."""
DROP_ALL = struct.pack("=HBBI", 6, 0, 0, 0)
"""A program of the kernel's packet filter: return 0 bytes of each packet."""


def refuse_connections(published: bytes) -> None:
    """Let nobody connect any more to those of this process's sockets that are `published`.

    That text has their addresses as C has them. Does nothing where the system has no such filters.
    """
    for end in _listening():
        if _sockaddr(end) in published:
            program = ctypes.create_string_buffer(DROP_ALL)
            attached = struct.pack("HP", 1, ctypes.addressof(program))
            with suppress(OSError):  # the system refuses
                end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, attached)


def _listening() -> Iterator[socket.socket]:
    """Yield the TCP sockets on which this process listens, which stay open."""
    links = [*Path("/proc/self/fd").iterdir()] if Path("/proc/self/fd").exists() else []
    for link in links:
        with suppress(OSError):  # it was closed meanwhile
            if str(link.readlink()).startswith("socket:"):
                end = socket.socket(fileno=int(link.name))
                try:
                    listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if listens and end.family in {socket.AF_INET, socket.AF_INET6}:
                        yield end
                finally:
                    end.detach()  # whoever opened it closes it


def _sockaddr(end: socket.socket) -> bytes:
    """Return the family, the port and the address of `end`, as in ``struct sockaddr``."""
    host, port, *more = end.getsockname()
    flow = struct.pack("!I", more[0]) if more else b""
    address = socket.inet_pton(end.family, host)
    return struct.pack("=H", end.family) + struct.pack("!H", port) + flow + address
