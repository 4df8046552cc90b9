# SPDX-License-Identifier: Apache-2.0
"""Run a function once per rank in real processes on this machine, with their store on the loopback."""

from __future__ import annotations

import faulthandler
import os
import secrets
import socket
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, Literal

from commrt.store.launcher import LOOPBACK
from commrt.store.rendezvous import hold, listen

__all__ = ["RESTART", "Outcome", "free_port", "run_processes"]

IMPORTED = ["torch._dynamo", "torch.distributed", "commrt.training.attach"]
Start = Literal["forkserver", "spawn"]
Body = Callable[..., Any]
RESTART = "restart"
OnMessage = Callable[[int, Any, BaseProcess], bool | str | None]
"""Called with (rank, message, process). Returns True if the rank needs not end by itself, `RESTART` to start another
process in its place."""
StartRank = Callable[[int], tuple[BaseProcess, Connection]]


@dataclass(slots=True)
class Outcome:
    """How one rank ended."""

    rank: int
    value: Any = None
    error: str | None = None
    """The exception as text, if it raised one."""
    exit_code: int | None = None
    """Negative: killed by that signal. None: still alive at the end, then killed."""
    seconds: float = 0.0
    messages: list[Any] = field(default_factory=list)


def run_processes(
    size: int,
    body: Body,
    *args: Any,
    limit_s: float = 90.0,
    on_message: OnMessage | None = None,
    start: Start = "forkserver",
    holds_store: bool = False,
) -> list[Outcome]:
    """Start `size` processes with torchrun's variables set, each calling ``body(tell, *args)``.

    `body` must be importable by a new process. What it passes to ``tell(message)`` arrives here while it runs:
    `on_message` is called with the rank, the message and the process (to kill or stop it). Processes that still run
    after `limit_s` are killed; none survives this call.

    With `holds_store` this process holds their store, as torchrun's agent does, so that rank 0 may die like any other.

    Processes are forked from one that has imported torch and done nothing else, in 0.1 s each; with `start` "spawn"
    each is new, and imports for itself, in 2 to 3 s.
    """
    context = _context(start)
    listener = listen() if holds_store else None
    port = free_port() if listener is None else int(listener.getsockname()[1])
    store = listener and hold(listener)

    def start_rank(rank: int) -> tuple[BaseProcess, Connection]:
        ours, theirs = context.Pipe(duplex=False)
        given = _environment(rank, size, port, store is not None), theirs, limit_s, body, args
        process = context.Process(target=_child, args=given, daemon=True)
        process.start()
        theirs.close()
        return process, ours

    processes = [start_rank(rank) for rank in range(size)]
    outcomes = [Outcome(rank) for rank in range(size)]
    try:
        _listen(processes, start_rank, outcomes, monotonic() + limit_s, on_message)
    finally:
        _end([process for process, _ in processes], outcomes)
    return outcomes


def _context(start: Start) -> Any:
    context = get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(IMPORTED)
    return context


def free_port() -> int:
    """Return a port that nobody listens on now, below those that systems give to connections that go out."""
    while True:
        with suppress(OSError), socket.socket() as probe:
            probe.bind((LOOPBACK, port := 10_000 + secrets.randbelow(22_000)))
            return port


def _environment(rank: int, size: int, port: int, store_exists: bool) -> dict[str, str]:
    """Return this process's present environment, which a forked one does not see, with a launcher's variables."""
    launcher = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
    if store_exists:
        launcher["TORCHELASTIC_USE_AGENT_STORE"] = True
    return dict(os.environ) | {name: str(value) for name, value in launcher.items()}


def _child(environment: dict[str, str], pipe: Connection, limit_s: float, body: Body, args: Sequence[Any]) -> None:
    faulthandler.dump_traceback_later(0.9 * limit_s)  # shows where it hangs, before it is killed
    os.environ.clear()
    os.environ.update(environment)
    begin = monotonic()
    try:
        value = body(lambda message: pipe.send(("message", message, 0.0)), *args)
        pipe.send(("value", value, monotonic() - begin))
    except Exception as error:  # the parent is told, whatever it is
        text = f"{type(error).__name__}: {error}"
        pipe.send(("error", text, monotonic() - begin))
        traceback.print_exc()
        os._exit(1)


def _listen(
    processes: list[tuple[BaseProcess, Connection]],
    start_rank: StartRank,
    outcomes: list[Outcome],
    deadline: float,
    on_message: OnMessage | None,
) -> None:
    unfinished = {rank: pipe for rank, (_, pipe) in enumerate(processes)}
    while unfinished and (left := deadline - monotonic()) > 0:
        ready = wait(unfinished.values(), timeout=left)
        for rank in [rank for rank, pipe in unfinished.items() if pipe in ready]:
            process, pipe = processes[rank]
            try:
                kind, content, seconds = pipe.recv()
            except (EOFError, ConnectionResetError):
                del unfinished[rank]
                process.join(timeout=5.0)  # it closed the pipe by ending, which takes a while
                continue
            outcome = outcomes[rank]
            if kind == "message":
                outcome.messages.append(content)
            else:
                outcome.seconds = seconds
                setattr(outcome, kind, content)
            answer = on_message(rank, content, process) if kind == "message" and on_message is not None else None
            if answer == RESTART:
                process.join(timeout=5.0)
                processes[rank] = start_rank(rank)
                unfinished[rank] = processes[rank][1]
            elif answer:
                del unfinished[rank]


def _end(processes: Sequence[BaseProcess], outcomes: list[Outcome]) -> None:
    for process, outcome in zip(processes, outcomes, strict=True):
        process.join(timeout=5.0 if outcome.value is not None or outcome.error else 0.1)
        outcome.exit_code = process.exitcode
        process.kill()
        process.join()
