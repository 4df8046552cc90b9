# SPDX-License-Identifier: Apache-2.0
"""What a rank does for others while it trains: it hands out its state, and comes when it is called.

On sockets and threads of its own, so that who is slow disturbs nobody. A caller shows a password that was told on the
store, asks one question of a kind and a number, and gets yes and some bytes, or no.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Event

from commrt.doorbell import OVER, own_address

__all__ = ["Service", "asked"]

PASSWORD_NBYTES = 16
QUESTION = struct.Struct(f"<{PASSWORD_NBYTES}scQ")
ANSWER = struct.Struct("<?Q")
PIECE_NBYTES = 1 << 20
LIMIT_S = 60.0
"""How long a caller may be silent in the middle of a conversation."""

Handler = Callable[[int], bytes | None]
"""What to answer to a number; None for no."""


class Service:
    """Listens where the host `towards` leads to, and answers each kind of question by its handler, on a thread each."""

    def __init__(self, towards: str, handlers: Mapping[bytes, Handler]) -> None:
        host = own_address(towards)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        self._handlers, self._password = handlers, secrets.token_bytes(PASSWORD_NBYTES)
        self.address = f"{host} {self._listener.getsockname()[1]} {self._password.hex()}"
        """For the store."""
        threading.Thread(target=self._listen, daemon=True, name="commrt-service").start()

    def close(self) -> None:
        """Take no more callers. Safe to call twice."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or the thread would keep it open
        self._listener.close()

    def _listen(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                caller = self._listener.accept()[0]
            except OSError as error:
                if error.errno in OVER:
                    return
                Event().wait(1.0)  # no descriptors left
                continue
            threading.Thread(target=self._serve, args=(caller,), daemon=True, name="commrt-service").start()

    def _serve(self, caller: socket.socket) -> None:
        with caller, suppress(OSError):
            caller.settimeout(LIMIT_S)
            said = _received(caller, QUESTION.size)
            password, kind, number = QUESTION.unpack(said)
            if secrets.compare_digest(password, self._password) and kind in self._handlers:
                answer = self._handlers[kind](number)
                caller.sendall(ANSWER.pack(answer is not None, len(answer or b"")))
                caller.sendall(answer or b"")


def asked(address: str, kind: bytes, number: int, limit_s: float) -> bytes | None:
    """The answer of the `Service` at `address`; None if it says no, or nothing for `limit_s` seconds."""
    host, port, password = address.split()
    try:
        with socket.create_connection((host, int(port)), limit_s) as line:
            line.sendall(QUESTION.pack(bytes.fromhex(password), kind, number))
            yes, nbytes = ANSWER.unpack(_received(line, ANSWER.size))
            return _received(line, nbytes) if yes else None
    except OSError:
        return None


def _received(line: socket.socket, nbytes: int) -> bytes:
    """Raises `ConnectionError` if the other end says less."""
    buffer = bytearray(nbytes)
    view, at = memoryview(buffer), 0
    while at < nbytes:
        if not (count := line.recv_into(view[at : at + PIECE_NBYTES])):
            raise ConnectionError
        at += count
    return bytes(buffer)
