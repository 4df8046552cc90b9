# SPDX-License-Identifier: Apache-2.0
"""What each worker process of test_rendezvous, test_world and test_cli runs."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist

import commrt
from commrt.cli import job
from commrt.transport.protocol import Moment

NOW = Moment(0, "test")


def ask_a_struck_holder(tell, timeout_s):
    """Rank 0, which holds the store, asks to be struck while the others wait for its answer."""
    world = commrt.init(timeout_s, start_timeout_s=60)
    world.agree("breakfast", where="here")  # all are connected
    if world.rank == 0:
        tell("strike me")
        while True:
            signal.pause()
    world.agree("lunch", where="here")
    return "agreed"


def ask_with_one_absent(tell, timeouts_s):
    """Who has no deadline stays away from the question; the others differ in their patience."""
    rank = int(os.environ["RANK"])
    world = commrt.init(timeouts_s[rank], start_timeout_s=60)
    if timeouts_s[rank] is not None:
        world.agree("lunch", where="here")
    else:
        tell("absent")
        while True:
            signal.pause()


def ddp_with_one_absent(tell, timeout_s):
    """The last rank joins DDP's group and does nothing in it."""
    with commrt.init(timeout_s, start_timeout_s=60) as world, job.ddp_group(world):
        if world.rank == world.size - 1:
            tell("absent")
            while True:
                signal.pause()
        dist.all_reduce(torch.ones(1))


def several_worlds(tell, times):
    """One world after the other in the same processes."""
    seen = []
    for number in range(times):
        with commrt.init(30) as world:
            world.agree("number", number=str(number))
            seen.append((world.rank, world.size))
    return seen


def interrupted_in_a_transfer(tell, victim, absent):
    """The victim waits for one that sends nothing, the others for the victim, which asks to be interrupted."""
    with commrt.init(300) as world:
        world.agree("ready", for_what="transfers")
        if world.rank == absent:
            tell("absent")
            while True:
                signal.pause()
        if world.rank == victim:
            tell("interrupt me")
        pair = (absent, victim) if world.rank == victim else (victim, world.rank)
        world.lane.submit(lambda: world.broadcast_now(torch.ones(8), pair, NOW)).result()
