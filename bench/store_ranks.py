# SPDX-License-Identifier: Apache-2.0
"""Ranks at a store, for `store_requests`: the measured rank, the two ranks that end its waits, and background ranks.

The measured rank runs in this process, and each rank that ends its waits in a process of its own. The background ranks
share one process with a thread per rank, which computes only when no other process wants to: in a job each would have
its own CPU.
Each rank has a `QuorumVote` and connections of its own, and runs `decide`. The store has half of the cores, all
ranks the rest. Linux only.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Event
from typing import Any, NamedTuple, cast

from torch.distributed import PrefixStore, Store, TCPStore

from commrt.backup_workers.quorum import Announcement, QuorumVote, StepOutcome
from commrt.elastic.elastic_membership import ElasticMembership
from commrt.elastic.generations import Generation
from commrt.elastic.store_membership import StoreMembership
from commrt.store.client import hold, listen
from commrt.store.launcher import LOOPBACK
from commrt.threads.future import Future, start_call

__all__ = ["MeasuredRank", "announcement", "cores", "measured_rank", "now_s"]

QUIET_S, TIMEOUT_S = 0.0003, 60.0


def now_s() -> float:
    """Return the time of a clock that all processes share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far."""
    return time.clock_gettime((~pid << 3) | 2)  # how Linux numbers that clock


def rest(pids: Sequence[int]) -> None:
    """Wait until these processes are idle."""
    before: list[float] = []
    while (now := [cpu_s(pid) for pid in pids]) != before:
        before = now
        time.sleep(QUIET_S)


def cores() -> tuple[list[int], list[int]]:
    """Return the cores of the store and those of the ranks; both use all if there is only one."""
    every = sorted(os.sched_getaffinity(0))
    return every[: len(every) // 2] or every, every[len(every) // 2 :]


class Counted:
    """A store that counts requests."""

    def __init__(self, store: Store, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def clone(self) -> Counted:
        """Return another connection."""
        return Counted(self._store.clone(), self._counts)  # type: ignore[attr-defined]  # torch's stub is behind

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        self._counts[name] += callable(found)
        return found


class VoteSetup(NamedTuple):
    """The store's port, the number of ranks, and how many of them make a step."""

    ranks: int
    needed: int
    port: int

    @property
    def first(self) -> int:
        """The rank that decides the outcome of a step, unless the measured rank does."""
        return 0

    @property
    def last(self) -> int:
        """The rank that announces last, unless the measured rank does."""
        return self.needed - 1

    def vote_of(self, rank: int, counts: Counter[str]) -> ObservedVote:
        """Return the vote of one rank, with its requests counted."""
        store: Store = TCPStore(LOOPBACK, self.port, is_master=False, wait_for_workers=False)
        for name in ("commrt/0/1", "backed 1"):
            store = PrefixStore(name, store)
        founders = Generation(0, dict.fromkeys(range(self.ranks), 0))
        # Without a watcher, as nobody is lost.
        membership = StoreMembership(PrefixStore("members", store), rank, founders, lambda: TIMEOUT_S)
        elastic = cast("ElasticMembership", Undisturbed(membership))
        vote = ObservedVote(
            cast("Store", Counted(PrefixStore("session 1", store), counts)), self.needed, elastic, nothing
        )
        counts.clear()
        return vote


class Undisturbed(NamedTuple):
    """The membership of a rank in a world that nobody leaves."""

    on_store: StoreMembership
    is_called: bool = False

    def require_open(self) -> None:
        """Do nothing: no rank gives up."""

    def ensure_generation(self, _: int) -> Generation:
        """Return the one generation."""
        return self.on_store.generation


class ObservedVote(QuorumVote):
    """A vote that says when it begins to wait for a key."""

    before_waiting: Callable[[str], None] = staticmethod(lambda _: None)

    def wait_for(self, key: str, step: int, attempt: int, members: tuple[int, ...] = ()) -> str:
        """See `QuorumVote`."""
        self.before_waiting(key)
        return super().wait_for(key, step, attempt, members)


def nothing(*_: object) -> bool:
    """Have the sum at once."""
    return True


def announcement(rank: int) -> Announcement:
    """Return what `rank` announces."""
    return Announcement(rank, 0, 32, 1767225600.1234)


class Events:
    """What happens to one of the other ranks in a step."""

    def __init__(self) -> None:
        self.waits, self.reduces, self.has_sum = Event(), Event(), Event()

    def reduce(self, *_: object) -> bool:
        """Wait until this rank has the sum."""
        self.reduces.set()
        return self.has_sum.wait()


