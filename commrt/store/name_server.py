# SPDX-License-Identifier: Apache-2.0
"""A warning for name servers that are slow to say which name an address has.

torch asks for the name of the store's address whenever it connects (2.13), and waits. A thread of
its own asks too, once for each host; nothing comes of it but a line in the log.
"""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from functools import cache, partial

from commrt.threads.calls import start_call
from commrt.threads.deadline import clock

SLOW_LOOKUP_S = 2.0
_log = logging.getLogger("commrt")


@cache
def warn_if_slow(host: str) -> None:
    """Begin to look up the name of the address of `host`; log a warning if that takes long."""
    start_call(partial(_time_lookup, host))


def _time_lookup(host: str) -> None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # whoever connects says so
        return
    address = str(found[0][4][0])
    begun_s = clock.now_s()
    with suppress(OSError):
        socket.getnameinfo((address, 0), socket.NI_NUMERICSERV)
    passed_s = clock.now_s() - begun_s
    if passed_s >= SLOW_LOOKUP_S:
        _log.warning(
            "commrt: the name server took %.1f s to look up %s, and torch waits for that at each "
            "connection to the store: add the address to /etc/hosts, or set "
            'RES_OPTIONS="timeout:1 attempts:1"',
            passed_s,
            address,
        )
