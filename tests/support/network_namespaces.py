# SPDX-License-Identifier: Apache-2.0
"""Hosts for tests: network namespaces without names, which end with this process.

What a launcher opens in one is out of reach for everybody else, and its ports are free.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

__all__ = ["address", "hosts", "why_none"]

NETWORK = "10.213.8"
MINE = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
"""Options of `nsenter`: a user who is not root is root in a user namespace."""
UNSHARE = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
KEEP = "ip link set lo up && echo here && read _"


def address(host: int) -> str:
    """Of one of two hosts."""
    return f"{NETWORK}.{host + 1}"


@cache
def why_none() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    try:
        done = subprocess.run(
            [*UNSHARE, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False, timeout=20
        )
        subprocess.run(["nsenter", "--version"], capture_output=True, check=True, timeout=20)
    except FileNotFoundError as error:
        return f"{error.filename} is missing: install util-linux and iproute2"
    return f"this process may make no network namespace: {done.stderr.strip()}" if done.returncode else None


@contextmanager
def hosts() -> Iterator[list[list[str]]]:
    """Two hosts joined by a cable: what to put before a command to run it there."""
    with _kept(UNSHARE) as first, _kept([*_inside(first), "unshare", "--net"]) as second:
        both = [_inside(first), _inside(second)]
        _sh([*both[0], "ip", "link", "add", "eth", "type", "veth", "peer", "name", "eth", "netns", str(second)])
        for number, here in enumerate(both):
            _sh([*here, "ip", "addr", "add", f"{address(number)}/24", "dev", "eth"])
            _sh([*here, "ip", "link", "set", "eth", "up"])
        yield both


def _inside(process: int) -> list[str]:
    return ["nsenter", f"--target={process}", *MINE, "--net"]


@contextmanager
def _kept(unshare: list[str]) -> Iterator[int]:
    """A process in a namespace of its own that waits until it need not be there any more."""
    command = [*unshare, "sh", "-c", KEEP]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "here\n"
        yield keeper.pid


def _sh(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=20)
