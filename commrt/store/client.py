# SPDX-License-Identifier: Apache-2.0
"""torch's store: how the ranks of a launch find it, calls to it that end in time, and parsers for
what ranks write.

Rank 0 holds the store, unless the launcher does.

torch's own timeouts do not help when the process that holds the store is stopped: after one has
expired, the client asks the store to cancel the request, and waits without limit for its answer
(torch 2.13).
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from datetime import timedelta
from functools import cache, partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore

from commrt.errors import DeadlineExceeded, DisagreementError, PeerLost, Place, TransportError
from commrt.store.launcher import LOOPBACK, Launch
from commrt.threads.deadline import Deadline, clock
from commrt.threads.future import outwait_calls, start_call

ANSWER_S = 2.0
"""How long the store may take to answer, from when it can.

So what waits on the store itself ends before this does.
"""
SLOW_LOOKUP_S = 2.0
STORE_HOLDER = (
    "the process that holds the store (rank 0, unless a launcher such as torchrun holds it)"
)
MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
    OverflowError,
    struct.error,
)

_log = logging.getLogger("commrt")
_held: dict[tuple[str, int], Store] = {}
"""Stores that live in this process until it ends: the next world uses the same port."""

T = TypeVar("T")


def call_store(request: Callable[[], T], waits_s: float = 0.0, rank: int | None = None) -> T:
    """Return what `request`, which may use a store, returns to `rank`; it may wait for other ranks
    for `waits_s`.

    Another thread runs the request, and is abandoned `ANSWER_S` after that. Raises
    `DeadlineExceeded` then, `PeerLost` if the connection to the store broke, and whatever else
    `request` raises. Cost: 0.035 ms.
    """
    future = start_call(request)
    deadline = Deadline(limit_s := waits_s + ANSWER_S)
    while not future.done() and (left_s := deadline.left_s) > 0:
        with suppress(TimeoutError):  # what counts is whether the answer is there when we look
            future.exception(min(left_s, deadline.poll_s))
    if not future.done():
        raise no_answer(limit_s, rank)
    try:
        return future.result()
    except DistNetworkError as error:
        what = f"the connection to the store broke: {STORE_HOLDER} ended; look at its output"
        raise PeerLost(what, Place(rank=rank, peer=0)) from error


def no_answer(limit_s: float, rank: int | None) -> DeadlineExceeded:
    """Return the error of a request of `rank` that the store has not answered within `limit_s`."""
    what = (
        f"the store gave no answer within {limit_s:g} s: {STORE_HOLDER} is stopped, or this host"
        " does not reach it"
    )
    return DeadlineExceeded(what, Place(rank=rank, peer=0))


class TimedStore:
    """The requests of torch's store, made by `rank`; each ends in time, see `call_store`. On any
    thread.

    After one that was not answered all others fail at once: a rank waits for a lost store once
    only.
    """

    def __init__(self, connection: Store, rank: int, timeout_s: Callable[[], float]) -> None:
        self.connection = connection
        self._rank = rank
        self._timeout_s = timeout_s
        self._silence: DeadlineExceeded | None = None

    def __getattr__(self, request: str) -> Callable[..., Any]:
        return lambda *args: self._call(lambda: getattr(self.connection, request)(*args))

    def read(self, key: str) -> bytes:
        """Return what stands under `key`, empty if nothing does."""
        store = self.connection
        return self._call(lambda: store.get(key) if store.check([key]) else b"")

    def _call(self, request: Callable[[], T]) -> T:
        if self._silence is not None:
            raise copy(self._silence)
        try:
            return call_store(request, self._timeout_s(), self._rank)
        except DeadlineExceeded as silence:
            self._silence = silence
            raise


def clone_connection(store: Store) -> Store:
    """Return a second connection to `store`, where torch can make one: requests on one connection
    wait in a line.
    """
    with suppress(AttributeError, RuntimeError):
        another: Store = store.clone()  # type: ignore[attr-defined]  # torch's stub is behind
        return another
    return store


def parse(what: str, text: bytes | str, read: Callable[[bytes], T]) -> T:
    """Return ``read(text)``; raise `DisagreementError`, which names it `what`, if `read` finds it
    malformed.

    >>> parse("its step", b"3", int)
    3
    """
    try:
        return read(text.encode() if isinstance(text, str) else text)
    except MALFORMED as error:
        raise malformed(what, text) from error


def malformed(what: str, text: bytes | str) -> DisagreementError:
    """Return the error for a value that cannot be parsed."""
    return DisagreementError(
        f"what the store holds as {what} cannot be parsed: {text[:60]!r}. Another version of commrt"
        " or another program writes to it: start all ranks with one version, with a MASTER_PORT of"
        " their own"
    )


def require(is_as_expected: object) -> None:
    """Raise `ValueError` unless the condition holds; for use in functions that `parse` calls."""
    if not is_as_expected:
        raise ValueError("not as expected")


def parse_int(value: object, least: int = 0) -> int:
    """Return `value` as a whole number of at least `least` and below 2^63; raise `ValueError`."""
    require(isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 63)
    return int(value)  # type: ignore[call-overload, no-any-return]  # it is one


def typed(values: Any, *kinds: type | UnionType) -> list[Any]:
    """Return `values` if they are a list of these kinds, with whole numbers from 0 on; else raise
    `ValueError`.
    """
    require(isinstance(values, list))
    for value, kind in zip(values, kinds, strict=True):
        if type(value) is int:
            parse_int(value)
        require(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)))
    return list(values)


def meet(launch: Launch, timeout_s: float) -> Store:
    """Return the store of `launch`, which rank 0 makes if the launcher holds none; raises
    `TransportError`.
    """
    where = launch.address, launch.port
    if where in _held:
        return _held[where]
    holds_it = launch.rank == 0 and not launch.store_exists
    store = _open(launch, holds_it, timeout_s)
    if holds_it:
        _held[where] = store
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))  # see `_at_exit`
    return store


@atexit.register
def _at_exit() -> None:
    """Wait for requests that nobody needs any more: the end of the store would wake them.

    A thread that comes back from C++ while the interpreter ends aborts the process. The process
    that holds the store need not wait: there the store ends with the process, after the
    interpreter.
    """
    if not _held:
        outwait_calls(ANSWER_S)


def is_loopback(address: str) -> bool:
    """Return True if no other machine can reach `address`."""
    number = _number(address)
    return number is not None and number.is_loopback


def own_address(towards: str) -> str:
    """Return the address of this host that leads to `towards`; raises `TransportError` if none
    does.
    """
    route, why = _find_route(towards)
    if route is None:
        raise TransportError(
            f"no network of this host leads to {towards} ({why}): does its name resolve here, and"
            " is there a route"
        )
    return route[1]


def network_address(store: Store) -> str | None:
    """Return an address in the network of the ranks: of the host of `store`, as this host sees it.

    A store without a host, such as a file, gives the address of this host's name, unless that is
    the loopback. None if there is none.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        time_reverse_lookup(store.host)
        route = _route(store.host)
        return None if route is None else route[0]
    route = _route(socket.gethostname())
    return None if route is None or is_loopback(route[0]) else route[0]


