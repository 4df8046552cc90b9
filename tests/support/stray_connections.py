# SPDX-License-Identifier: Apache-2.0
"""Worker processes whose sockets get stray connections and random bytes, and where these sockets listen."""

from __future__ import annotations

import os
import random
import socket
import threading
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from pathlib import Path

import torch
from torch import nn

import commrt

LISTENS = "0A"


def listening():
    """(address, port) of every TCP socket on which this process listens."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(str(fd.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            where, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == LISTENS and f"socket:[{inode}]" in links:
                address, port = where.split(":")
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                found.append((str(ip_address(b"".join(words))), int(port, 16)))
    return found


def knock(ports, over):
    """Random bytes, half messages, silence and many connections, until it is `over`."""
    draw = random.Random(0)
    with ExitStack() as silent:
        for _ in range(30):
            for port in ports:
                with suppress(OSError):
                    silent.enter_context(socket.create_connection(("127.0.0.1", port), 1.0))
        while not over.wait(0.02):
            for port in ports:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as line:
                    line.sendall(draw.randbytes(draw.choice([0, 1, 24, 25, 26, 5000])))


def train_under_knocks(tell, steps):
    """Train under random connections; return listening addresses, how many are ours, and if replicas are equal."""
    with commrt.init(30.0) as world:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world)
        places, over = listening(), threading.Event()
        store = int(os.environ["MASTER_PORT"])
        ours = [port for _, port in places if port != store]
        stranger = threading.Thread(target=knock, args=(ours, over), daemon=True)
        stranger.start()
        while replica.step < steps:
            model(torch.full((2, 4), float(world.rank))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        equal = replica.replicas_equal()
        over.set()
        stranger.join()
        return places, len(ours), equal


def where_gloo_listens(tell):
    """The same over sockets."""
    with commrt.init(30.0) as world:
        commrt.attach(nn.Linear(2, 2), None, commrt.Ring(), world=world)
        return listening()
