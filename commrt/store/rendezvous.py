# SPDX-License-Identifier: Apache-2.0
"""How the processes of a launch find torch's store. Rank 0 holds it, unless the launcher does.

`hold` opens one for processes that get its address from their parent; `listen` opens its port, and
those of other servers (`elastic.listener`). Used on the threads that start a world, processes or
such a server. `meet` keeps the store that it opens as rank 0, for good; nothing else is kept.
"""

from __future__ import annotations

import ctypes
import socket
from contextlib import suppress
from datetime import timedelta
from functools import partial

from torch.distributed import Store, TCPStore

from commrt.errors import DeadlineExceeded, PeerLost, Place, TransportError
from commrt.store.addresses import number_of
from commrt.store.client import ANSWER_S, call_store, skip_wait_at_exit
from commrt.store.launcher import LOOPBACK, Launch
from commrt.store.name_server import warn_if_slow
from commrt.threads.calls import start_call
from commrt.threads.deadline import clock

_held: dict[tuple[str, int], Store] = {}
"""By address and port, stores that live in this process until it ends: the next world uses them."""


def meet(launch: Launch, timeout_s: float) -> Store:
    """Return the store of `launch`, made by rank 0 if by no launcher; raises `TransportError`."""
    where = launch.address, launch.port
    if where in _held:
        return _held[where]
    holds_it = launch.rank == 0 and not launch.store_exists
    store = _open(launch, holds_it, timeout_s)
    if holds_it:
        _held[where] = store
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))  # see `_held`
        skip_wait_at_exit()
    return store


def _open(launch: Launch, holds_it: bool, timeout_s: float) -> Store:
    at = f"{launch.address}:{launch.port}"
    place = Place(rank=launch.rank, peer=0)
    warn_if_slow(launch.address)
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

    def opened() -> Store:
        # made at the last moment, as torch takes it over
        listener = _listener(launch) if holds_it else None
        return make(timeout=limit, master_listen_fd=listener)

    begun_s = clock.now_s()
    try:
        return call_store(opened, timeout_s, launch.rank)
    except (RuntimeError, PeerLost, DeadlineExceeded) as error:
        passed_s = min(clock.now_s() - begun_s, timeout_s)
        if holds_it and "EADDRINUSE" in f"{error} {error.__cause__}":
            what = (
                f"port {launch.port} is taken on this machine: set MASTER_PORT to a free one on"
                " every rank"
            )
            raise TransportError(what, Place(rank=launch.rank)) from error
        why = _why_unreachable(launch.address, launch.port)
        if why is None:
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
    number = number_of(launch.address)
    if number is not None:
        with suppress(OSError):
            return listen(str(number), launch.port).detach()
    return None


def listen(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Return a listening socket, as `hold` takes it; on a free port if none is given."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)


def hold(listener: socket.socket) -> Store:
    """Return a store in this process for ranks that connect to `listener`, which it takes over."""
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