class OtherRanks:
    """Ranks that follow the commands of the benchmark."""

    def __init__(self, setup: VoteSetup, ranks: Collection[int]) -> None:
        self._setup = setup
        self._votes = {rank: setup.vote_of(rank, Counter()) for rank in ranks}
        self._events: dict[int, Events] = {}
        self._answers: dict[int, Future[StepOutcome]] = {}

    def announce(self, step: int, ranks: Sequence[int]) -> None:
        """Announce `ranks`, and return once each of them waits or must reduce."""
        for rank in ranks:
            events, vote = Events(), self._votes[rank]
            self._events[rank], vote.reduce = events, events.reduce
            vote.before_waiting = lambda _, events=events: events.waits.set()  # type: ignore[misc]
            self._answers[rank] = start_call(partial(vote.run, announcement(rank), step))
        self._wait(ranks)

    def complete(self, step: int, rank: int, pids: Sequence[int]) -> float:
        """Let the last rank announce once all others wait; return the time."""
        rest(pids)
        begin_s = now_s()
        self.announce(step, [rank])
        return begin_s

    def have_sum(self, ranks: Sequence[int]) -> None:
        """Let members other than the first have the sum, and return once they wait."""
        for rank in ranks:
            self._events[rank].reduces.wait()
            self._events[rank].waits.clear()
            self._events[rank].reduces.clear()
            self._events[rank].has_sum.set()
        self._wait(ranks)

    def settle(self, rank: int, pids: Sequence[int]) -> float:
        """Let the first member know that all have the sum, once all others wait; return the time."""
        rest(pids)
        begin_s = now_s()
        self.have_sum([rank])
        return begin_s

    def _wait(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            events = self._events[rank]
            while not (self._answers[rank].done() or events.waits.is_set() or events.reduces.is_set()):
                time.sleep(QUIET_S)

    def end(self, step: int, _: object) -> None:
        """Check that all ranks know the same outcome of the step."""
        ends = {rank: answer.result() for rank, answer in self._answers.items()}
        members = next(iter(ends.values())).members
        if any(end.members != members or end.counts != (rank in members) for rank, end in ends.items()):
            raise AssertionError(f"step {step} ended in several ways: {ends}")
        if members[0] in ends:
            self._votes[members[0]].delete_old_steps(step)


def keep_store(pipe: Connection, on: Collection[int]) -> None:
    """Hold the store in a process, until it is killed."""
    os.sched_setaffinity(0, on)
    listener = listen()
    pipe.send(listener.getsockname()[1])
    store = hold(listener)
    pipe.recv()
    del store


def run_others(pipe: Connection, on: Collection[int], setup: VoteSetup, ranks: Collection[int]) -> None:
    """Run other ranks in a process: follow commands, and answer."""
    os.sched_setaffinity(0, on)
    if len(ranks) > 1:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    others = OtherRanks(setup, ranks)
    pipe.send(None)
    while (told := pipe.recv()) is not None:
        name, *args = told
        pipe.send(getattr(others, name)(*args))


class Group(NamedTuple):
    """Other ranks in one process."""

    ranks: Collection[int]
    pipe: Connection
    pid: int


class MeasuredRank(NamedTuple):
    """The measured rank's vote, and its view of the store and the others."""

    setup: VoteSetup
    vote: ObservedVote
    groups: Sequence[Group]
    store_pid: int

    def command(self, what: str, *args: object, ranks: Collection[int]) -> None:
        """Send a command to some of the others, and wait until they have done it."""
        asked = [(group, [rank for rank in ranks if rank in group.ranks]) for group in self.groups]
        for group, each in asked:
            group.pipe.send((what, *args, each))
        for group, _ in asked:
            group.pipe.recv()

    def connection_to(self, rank: int) -> Connection:
        """Return the connection to the process of `rank`."""
        return next(group.pipe for group in self.groups if rank in group.ranks)

    def pids_without(self, rank: int) -> list[int]:
        """Return the pids of all processes but that of `rank`."""
        return [self.store_pid, os.getpid(), *(group.pid for group in self.groups if rank not in group.ranks)]

    def store_ms(self) -> float:
        """Return the CPU time of the store so far, once all processes are idle."""
        rest([self.store_pid, *(group.pid for group in self.groups)])
        return 1e3 * cpu_s(self.store_pid)


@contextmanager
def measured_rank(rank: int, ranks: int, backups: int, counts: Counter[str]) -> Iterator[MeasuredRank]:
    """Run `rank` in this process with its requests counted, and the store and the others in processes of their own."""
    near, far = cores()
    os.sched_setaffinity(0, far)
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, {*near, *far})
        store, pid = started(stack, keep_store, near)
        setup = VoteSetup(ranks, ranks - backups, store.recv())
        background = set(range(ranks)) - {setup.first, setup.last, rank}
        groups = []
        for each in ({setup.first}, {setup.last}, background):
            pipe, group_pid = started(stack, run_others, far, setup, each)
            groups.append(Group(each, pipe, group_pid))
        vote = setup.vote_of(rank, counts)
        for group in groups:
            group.pipe.recv()
        yield MeasuredRank(setup, vote, groups, pid)


def started(stack: ExitStack, work: Callable[..., None], *args: object) -> tuple[Connection, int]:
    """Start a process that is killed at the end; return its connection and its pid."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "commrt.backup_workers.quorum"])
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *args), daemon=True)
    process.start()
    stack.callback(process.join)
    stack.callback(process.kill)
    return ours, process.pid or 0
