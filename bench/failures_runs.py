# SPDX-License-Identifier: Apache-2.0
"""Draw failures, start the processes of a run, let failures happen to them, and start again what they end.

DDP runs under torchrun's agent, which ends and starts all processes after a failure. For the others, `Supervisor`
starts a process in the place of each that ended, or all of them if the job cannot go on without.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import sqrt
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from threading import Event, Thread, Timer
from time import monotonic
from typing import Any

import failures_worker as worker
import torch
from failures_worker import Job, board, run_rank
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from commrt.store.launcher import LOOPBACK
from commrt.store.rendezvous import hold, listen

PRELOADED = [
    "torch._dynamo",
    "torch.distributed",
    "commrt.training.attach",
    "commrt.backup_workers.backup_replica",
    "commrt.c10d.process_group",
    "failures_worker",
    "ddp_survives",
]
POLL_S = 0.004
HEARTBEAT_MS, JOIN_MS, TICK_MS = 1000, 1000, 10
"""The lighthouse's limits for a replica to be heard of, and to join; how often it looks. Its defaults are longer."""
LINGER_S = 20.0
"""How long processes may take to end after the first one has the final model."""
TORCHFT_LINGER_S = 2.0
"""The same with torchft, where a process that is started last trains alone."""
AGENT_PERIOD_S = 0.1
"""How often torchrun's agent looks at its processes: its default."""
KINDS = ("kill", "stop", "exception", "slow", "exit")
STOPPED_S = (0.5, 1.5)
"""How long a process is stopped; less than the timeout of all contenders."""
SLOW_S = 2.0
"""How long a process computes at a third of its speed."""
COMMANDS = {"exception": worker.RAISE, "exit": worker.EXIT, "sending": worker.DIE_SENDING}


@dataclass(frozen=True)
class Failure:
    """A failure of one rank, which happens when the run reaches a step for the first time."""

    step: int
    share: float
    """So much of a step's compute time later."""
    victim: int
    kind: str
    lasts_s: float
    """Of ``stop`` and ``slow``; otherwise 0."""


def draw(seed: int, every: int | None, steps: int, ranks: int, among: Sequence[str] = KINDS) -> list[Failure]:
    """Return the failures of a run: one for each `every` steps, at random places, of all kinds in turn.

    Short runs at low rates would often have none if their number were random, too.

    >>> len(draw(0, 10, 100, 4)), draw(0, None, 100, 4)
    (10, [])
    """
    if every is None:
        return []
    rng = Random(f"{seed} {every}")
    places = sorted(rng.uniform(0, steps) for _ in range(max(1, round(steps / every))))
    kinds = [among[(seed + number) % len(among)] for number in range(len(places))]
    rng.shuffle(kinds)
    found = []
    for place, kind in zip(places, kinds, strict=True):
        lasts_s = {"stop": rng.uniform(*STOPPED_S), "slow": SLOW_S}.get(kind, 0.0)
        found.append(Failure(int(place), place % 1, rng.randrange(ranks), kind, lasts_s))
    return found


def checkpoint_interval(checkpoint_s: float, step_s: float, every: int | None) -> int:
    """Return after how many steps to write a checkpoint: sqrt(2 x its cost x the mean time between failures).

    >>> checkpoint_interval(0.01, 0.1, 80)
    4
    """
    if every is None:
        return 0
    return max(1, round(sqrt(2 * checkpoint_s * every * step_s) / step_s))


@dataclass
class Run:
    """What happened in a run."""

    job: Job
    failures: Sequence[Failure]
    struck: list[dict[str, Any]] = field(default_factory=list)
    """The failures that happened: kind, rank, time; and whether there was a process to hit."""
    starts: int = 0
    """Processes that were started in the place of others."""
    trouble: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)


class Striker(Thread):
    """Lets the failures of a run happen, when it first reaches their steps."""

    def __init__(self, found: Run) -> None:
        super().__init__(daemon=True)
        self._found, self.over = found, Event()
        self._board = board(found.job.folder, found.job.ranks)
        self._stopped = set[int]()

    def run(self) -> None:
        """Look at the progress of the run until it is over."""
        for failure in self._found.failures:
            while self._board[:, worker.STEP].max() < failure.step:
                if self._is_over(POLL_S):
                    return
            if self._is_over(failure.share * self._found.job.compute_s):
                return
            self._strike(failure)

    def _is_over(self, wait_s: float) -> bool:
        return self.over.wait(wait_s) or self._board[:, worker.DONE].any()

    def _strike(self, failure: Failure) -> None:
        row = self._board[failure.victim]
        pid = int(row[worker.PID])
        is_hit = _is_alive(pid)
        self._found.struck.append({"kind": failure.kind, "hit": is_hit, "at_s": monotonic()})
        if not is_hit:
            return
        if failure.kind == "kill":
            _signal(pid, signal.SIGKILL)
        elif failure.kind == "stop":
            self._pause(pid, failure.lasts_s)
        elif failure.kind == "slow":
            row[worker.SLOW_UNTIL] = monotonic() + failure.lasts_s
        else:
            row[worker.COMMAND] = COMMANDS[failure.kind]

    def _pause(self, pid: int, lasts_s: float) -> None:
        self._stopped.add(pid)
        _signal(pid, signal.SIGSTOP)
        resume = Timer(lasts_s, _signal, (pid, signal.SIGCONT))
        resume.daemon = True
        resume.start()

    def end(self) -> None:
        """End the thread, and resume all processes."""
        self.over.set()
        self.join()
        for pid in self._stopped:
            _signal(pid, signal.SIGCONT)


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    return False


