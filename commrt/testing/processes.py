# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine as ranks: they start, tell, and end each in its way, even killed.

`run_processes` is for tests: its processes are not forked from this one, so it may have threads.
`Crew`, which `workers` uses too, starts them any way, and listens on the thread that made it. All
have this process's environment with torchrun's variables, and find each other at a free port of the
loopback. `on_message` is called on the thread that listens.
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, Literal

from torch.distributed import Store

from commrt.errors import CommrtError, UsageError
from commrt.store.launcher import LOOPBACK
from commrt.store.rendezvous import hold, listen

IMPORTED = ["torch._dynamo", "torch.distributed", "commrt.training.attach"]
EXIT_S = 5.0
"""How long a process may take to exit after its last message."""
Start = Literal["forkserver", "spawn"]
Body = Callable[..., Any]
RESTART = "restart"
OnMessage = Callable[[int, Any, BaseProcess], bool | str | None]
"""Called with (rank, message, process).

Returns True if the rank needs not end by itself, `RESTART` to start another process in its place.
"""


@dataclass(slots=True)
class Outcome:
    """How one rank ended, as far as is known: only its `Crew` fills it in, as it listens."""

    rank: int
    value: Any = None
    """What the body returned."""
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

    `body` must be importable by a new process, or `UsageError` says so. What it passes to
    ``tell(message)`` arrives here while it runs: `on_message` is called with the rank, the message
    and the process (to kill or stop it). Processes that still run after `limit_s` are killed; none
    survives this call.

    With `holds_store` this process holds their store, as torchrun's agent does, so that rank 0 may
    die like any other.

    Processes are forked from one that has imported torch and done nothing else, in 0.1 s each; with
    `start` "spawn" each is new, and imports for itself, in 2 to 3 s.
    """
    _require_importable(body)
    context: Any = get_context(start)
    context.set_forkserver_preload(IMPORTED)  # of "forkserver" only
    crew = Crew(size, body, args, context, listen() if holds_store else None, 0.9 * limit_s)
    try:
        crew.start()
        crew.listen(limit_s, on_message)
        crew.note_exits()
    finally:
        crew.close()
    return crew.outcomes


def _require_importable(body: Body) -> None:
    """Raise `UsageError` if new processes cannot find the module of `body` on this one's path.

    Pytest imports test modules from their files, under names that only it knows.
    """
    name, places = "", None
    for part in body.__module__.split("."):
        name = f"{name}.{part}" if name else part
        found = (finder.find_spec(name, places) for finder in sys.meta_path)
        spec = next((each for each in found if each is not None), None)
        if spec is None and name != "__main__":
            raise UsageError(
                f"new processes cannot import {body.__module__}, which has {body!r:.80}: put it"
                " into a module that new processes can import, in a folder of sys.path"
            )
        places = None if spec is None else spec.submodule_search_locations or []


class Crew:
    """The processes of one run, and how they end. Used on the thread that made it.

    Call `start`, `listen`, perhaps `note_exits`, and `close` in any case; read what is public. With
    a `listener`, this process holds their store, which starts threads. Processes with `daemon` may
    have no children of their own.
    """

    def __init__(
        self,
        size: int,
        body: Body,
        args: Sequence[Any],
        context: Any,
        listener: socket.socket | None,
        dump_s: float,
        *,
        daemon: bool = True,
    ) -> None:
        self._given = (dump_s, body, args)
        self._context = context
        self._listener = listener
        self._daemon = daemon
        self._port = free_port() if listener is None else int(listener.getsockname()[1])
        self._store: Store | None = None
        self.outcomes = [Outcome(rank) for rank in range(size)]
        """By rank."""
        self.ended: list[Outcome] = []
        """In the order in which they returned, raised or died."""
        self._processes: dict[int, BaseProcess] = {}
        self.running: dict[int, Connection] = {}
        """By rank, the pipes of those that have not ended, and may still tell something."""

    def start(self) -> None:
        """Start all processes; raises `CommrtError` if there are too many."""
        size = len(self.outcomes)
        for rank in range(size):
            try:
                self._start(rank)
            except OSError as error:
                what = f"worker {rank} of {size} could not be started: {error}"
                raise CommrtError(f"{what}: ask for fewer, or raise the limit (ulimit)") from error
        if self._listener is not None:
            # starts threads, so it comes after forks; who connects earlier waits
            self._store = hold(self._listener)

    def _start(self, rank: int) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        environment = _environment(rank, len(self.outcomes), self._port, self._listener is not None)
        process = self._context.Process(
            target=_child, args=(environment, theirs, *self._given), daemon=self._daemon
        )
        process.start()
        theirs.close()
        self._processes[rank] = process
        self.running[rank] = ours

    def listen(
        self,
        limit_s: float,
        on_message: OnMessage | None = None,
        patience_s: Callable[[], float] = lambda: inf,
    ) -> None:
        """Note what processes send until all end: `limit_s` at most, `patience_s` for the next."""
        deadline = monotonic() + limit_s
        while self.running and (left_s := min(deadline - monotonic(), patience_s())) > 0:
            ready = wait(self.running.values(), None if left_s == inf else left_s)
            if not ready:
                return
            for rank in [rank for rank, pipe in self.running.items() if pipe in ready]:
                self._hear(rank, on_message)

    def _hear(self, rank: int, on_message: OnMessage | None) -> None:
        """Note what `rank` has sent (see `_child`), or that it has ended."""
        outcome = self.outcomes[rank]
        process = self._processes[rank]
        try:
            kind, content, outcome.seconds = self.running[rank].recv()
        except (EOFError, OSError):
            self.running.pop(rank).close()
            process.join(EXIT_S)  # it closed the pipe by ending, which takes a while
            outcome.exit_code = process.exitcode
            if outcome.value is None and outcome.error is None:
                self.ended.append(outcome)
            return
        if kind == "message":
            outcome.messages.append(content)
            answer = None if on_message is None else on_message(rank, content, process)
            if answer == RESTART:
                process.join(EXIT_S)
                self._start(rank)
            elif answer:
                self.running.pop(rank).close()
            return
        if kind == "value":
            outcome.value = content
        else:
            outcome.error = content
        self.ended.append(outcome)

    def note_exits(self) -> None:
        """Wait shortly for processes to exit, longer for those that sent a result; note how."""
        for outcome, process in zip(self.outcomes, self._processes.values(), strict=True):
            process.join(EXIT_S if outcome.value is not None or outcome.error else 0.1)
            outcome.exit_code = process.exitcode

    def close(self) -> None:
        """Kill all processes, stopped ones too, and let go of the store."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
            process.close()
        for pipe in self.running.values():
            pipe.close()
        if self._listener is not None:
            self._listener.close()
        self._store = None  # the traceback of an error may keep this object alive


def free_port() -> int:
    """Return a port that is free now, below those that systems give to outgoing connections."""
    while True:
        with suppress(OSError), socket.socket() as probe:
            probe.bind((LOOPBACK, port := 10_000 + secrets.randbelow(22_000)))
            return port


def _environment(rank: int, size: int, port: int, store_exists: bool) -> dict[str, str]:
    """Return the present environment, unseen by a forked process, with a launcher's variables."""
    launcher: dict[str, object] = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
    }
    launcher |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
    if store_exists:
        launcher["TORCHELASTIC_USE_AGENT_STORE"] = True
    return dict(os.environ) | {name: str(value) for name, value in launcher.items()}


def _child(
    environment: dict[str, str], pipe: Connection, dump_s: float, body: Body, args: Sequence[Any]
) -> None:
    """Run in a process: send (kind, content, seconds), where kind is message, value or error."""
    if dump_s < inf:
        faulthandler.dump_traceback_later(dump_s)
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
