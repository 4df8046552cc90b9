# SPDX-License-Identifier: Apache-2.0
"""Worker processes in which ranks meet, fork and are interrupted, of test_rendezvous, test_world and others."""

import atexit
import json
import os
import select
import signal
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from threading import Event

import torch
import torch.distributed as dist
from failing_ranks import raised, tell_and_pause
from torch import nn
from torch.distributed import FileStore

import commrt
from commrt.algorithms import ring, tree
from commrt.errors import UsageError
from commrt.runtime import connection, init
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag

NOW = Tag(0, "test")
CHILD_LIMIT_S = 10.0
LISTENS = "0A"


def ask_without(tell, missing, timeouts_s):
    """All wait for the answer of rank `missing`, which says that it will give none."""
    world = commrt.init(60)
    world.agree("breakfast", where="here")  # all are connected
    commrt.init(timeouts_s[world.rank])
    if world.rank == missing:
        tell_and_pause(tell, "here I stop")
    world.agree("lunch", where="here")


@contextmanager
def default_group():
    """torch.distributed's, where the launcher says."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    try:
        dist.all_reduce(torch.ones(1))
        yield
    finally:
        dist.destroy_process_group()


def worlds_and_groups(tell, path, *order):
    """Worlds and torch.distributed's groups at one port, each opened inside the one before.

    "end" ends all and waits for the other rank; "next" does not wait.
    """
    launchers, ends = [], FileStore(path, 2)  # torch's own groups need ranks that wait for each other in between, too
    with ExitStack() as opened:
        for number, what in enumerate(order):
            if what == "group":
                opened.enter_context(default_group())
            elif what == "world":
                world = opened.enter_context(commrt.init(20, start_timeout_s=20))
                world.agree("the same place")
                launchers.append(world.launcher)
            else:
                opened.close()
            if what == "end":
                ends.set(f"{number}/{os.environ['RANK']}", "")
                ends.wait([f"{number}/{rank}" for rank in range(2)])
    return launchers


def interrupted_in_a_transfer(tell, victim, absent):
    """The victim waits for one that sends nothing, the others for the victim, which asks to be interrupted."""
    with commrt.init(300) as world:
        world.agree("ready", for_what="transfers")
        if world.rank == absent:
            tell_and_pause(tell, "absent")
        if world.rank == victim:
            tell("interrupt me")
        pair = (absent, victim) if world.rank == victim else (victim, world.rank)
        world.comm_thread.submit(lambda: world.run_now(tree.broadcast(2), torch.ones(8), NOW, pair)).result()


def in_a_child(body):
    """What `body` returns in a forked child, or "hung"."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(theirs, json.dumps(body()).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        said = os.read(ours, 65536) if select.select([ours], [], [], CHILD_LIMIT_S)[0] else b'"hung"'
        return json.loads(said or b'"died"')
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def child_uses_the_world(tell, in_group, port):
    """Children of every rank try all that a world offers, and open others; then the parents go on with it."""
    torch.set_num_threads(1)
    schedule, buffer, go_on = ring.all_reduce(2), torch.ones(4), Event()
    with default_group() if in_group else nullcontext(), commrt.init(30) as world:
        world.run(schedule, buffer)
        pending = world.comm_thread.submit(go_on.wait)
        uses = {
            "run": lambda: world.run(schedule, buffer),
            "agree": lambda: world.agree("lunch"),
            "submit": lambda: world.comm_thread.submit(int),
            "pending": pending.result,
            "current": init.current,
            "init": commrt.init,
            "close": world.close,
            "abort": lambda: world.abort(OSError("of the child")),
            "transport": world.transport.close,
            "exit": atexit._run_exitfuncs,
            "a world of its own": lambda: add_up_in_another_world(1, RANK="0", WORLD_SIZE="1"),
            "a world elsewhere": lambda: add_up_in_another_world(2, MASTER_PORT=str(port)),
        }
        answers = {name: in_a_child(lambda use=use: raised(use)) for name, use in uses.items()}
        go_on.set()
        world.agree("dinner")
        reported = world.store.check([f"report/{world.rank}"])
        world.run(schedule, buffer)  # after which rank 0 may end, and the store with it
        return answers, buffer.tolist(), reported


def add_up_in_another_world(size, **variables):
    os.environ.update(variables)
    if dist.is_initialized():
        dist.destroy_process_group()
    with commrt.init(8) as world:
        buffer = torch.ones(4)
        world.run(ring.all_reduce(size), buffer)
        assert buffer.tolist() == [size] * 4
        world.agree("the end")


def forks_and_waits(tell, timeout_s):
    """Rank 0 waits for rank 1, which has a child, as a DataLoader's workers are, and asks to be killed."""
    torch.set_num_threads(1)
    with commrt.init(timeout_s) as world:
        if world.rank == 1:
            if child := os.fork():
                tell(child)
            while True:
                signal.pause()
        world.transport.bind(P2PGroup([], [P2PMessage(1, torch.empty(5))]))(Tag(0, 0))


def on_hosts(tell, cases):
    """The transports that were chosen, or the errors, if rank r is on host ``hosts[r]``; a dash cannot share.

    Each case is what COMMRT_TRANSPORT says, or None, and the hosts.
    """
    return [chosen_on(*case) for case in cases]


def chosen_on(setting, hosts):
    here = hosts[int(os.environ["RANK"])]
    connection.host_identity = lambda: None if here == "-" else here
    os.environ.pop("COMMRT_TRANSPORT", None)
    os.environ.update({"COMMRT_TRANSPORT": setting} if setting else {})
    try:
        with commrt.init(30) as world:
            world.agree("all are here")
            return world.transport.kind
    except UsageError as error:
        return str(error)


def where_a_world_listens(tell):
    """With backup workers, which listen for more than the transport does; return the transport and addresses."""
    with commrt.init(30.0) as world:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world)
        return world.transport.kind, listening_addresses()


def listening_addresses():
    """Of every TCP socket on which this process listens, as Linux writes it."""
    links, found = set(), []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.add(str(fd.readlink()))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            where, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == LISTENS and f"socket:[{inode}]" in links:
                found.append(where.split(":")[0])
    return found
