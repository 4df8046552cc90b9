# SPDX-License-Identifier: Apache-2.0
"""Worker processes of a torch.distributed group that is interrupted, aborted, destroyed or left open."""

import os
import signal
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from time import monotonic

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commrt.c10d  # noqa: F401  # registers the backend

LATE = 1
"""The rank that comes late, or not at all."""


def begin(timeout_s):
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
    dist.init_process_group("commrt", timeout=timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.distributed_c10d._get_default_store()


def failed(call):
    """Return the classes and the text of the error that `call` raises, and its seconds."""
    start = monotonic()
    try:
        call()
    except BaseException as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error), monotonic() - start
    return [], "no error", monotonic() - start


def wait_again(work):
    with suppress(RuntimeError):
        work.wait()
    work.wait()


def ddp_step(model):
    model(torch.ones(4, 64)).sum().backward()


def losing_one_in_backward(tell):
    """The third backward pass of DDP lacks a rank; return what it raises, and that again from a pickle."""
    rank, _ = begin(20)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb=0.02)
    for _ in range(2):
        ddp_step(model)
    if rank == LATE:
        os.kill(os.getpid(), signal.SIGKILL)
    return failed(lambda: ddp_step(model))


def losing_the_store(tell):
    """Rank 0, which holds the store, is killed while the others wait for it."""
    rank, _ = begin(20)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return failed(dist.barrier)


def used_groups():
    """Return two groups that have chosen their schedules, so that the next call only exchanges."""
    groups = dist.new_group(), dist.new_group()
    for group in groups:
        dist.barrier(group=group)
    return groups


def when_it_waits(do, group=None):
    """Call `do` on another thread once this one is inside a collective of `group`."""
    given = group or dist.group.WORLD
    owner = given if hasattr(given, "group") else given._get_backend(torch.device("cpu"))  # torch 2.14 on
    turn = owner.group.world.comm_thread._turn

    def watch():
        while not turn.locked():
            os.sched_yield()
        do()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def interrupted(tell):
    """Rank 0 gets a Ctrl-C in a collective, then in a wait; the other rank comes after each."""
    rank, store = begin(60)
    first, second = used_groups()
    if rank == LATE:
        store.get("first")
        found = failed(lambda: [dist.barrier(group=first) for _ in range(2)])
        store.get("second")
        return found, failed(lambda: dist.barrier(group=second))
    when_it_waits(lambda: tell("waits"), first)
    found = failed(lambda: dist.barrier(group=first))
    store.set("first", "")
    work = dist.barrier(group=second, async_op=True)
    again = failed(lambda: tell("waits") or work.wait())
    store.set("second", "")
    return found, again, failed(work.wait)


def aborted(tell):
    """Rank 0 aborts the group while its main thread waits in it; then the other rank comes."""
    rank, store = begin(60)
    dist.barrier()
    if rank == LATE:
        store.get("aborted")
        return failed(lambda: [dist.barrier() for _ in range(2)])
    thread = when_it_waits(dist.group.WORLD.abort)
    found = failed(dist.barrier)
    thread.join()
    store.set("aborted", "")
    return found


def destroyed(tell, comes):
    """Rank 0 destroys the group in the middle of a collective, to which the other rank comes late, or never."""
    rank, store = begin(60)
    dist.barrier()
    dist.group.WORLD.set_timeout(timedelta(seconds=2))
    if rank == LATE:
        store.wait(["destroying" if comes else "destroyed"], timedelta(seconds=60))
        return failed(lambda: dist.all_reduce(torch.ones(100_000)))
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    store.set("destroying", "")
    ended = failed(dist.destroy_process_group)
    store.set("destroyed", "")
    return ended, failed(work.wait)


def waiting_briefly(tell):
    """Rank 0 waits for a late rank with a timeout of its own, and again when that one comes."""
    rank, store = begin(60)
    if rank == LATE:
        store.get("waited")
        dist.all_reduce(torch.ones(8))
        return None
    tensor = torch.ones(8)
    work = dist.all_reduce(tensor, async_op=True)
    before = work.is_completed()
    found = failed(lambda: work.wait(timedelta(seconds=0.1)))
    store.set("waited", "")
    work.wait()
    return found, before, [work.is_completed(), work.is_success()], tensor.tolist()


def left_open():
    """Rank 1 gets a Ctrl-C in a collective, with another one in flight; rank 0 ends with a code of its own."""
    rank, _ = begin(300)
    first, second = used_groups()
    if rank == LATE:
        dist.barrier(group=second, async_op=True)
        when_it_waits(lambda: print("waits", flush=True), first)  # noqa: T201
        dist.barrier(group=first)
    input()
    for group in (first, second):
        print(failed(lambda group=group: [dist.barrier(group=group) for _ in range(2)]), flush=True)  # noqa: T201
    sys.exit(3)


def sending_first(tell, sender):
    """A rank sends for the first time to one that does nothing before that has ended."""
    rank, store = begin(8)
    dist.barrier()
    if rank != sender:
        store.wait(["sent"], timedelta(seconds=60))
        return None
    found = failed(lambda: dist.send(torch.ones(4), 1 - sender))
    store.set("sent", "")
    return found


def hurried(tell):
    """Rank 0 shortens the timeout of a group, then receives what no other rank sends, and comes alone to a barrier."""
    rank, store = begin(60)
    dist.barrier()
    if rank == LATE:
        dist.send(torch.ones(4), 0)
        store.get("late")
        return failed(dist.barrier)
    dist.recv(torch.ones(4), LATE)  # from here on the two are connected
    dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
    from_any = failed(lambda: wait_again(dist.irecv(torch.ones(4))))
    received = failed(lambda: dist.recv(torch.ones(4), LATE))
    found = from_any, received, failed(dist.barrier)
    store.set("late", "")
    return found
