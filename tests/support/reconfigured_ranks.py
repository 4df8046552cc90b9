# SPDX-License-Identifier: Apache-2.0
"""Worker processes of a torch.distributed group whose ranks change."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from time import monotonic

import torch
import torch.distributed as dist
from failing_ranks import raised

import commrt.c10d  # noqa: F401  # registers the backend

SOON_S = 20.0


def begin(timeout_s=60.0):
    """Return this process's number, the store that all share, and its handle, in a group that has no ranks yet."""
    dist.init_process_group("commrt", timeout=timedelta(seconds=timeout_s), enable_reconfigure=True)
    number, store = int(os.environ["RANK"]), dist.distributed_c10d._get_default_store()
    store.set(f"handle {number}", dist._get_reconfigure_handle())
    return number, store


def regroup(store, uuid, numbers):
    """Make the processes with these `numbers` the ranks of the group, in this order."""
    handles = [store.get(f"handle {number}").decode() for number in numbers]
    dist._reconfigure(uuid, handles, timeout=timedelta(seconds=60)).wait()


def summed(number, group=None):
    """What an all-reduce makes of this process's number."""
    tensor = torch.full((1000,), float(number))
    dist.all_reduce(tensor, group=group)
    (value,) = tensor.unique().tolist()
    return value


def changing(tell):
    """Three of four processes begin, one of these dies, and the fourth comes first in what the rest becomes."""
    number, store = begin()
    seen = [raised(lambda: summed(number))]
    if number < 3:
        regroup(store, 1, [0, 1, 2])
        pair = dist.new_group([0, 1])
        seen += [(dist.get_rank(), dist.get_world_size(), summed(number))]
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        start_s = monotonic()
        seen += [raised(lambda: summed(number)), monotonic() - start_s < SOON_S]
        regroup(store, 2, [1, 0])
        seen += [(dist.get_rank(), dist.get_world_size(), summed(number)), summed(number, pair)]
    regroup(store, 3, [3, 0, 1])
    seen += [(dist.get_rank(), dist.get_world_size(), summed(number))]
    received = torch.empty(3)
    sending = dist.isend(torch.full((3,), float(number)), (dist.get_rank() + 1) % 3)
    dist.recv(received, (dist.get_rank() - 1) % 3)
    sending.wait()
    later = dist.new_group()
    seen += [received.tolist(), summed(number, later)]
    dist.destroy_process_group()
    return seen


def in_flight(tell):
    """What works say that wait for a process which dies, or which their own process leaves, before it is waited for."""
    number, store = begin()
    regroup(store, 1, [0, 1, 2])
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(2 if number < 2 else 0)]
    if number == 2:
        for each in range(2):
            store.get(f"begun {each}")
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(f"begun {number}", "")
    seen = [raised(work.wait) for work in works]
    regroup(store, 2, [0, 1])
    if number == 1:
        store.get("alone")
        seen += [raised(lambda: [summed(number) for _ in range(2)])]  # rank 0 may have sent its part of the first one
    else:
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        regroup(store, 3, [0])
        store.set("alone", "")
        seen += [raised(work.wait)]
    regroup(store, 4, [0, 1])
    seen += [summed(number)]
    dist.destroy_process_group()
    return seen


def refused(tell):
    """What cannot work, and that a group goes on after it, and after an abort."""
    number, store = begin()
    own = dist._get_reconfigure_handle()
    seen = [raised(lambda: dist._reconfigure(1, ["another"])), raised(lambda: dist._reconfigure(1, [own, own]))]
    dist._reconfigure(7 + number, [own]).wait()
    seen += [raised(lambda: dist._reconfigure(7 + number, [own])), summed(number)]
    late = dist._reconfigure(20, sorted([own, "never there"]), timeout=timedelta(seconds=1))
    seen += [raised(late.wait)]
    regroup(store, 21, [0, 1])
    dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).abort()
    seen += [raised(lambda: summed(number))]
    regroup(store, 22, [0, 1])
    seen += [summed(number)]
    dist.destroy_process_group()
    return seen
