# SPDX-License-Identifier: Apache-2.0
"""Ranks that are started once and run one function after the other, each of them in groups of its own."""

import faulthandler
import os
import signal
import traceback
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from time import monotonic

import torch
import torch.distributed as dist

import commrt.c10d  # noqa: F401  # registers the backend
from commrt.runtime import init as world_of_this_process
from commrt.store.rendezvous import hold, listen
from commrt.testing.processes import IMPORTED, Outcome, _environment

LIMIT_S = 60.0
"""For starting processes on a busy machine, and for all that they do."""
KEPT = []
"""Groups of Gloo, which live until the process ends. Under load, a process hung once where one was deleted; perhaps it
waited for a thread of Gloo's that waited for Python's lock."""


class Pool:
    """Up to `size` ranks. If one of them dies or hangs, all are ended, and the next call of `run` starts new ones."""

    def __init__(self, size):
        self.size, self._ranks = size, []

    def run(self, body, *args, size=None, limit_s=LIMIT_S, on_message=None):
        """Call ``body(tell, *args)`` on the first `size` ranks, as `run_processes` does; this process has the store."""
        if not all(process.is_alive() for process, _ in self._ranks):
            self.close()  # one died after its last answer
        size, listener = size or self.size, listen()
        port = listener.getsockname()[1]
        store = hold(listener)
        self._ranks = self._ranks or [_start() for _ in range(self.size)]
        for rank, (_, pipe) in enumerate(self._ranks[:size]):
            pipe.send((_environment(rank, size, port, store is not None), limit_s, body, args))
        outcomes = [Outcome(rank) for rank in range(size)]
        if missing := self._listen(outcomes, monotonic() + limit_s, on_message):
            exit_codes = self.close()
            for rank in missing:
                outcomes[rank].exit_code = exit_codes[rank]
        return outcomes

    def values(self, body, *args, **options):
        """Return what each rank returns; none may raise, die or hang."""
        outcomes = self.run(body, *args, **options)
        assert [(one.error, one.exit_code) for one in outcomes] == [(None, 0)] * len(outcomes)
        return [one.value for one in outcomes]

    def answers(self, *bodies, backend="commrt"):
        """Return {its name: [by rank]} of what `bodies` return, or raise as a text, in one default group."""
        values = self.values(_run_all, backend, *bodies, limit_s=100.0)
        return {body.__name__: [value[body.__name__] for value in values] for body in bodies}

    def _listen(self, outcomes, deadline, on_message):
        """Fill in what the ranks tell; return those that did not end their work by themselves."""
        pipes = {self._ranks[outcome.rank][1]: outcome for outcome in outcomes}
        missing = []
        while pipes and (left := deadline - monotonic()) > 0:
            for pipe in wait(pipes, timeout=left):
                outcome = pipes[pipe]
                try:
                    kind, content, outcome.seconds = pipe.recv()
                except (EOFError, ConnectionResetError):
                    missing.append(pipes.pop(pipe).rank)
                    continue
                if kind == "message":
                    outcome.messages.append(content)
                    on_message(outcome.rank, content, self._ranks[outcome.rank][0])
                else:
                    setattr(outcome, kind, content)
                    pipes.pop(pipe).exit_code = 0
        return [*missing, *(outcome.rank for outcome in pipes.values())]

    def close(self):
        """End the processes; return their exit codes, None for one that had to be killed."""
        for _, pipe in self._ranks:
            pipe.close()
        deadline = monotonic() + 5.0
        for process, _ in self._ranks:
            process.join(timeout=max(deadline - monotonic(), 0.1))
        exit_codes = [process.exitcode for process, _ in self._ranks]
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._ranks = []
        return exit_codes

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _start():
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(pipe):
    """Run what comes through the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
    torch.set_num_threads(1)
    while True:
        try:
            environment, limit_s, body, args = pipe.recv()
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(environment)
        faulthandler.dump_traceback_later(0.9 * limit_s)  # shows where it hangs, before it is killed
        begin = monotonic()
        answer = _answer(partial(body, lambda message: pipe.send(("message", message, 0.0)), *args))
        _leave_all()
        faulthandler.cancel_dump_traceback_later()
        pipe.send((*answer, monotonic() - begin))


def _answer(call):
    try:
        return "value", call()
    except Exception as error:  # the parent is told, whatever it is
        traceback.print_exc()
        return "error", f"{type(error).__name__}: {error}"


def _run_all(_, backend, *bodies):
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    return {body.__name__: _answer(body)[1] for body in bodies}


def _leave_all():
    """End the world and the groups that a function has left open."""
    if world_of_this_process.is_open():
        world_of_this_process.init().close()
    if dist.is_initialized():
        KEPT.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
    world_of_this_process._opened = 0  # as at other ranks, which may have done less before
