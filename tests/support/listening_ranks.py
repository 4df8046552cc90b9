# SPDX-License-Identifier: Apache-2.0
"""Worker processes that say where their sockets listen."""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import torch
from torch import nn

import commrt

__all__ = ["where_a_world_listens"]

LISTENS = "0A"


def where_a_world_listens(tell):
    """With backup workers, which listen for more than the transport does; return the transport and addresses."""
    with commrt.init(30.0) as world:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world)
        return world.transport.kind, _listening()


def _listening():
    """The address of every TCP socket on which this process listens."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(str(fd.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            where, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == LISTENS and f"socket:[{inode}]" in links:
                address = where.split(":")[0]
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                found.append(str(ip_address(b"".join(words))))
    return found