@cache
def time_reverse_lookup(host: str) -> None:
    """Log a warning, soon, if the name server is slow to find the name of the address of `host`.

    torch asks for it whenever it connects to a store (2.13), and waits.
    """
    start_call(partial(_time_reverse_lookup, host))


def _time_reverse_lookup(host: str) -> None:
    if (route := _route(host)) is None:
        return
    begun_s = clock.now_s()
    with suppress(OSError):
        socket.getnameinfo((route[0], 0), socket.NI_NUMERICSERV)
    if (passed_s := clock.now_s() - begun_s) >= SLOW_LOOKUP_S:
        _log.warning(
            "commrt: the name server took %.1f s to look up %s, and torch waits for that at each "
            "connection to the store: add the address to /etc/hosts, or set "
            'RES_OPTIONS="timeout:1 attempts:1"',
            passed_s,
            route[0],
        )


def _route(host: str) -> tuple[str, str] | None:
    return _find_route(host)[0]


def _find_route(host: str) -> tuple[tuple[str, str] | None, str]:
    """Return an address of `host` and the one of this host that leads to it, the loopback last; or
    None, and why.
    """
    routes = list[tuple[str, str]]()
    why = ""
    try:
        # 9: discard
        for family, kind, _, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            try:
                with socket.socket(family, kind) as probe:
                    probe.connect(target)  # sends nothing: the kernel only chooses
                    routes.append((str(target[0]), str(probe.getsockname()[0])))
            except OSError as error:
                why = str(error)
    except (OSError, UnicodeError) as error:  # the name does not resolve
        why = str(error)
    return min(routes, key=lambda route: is_loopback(route[0]), default=None), why


