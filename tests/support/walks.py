# SPDX-License-Identifier: Apache-2.0
"""Which functions of commrt one of two ranks enters in a steady step, by tracing it; and the table of it on the page.

``python tests/support/walks.py`` writes the table to docs/architecture.md.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import commrt
from commrt.testing.processes import run_processes
from commrt.testing.ranks import run_ranks

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- walks: written by tests/support/walks.py -->", "<!-- end of walks -->"
STEPS, TRACED = 6, 4
LIMIT_S = 60.0
TRIES = 8
"""Of which the longest is written: a thread may be late, and wait in another function."""


class Walk(NamedTuple):
    """What was entered, each once, in order."""

    functions: list[str]
    modules: list[str]


class Trace:
    """Notes calls of functions of commrt on some threads while `is_on`; use `installed` around all that starts them."""

    def __init__(self) -> None:
        self.is_on, self.threads, self._entered = False, set[str](), dict[tuple[str, str], None]()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Trace the threads that begin in the body."""
        import_module("torch._dynamo")  # a first step imports it: 900 modules, which need not pass under the profile
        threading.setprofile(self._note)
        try:
            yield
        finally:
            threading.setprofile(None)

    def _note(self, frame, event, _) -> None:
        if event == "call" and self.is_on and threading.current_thread().name in self.threads:
            file = frame.f_code.co_filename
            if file.startswith(f"{ROOT}/") and "/.venv/" not in file and "/tests/" not in file:
                name = file.removeprefix(f"{ROOT}/").removeprefix("commrt/").removesuffix(".py")
                self._entered[name, frame.f_code.co_qualname] = None

    def walk(self) -> Walk:
        """Return what was noted."""
        return Walk(
            [f"{module}:{name}" for module, name in self._entered], [*dict.fromkeys(m for m, _ in self._entered)]
        )


def step_of(make: Callable[[], commrt.Algorithm], ranks: int = 2) -> Walk:
    """Trace one step of a model of four parameters in one bucket, from ``backward()`` to the next one."""
    trace = Trace()

    def body(world: commrt.World) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        replica = commrt.attach(model, optimizer, make(), world=world)
        if world.rank == 0:
            trace.threads |= {threading.current_thread().name, "commrt-rank0"}
        for step in range(STEPS):
            loss = model(torch.ones(1, 4)).sum()  # gossip mixes here what the step before has sent
            trace.is_on = step == TRACED if world.rank == 0 else trace.is_on
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        replica.consolidate()

    with trace.installed():
        run_ranks(ranks, body)
    return trace.walk()


def late_step() -> Walk:
    """Trace one step whose gradients come too late, up to the next forward pass, which takes another rank's state."""
    trace, have_stepped, is_back = Trace(), threading.Event(), threading.Event()
    meeting = threading.Barrier(3, timeout=LIMIT_S)

    def body(world: commrt.World) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world)
        if is_late := world.rank == 0:
            trace.threads |= {threading.current_thread().name, "commrt-rank0"}
        for step in range(TRACED + 1):
            loss = model(torch.ones(1, 4)).sum()
            meeting.wait()  # in the forward pass, where a rank that was late may copy from the others
            if is_late and step == TRACED:
                assert have_stepped.wait(LIMIT_S)
                trace.is_on = True
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        have_stepped.set()
        model(torch.ones(1, 4))
        if is_late:
            trace.is_on = False
            is_back.set()
        assert is_back.wait(LIMIT_S)  # its source is in a forward pass
        replica.consolidate()

    with trace.installed():
        run_ranks(3, body)
    return trace.walk()


def run_of_world() -> Walk:
    """Trace ``world.run`` of a ring on a buffer that it knows."""
    trace, schedule = Trace(), commrt.Ring().schedule(0, 2)

    def body(world: commrt.World) -> None:
        if world.rank == 0:
            trace.threads |= {threading.current_thread().name, "commrt-rank0"}
        buffer = torch.ones(8)
        for step in range(STEPS):
            trace.is_on = step == TRACED if world.rank == 0 else trace.is_on
            world.run(schedule, buffer)
            trace.is_on = False if world.rank == 0 else trace.is_on

    with trace.installed():
        run_ranks(2, body)
    return trace.walk()


def call_of_backend(tell: object) -> Walk:
    """Trace ``dist.all_reduce`` over the backend, in one of two processes."""
    trace = Trace()
    with trace.installed():
        dist.init_process_group("commrt")
        thread = threading.Thread(target=_all_reduces, args=[trace], name="caller")
        trace.threads |= {"caller", *(f"commrt-rank{rank}" for rank in range(2))}
        thread.start()
        thread.join()
        dist.destroy_process_group()
    return trace.walk()


def _all_reduces(trace: Trace) -> None:
    row = torch.ones(1000)
    for call in range(STEPS):
        trace.is_on = call == TRACED
        dist.all_reduce(row)
    trace.is_on = False


WALKS: dict[str, Callable[[], Walk]] = {
    "synchronous step": lambda: step_of(commrt.Ring),
    "step of gossip": lambda: step_of(commrt.Gossip),
    "step of local SGD that sends": lambda: step_of(lambda: commrt.local_sgd.LocalSGD(1)),
    "step with backup workers, in time": lambda: step_of(lambda: commrt.BackupWorkers(0)),
    "step with backup workers, late": late_step,
    "`world.run`": run_of_world,
    "`dist.all_reduce` over the backend": lambda: run_processes(2, call_of_backend)[0].value,
}


def table(walks: dict[str, Walk]) -> str:
    """Return the table of the page."""
    rows = [f"| {name} | {len(walk.functions)} | {len(walk.modules)} |" for name, walk in walks.items()]
    return "\n".join([BEGIN, "| what | functions | modules |", "|---|---|---|", *rows, END])


def write(found: str) -> None:
    """Put a table on the page, in place of the one between the same first and last line."""
    begin, *_, end = found.splitlines()
    text = PAGE.read_text("utf-8")
    PAGE.write_text(text[: text.index(begin)] + found + text[text.index(end) + len(end) :], "utf-8")
    sys.stdout.write(f"{found}\n")


def written(page: str) -> dict[str, tuple[int, int]]:
    """Return the table of the page."""
    rows = page[page.index(BEGIN) : page.index(END)].splitlines()[3:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: (int(functions), int(modules)) for name, functions, modules in cells}


if __name__ == "__main__":
    longest = {
        name: max((walk() for _ in range(TRIES)), key=lambda each: len(each.functions)) for name, walk in WALKS.items()
    }
    write(table(longest))