def _signal(pid: int, number: int) -> None:
    if _is_alive(pid):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def run(job: Job, failures: Sequence[Failure], limit_s: float) -> Run:
    """Run one contender in its folder, with failures, and return what happened."""
    found = Run(job, failures)
    board(job.folder, job.ranks)
    striker = Striker(found)
    striker.start()
    try:
        if job.contender in worker.RESTARTED:
            _run_with_torchrun(found, limit_s)
        else:
            Supervisor(found).run(limit_s)
    finally:
        striker.end()
    found.events = sorted(_events(Path(job.folder)), key=lambda event: event["at_s"])
    return found


def _events(folder: Path) -> Iterator[dict[str, Any]]:
    for path in folder.glob("events-*"):
        yield from (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def context() -> Any:
    """Return the way to start processes: forked from one that has imported everything."""
    found = get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def _run_with_torchrun(found: Run, limit_s: float) -> None:
    context()
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # otherwise Gloo finds addresses of before the restart
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    job = found.job
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.ranks,
        run_id=Path(job.folder).name,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        local_addr=LOOPBACK,
        max_restarts=10_000,
        monitor_interval=AGENT_PERIOD_S,
        start_method="forkserver",
    )
    over = Event()
    watchdog = Thread(target=_end_late_processes, args=(found, limit_s, over), daemon=True)
    watchdog.start()
    try:
        elastic_launch(config, run_rank)(job)
    except Exception as error:
        found.trouble.append(f"torchrun: {type(error).__name__}: {error}")
    over.set()
    watchdog.join()


def _end_late_processes(found: Run, limit_s: float, over: Event) -> None:
    """Kill processes that run for too long; the agent then starts some that end at once."""
    rows, deadline_s = board(found.job.folder, found.job.ranks), monotonic() + limit_s
    while not over.wait(0.1):
        if rows[:, worker.DONE].any():
            deadline_s = min(deadline_s, monotonic() + LINGER_S)
        if monotonic() > deadline_s:
            found.trouble.append("the processes did not end in time")
            (Path(found.job.folder) / worker.OVER).touch()
            for pid in rows[:, worker.PID]:
                _signal(int(pid), signal.SIGKILL)
            return


def lighthouse() -> Any:
    """Return the server through which torchft's replicas find each other."""
    from torchft.coordination import LighthouseServer  # noqa: PLC0415  # not on all platforms

    return LighthouseServer(
        bind=f"{LOOPBACK}:0",
        min_replicas=1,
        join_timeout_ms=JOIN_MS,
        quorum_tick_ms=TICK_MS,
        heartbeat_timeout_ms=HEARTBEAT_MS,
    )


class Supervisor:
    """Starts processes in the place of those that end."""

    def __init__(self, found: Run) -> None:
        self._found, self._job, self._context = found, found.job, context()
        self._board = board(found.job.folder, found.job.ranks)
        self._folder, self._attempt = Path(found.job.folder), 0
        self._replaces = found.job.contender not in ("gossip", "local")
        self._processes: dict[int, BaseProcess] = {}
        self._lighthouse = lighthouse() if found.job.contender in worker.TORCHFT else None

    def run(self, limit_s: float) -> None:
        """Run the job to its end."""
        deadline_s, done_s = monotonic() + limit_s, None
        self._start_all()
        try:
            while self._processes:
                now_s = monotonic()
                if done_s is None and self._board[:, worker.DONE].any():
                    done_s = now_s
                if self._lighthouse and done_s is not None and now_s > done_s + TORCHFT_LINGER_S:
                    return
                if now_s > deadline_s or (done_s is not None and now_s > done_s + LINGER_S):
                    self._found.trouble.append(f"ranks {sorted(self._processes)} did not end in time")
                    return
                self._look(is_done=done_s is not None)
                Event().wait(POLL_S)
        finally:
            self._kill()
            if self._lighthouse:
                self._lighthouse.shutdown()

    def _start_all(self) -> None:
        listener = listen()
        port = int(listener.getsockname()[1])
        self._store = hold(listener)
        self._environment = {
            "WORLD_SIZE": str(self._job.ranks),
            "LOCAL_WORLD_SIZE": str(self._job.ranks),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if self._lighthouse:
            self._environment["TORCHFT_LIGHTHOUSE"] = self._lighthouse.address()
        for rank in range(self._job.ranks):
            self._start(rank)

    def _start(self, rank: int) -> None:
        environment = {**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = self._context.Process(target=_child, args=(environment, self._job, self._attempt), daemon=True)
        process.start()
        self._processes[rank] = process

    def _look(self, *, is_done: bool) -> None:
        ended = {rank: each.exitcode for rank, each in self._processes.items() if each.exitcode is not None}
        for rank in ended:
            del self._processes[rank]
        if is_done:
            return
        if worker.EXIT_CODES["QuorumLost"] in ended.values() or not (self._processes or self._replaces):
            self._restart()
        elif self._replaces:
            for rank in ended:
                self._found.starts += 1
                self._start(rank)

    def _restart(self) -> None:
        """Start all processes again, from the latest state that any of them saved."""
        self._kill()
        saved = [self._folder / worker.CHECKPOINT, *self._folder.glob(f"last-{self._attempt}-*.pt")]
        saved += [self._folder / f"resume-{self._attempt}.pt"]
        steps = {path: torch.load(path)["step"] for path in saved if path.exists()}
        self._attempt += 1
        if steps:
            shutil.copy(max(steps, key=lambda path: steps[path]), self._folder / f"resume-{self._attempt}.pt")
        self._start_all()

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        self._processes.clear()


def _child(environment: dict[str, str], job: Job, attempt: int) -> None:
    os.environ.update(environment)
    run_rank(job, attempt)