def host_identity() -> str | None:
    """Return a text that is equal in two processes if they can share memory; None if this platform
    cannot.

    It contains the network namespace, because abstract socket names are not visible outside of it.
    """
    try:
        os.close(os.memfd_create("commrt-probe"))
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).close()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except (AttributeError, OSError):
        return None


def _number(address: str) -> IPv4Address | IPv6Address | None:
    """Return None for a name, which other hosts may resolve to another address."""
    with suppress(ValueError):
        return ip_address(LOOPBACK if address.lower() == "localhost" else address)
    return None


def _open(launch: Launch, holds_it: bool, timeout_s: float) -> Store:
    at = f"{launch.address}:{launch.port}"
    place = Place(rank=launch.rank, peer=0)
    listener = _listener(launch) if holds_it else None
    time_reverse_lookup(launch.address)
    # With multi_tenant, groups of torch.distributed in this process can share it.
    make = partial(
        TCPStore,
        launch.address,
        launch.port,
        is_master=holds_it,
        wait_for_workers=False,
        multi_tenant=True,
    )
    limit = timedelta(seconds=timeout_s)
    begun_s = clock.now_s()
    try:
        return call_store(
            lambda: make(timeout=limit, master_listen_fd=listener), timeout_s, launch.rank
        )
    except (RuntimeError, PeerLost, DeadlineExceeded) as error:
        passed_s = min(clock.now_s() - begun_s, timeout_s)
        if holds_it and "EADDRINUSE" in f"{error} {error.__cause__}":
            what = (
                f"port {launch.port} is taken on this machine: set MASTER_PORT to a free one on"
                " every rank"
            )
            raise TransportError(what, Place(rank=launch.rank)) from error
        if (why := _why_unreachable(launch.address, launch.port)) is None:
            what = (
                f"what listens at {at} did not answer as a store within {passed_s:.1f} s: is it "
                "rank 0 of this job, and not stopped? If it is another program, set MASTER_PORT to "
                "a free port on every rank"
            )
        else:
            what = (
                f"no store at {at} within {passed_s:.1f} s: {why}. Is rank 0 running there, and do "
                "MASTER_ADDR and MASTER_PORT say the same on every rank"
            )
        is_late = isinstance(error, DeadlineExceeded) or passed_s >= timeout_s
        raise (DeadlineExceeded if is_late else TransportError)(what, place) from error


def _why_unreachable(host: str, port: int) -> str | None:
    """Return why nobody can connect to `host` now; None if one can."""
    where = host, port
    try:
        start_call(lambda: socket.create_connection(where, ANSWER_S).close()).result(ANSWER_S)
    except TimeoutError:
        return "the host, or the name server, does not answer"
    except (OSError, UnicodeError) as error:
        return str(error)
    return None


def _listener(launch: Launch) -> int | None:
    """Return a socket that listens on the launch's address only; torch itself would listen on all.

    None if the port is taken, perhaps by a store of this process, which torch shares; and if the
    address is a name, or not this machine's own, as behind NAT.
    """
    if (number := _number(launch.address)) is not None:
        with suppress(OSError):
            return listen(str(number), launch.port).detach()
    return None


def listen(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Return a listening socket for `hold`; on a free port if none is given."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)


def hold(listener: socket.socket) -> Store:
    """Return a store in this process for the ranks that connect to `listener`,
    which it takes over.
    """
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
