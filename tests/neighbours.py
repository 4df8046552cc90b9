# SPDX-License-Identifier: Apache-2.0
"""What each worker process of test_shared runs."""

from __future__ import annotations

import os
import signal

import torch

import commrt
from commrt.runtime import connection
from commrt.transport.protocol import Group, Moment, Parcel


def forks_and_waits(tell, timeout_s):
    """Rank 0 waits for rank 1, which has a child, as a DataLoader's workers are, and asks to be killed."""
    torch.set_num_threads(1)
    with commrt.init(timeout_s) as world:
        if world.rank == 1:
            child = os.fork()
            if child:
                tell(child)
            while True:
                signal.pause()
        world.transport.bind(Group([], [Parcel(1, torch.empty(5))]))(Moment(0, 0))


def on_hosts(tell, hosts):
    """The transport that was chosen if rank r is on host ``hosts[r]``; a dash for one that cannot share."""
    here = hosts[int(os.environ["RANK"])]
    connection.host_identity = lambda: None if here == "-" else here
    with commrt.init(30) as world:
        world.agree("all are here")
        return world.transport.kind
