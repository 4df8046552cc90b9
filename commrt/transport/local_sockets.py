# SPDX-License-Identifier: Apache-2.0
"""How the ranks of one host connect: a socket between each two of them, once, on the store.

Each rank listens for higher ranks and calls lower ones. Its sockets have names in Linux's abstract
namespace, so no file is left behind. A name is a hash of a secret, which is on the store only, and
of the rank that is called. So a caller is known by the name of its socket: a name can be read from
``/proc/net/unix`` while it is in use, but nobody else can guess it before, or take it then.

Done once, on the thread that connects a transport; the sockets are its own then.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from hashlib import sha256
from typing import NamedTuple

from torch.distributed import Store

from commrt.errors import DeadlineExceeded, PeerLost, Place, TransportError
from commrt.store.parsing import require, typed
from commrt.store.records import gather
from commrt.threads.deadline import clock

SECRET_NBYTES = 16


def connect(
    store: Store, rank: int, members: Sequence[int], timeout_s: float
) -> dict[int, socket.socket]:
    """Return a socket to each other member.

    Raises `DeadlineExceeded`, `PeerLost` for a rank that came and left, and `TransportError` on
    all ranks if one of them can open no sockets.
    """
    deadline = clock.now_s() + timeout_s
    own = secrets.token_bytes(SECRET_NBYTES)
    with ExitStack() as opened:
        sockets = dict[int, socket.socket]()
        problem = ""
        try:
            listener = opened.enter_context(_socket(_name(own)))
            listener.listen(socket.SOMAXCONN)  # other programs may call too
            for peer in members:
                if peer < rank:
                    sockets[peer] = opened.enter_context(_socket(_name(own, peer)))
        except OSError as error:
            problem = str(error)
        others = gather(store, rank, members, [own.hex(), problem], timeout_s, _parse_caller)
        for peer, other in others.items():
            if other.problem:
                raise TransportError(
                    f"rank {peer} can open no sockets within its host ({other.problem}): is there "
                    "a limit on open files (`ulimit -n`)",
                    Place(rank, peer),
                )
        for peer, end in sockets.items():
            _call(end, others[peer].secret, Place(rank, peer))
        callers = {_name(others[peer].secret, rank): peer for peer in members if peer > rank}
        sockets |= {
            peer: opened.enter_context(end) for peer, end in _accepted(listener, callers, deadline)
        }
        listener.close()
        missing = [*callers.values()]
        if missing:
            what = (
                f"ranks {missing} came and did not connect within {timeout_s:g} s: look at their"
                " output"
            )
            raise DeadlineExceeded(what, Place(rank, missing[0]))
        opened.pop_all()
    return sockets


def _call(end: socket.socket, secret: bytes, place: Place) -> None:
    """Connect to a rank that listens; the kernel accepts the call even if that process is busy."""
    try:
        end.setblocking(False)  # the listener's queue has room for all ranks
        end.connect(_name(secret))
    except OSError as error:
        what = (
            "the peer listens no more: it failed while the world was starting; look at its own"
            " output"
        )
        raise PeerLost(what, place) from error


class _Caller(NamedTuple):
    secret: bytes
    problem: str
    """Why the rank can open no sockets; empty if it can."""


def _parse_caller(data: bytes) -> _Caller:
    secret, problem = typed(json.loads(data), str, str)
    require(len(bytes.fromhex(secret)) == SECRET_NBYTES)
    return _Caller(bytes.fromhex(secret), problem)


def _accepted(
    listener: socket.socket, callers: dict[bytes, int], deadline: float
) -> Iterator[tuple[int, socket.socket]]:
    """Yield `callers` by name, and remove them, as they call until the deadline; refuse others."""
    while callers:
        left_s = deadline - clock.now_s()
        if left_s <= 0:
            return
        listener.settimeout(min(left_s, clock.slice_s))
        with suppress(TimeoutError):
            end, name = listener.accept()
            if name in callers:
                yield callers.pop(name), end
            else:
                end.close()


def _socket(name: bytes) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.bind(name)
    return end


def _name(secret: bytes, called: int | None = None) -> bytes:
    """Return the name of the socket by which the rank of `secret` listens, or calls `called`."""
    return b"\0commrt-" + sha256(secret + str(called).encode()).hexdigest().encode()
