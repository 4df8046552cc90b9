# SPDX-License-Identifier: Apache-2.0
"""Try each fault in each collective of the torch.distributed backend: ``python tests/audits/c10d_faults.py``.

One rank of three dies, stops for longer than the timeout, or makes another call than the others, over shared memory
(short and long messages) and over Gloo. The command prints a table for each, in 2 minutes. It exits with 1 unless every
rank that is left gets an error in time, at the latest in the barrier after the call, and the error

* is a `commrt.CommrtError` and a ``torch.distributed.DistBackendError``,
* names the rank, the peer, the collective and its sequence number.

Each collective has a group of its own, so one start of the processes tries a fault in all collectives at once.
"""

import argparse
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import commrt.c10d  # noqa: F401  # registers the backend
from commrt.testing.processes import run_processes

RANKS, VICTIM = 3, 1
"""Processes, and the one at fault."""
START_S, TIMEOUT_S, MARGIN_S, LIMIT_S = 60.0, 3.0, 5.0, 80.0
"""For groups to open; of their calls; how much later an error may come on a busy machine; when a run is a hang."""
SMALL, LARGE = 100, 100_000
"""Elements: messages in one packet, and offers of memory."""


@dataclass(frozen=True)
class Call:
    """What the collectives of one group are called with."""

    group: Any
    numel: int
    dtype: torch.dtype = torch.float32
    root: int = 0

    @property
    def is_root(self) -> bool:
        return bool(self.group.rank() == self.root)

    def row(self, pieces: int = 1) -> torch.Tensor:
        return torch.ones(pieces * self.numel, dtype=self.dtype)

    def rows(self) -> list[torch.Tensor]:
        return [self.row() for _ in range(RANKS)]

    def texts(self) -> list[Any]:
        return ["x" * self.numel] * RANKS

    def at_root(self, listed: list[Any]) -> list[Any] | None:
        return listed if self.is_root else None


Doing = Callable[[Call], Any]
COLLECTIVES: dict[str, Doing] = {
    "all_reduce": lambda c: dist.all_reduce(c.row(), group=c.group),
    "broadcast": lambda c: dist.broadcast(c.row(), group_src=c.root, group=c.group),
    "reduce": lambda c: dist.reduce(c.row(), group_dst=c.root, group=c.group),
    "all_gather": lambda c: dist.all_gather(c.rows(), c.row(), group=c.group),
    "all_gather_into_tensor": lambda c: dist.all_gather_into_tensor(c.row(RANKS), c.row(), group=c.group),
    "gather": lambda c: dist.gather(c.row(), c.at_root(c.rows()), group_dst=c.root, group=c.group),
    "scatter": lambda c: dist.scatter(c.row(), c.at_root(c.rows()), group_src=c.root, group=c.group),
    "reduce_scatter_tensor": lambda c: dist.reduce_scatter_tensor(c.row(), c.row(RANKS), group=c.group),
    "all_to_all_single": lambda c: dist.all_to_all_single(c.row(RANKS), c.row(RANKS), group=c.group),
    "barrier": lambda c: dist.barrier(group=c.group),
    "all_gather_object": lambda c: dist.all_gather_object(c.texts(), c.texts()[0], group=c.group),
    "broadcast_object_list": lambda c: dist.broadcast_object_list(c.texts(), group_src=c.root, group=c.group),
    "gather_object": lambda c: dist.gather_object(c.texts()[0], c.at_root(c.texts()), group_dst=c.root, group=c.group),
    "scatter_object_list": lambda c: dist.scatter_object_list([None], c.texts(), group_src=c.root, group=c.group),
}
ROOTED = {"broadcast", "reduce", "gather", "scatter", "broadcast_object_list", "gather_object", "scatter_object_list"}
SHAPELESS = {"barrier"} | {name for name in COLLECTIVES if "object" in name}
"""Their callers give no shape and no dtype that must be equal."""
NAMED = re.compile(
    r"(?P<call>all_reduce|broadcast|reduce|all_gather|gather|scatter|reduce_scatter|all_to_all|barrier)\b.*?, "
    r"sequence number \d+ of group [^:]+: .*?\[rank (?P<rank>\d+), peer (?P<peer>\d+), "
)


def other(name: str) -> Doing:
    """Return another collective with as many elements."""
    if "object" in name:
        return COLLECTIVES["all_gather_object" if name != "all_gather_object" else "broadcast_object_list"]
    return COLLECTIVES["all_reduce" if name != "all_reduce" else "broadcast"]


Faulty = Callable[[str], tuple[Sequence[Doing], Sequence[Doing]]]
"""name of a collective -> (what the others call, what the victim calls)."""


def _changed(change: Callable[[Call], Call]) -> Faulty:
    return lambda name: ([COLLECTIVES[name]], [lambda call: COLLECTIVES[name](change(call))])


DISAGREEMENTS: dict[str, Faulty] = {
    "other shape": _changed(lambda call: replace(call, numel=call.numel - 1)),
    "other dtype": _changed(lambda call: replace(call, dtype=torch.int32)),
    "other root": _changed(lambda call: replace(call, root=RANKS - 1)),
    "other collective": lambda name: ([COLLECTIVES[name]], [other(name)]),
    "wrong order": lambda name: ([COLLECTIVES[name], other(name)], [other(name), COLLECTIVES[name]]),
}
STRIKES = {
    "killed before": (signal.SIGKILL, False),
    "killed within": (signal.SIGKILL, True),
    "stopped before": (signal.SIGSTOP, False),
    "stopped within": (signal.SIGSTOP, True),
}
"""What happens to the victim, and whether it has begun the collective."""
FAULTS = [*STRIKES, *DISAGREEMENTS]


def applies(fault: str, name: str) -> bool:
    if fault == "other root":
        return name in ROOTED
    return name not in SHAPELESS or fault not in {"other shape", "other dtype"}


class Ending(NamedTuple):
    kinds: tuple[str, ...]
    """Its class and that one's bases."""
    text: str
    seconds: float
    """From the begin of the call that raised it."""


Endings = dict[str, Ending | None]
"""By collective; None for a rank that got no error."""


def start() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of names that torch 2.13 has replaced, and keeps
    dist.init_process_group("commrt", timeout=timedelta(seconds=START_S))


def groups_for(names: Sequence[str], timeout_s: float, numel: int) -> dict[str, Call]:
    """Return a call in a new group for each collective, once all groups are open."""
    calls = {name: Call(dist.new_group(timeout=timedelta(seconds=START_S)), numel) for name in names}
    dist.barrier()
    for call in calls.values():
        call.group.set_timeout(timedelta(seconds=timeout_s))
    return calls


def ending(call: Call, doings: Sequence[Doing]) -> Ending | None:
    """Do all of `doings`, then a barrier; return the first error."""
    for do in (*doings, COLLECTIVES["barrier"]):
        begin = monotonic()
        try:
            do(call)
        except Exception as error:
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            return Ending(kinds, str(error), monotonic() - begin)
    return None


def endings(calls: Mapping[str, Call], doings: Mapping[str, Sequence[Doing]]) -> Endings:
    """Do all collectives at once, each on a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = {name: pool.submit(ending, call, doings[name]) for name, call in calls.items()}
        return {name: future.result() for name, future in futures.items()}


def disagree(_: Callable[[Any], None], faults: Sequence[str], timeout_s: float, numel: int) -> dict[str, Endings]:
    """Return how all collectives end for each of `faults`, which the victim commits."""
    start()
    found = {}
    for fault in faults:
        calls = groups_for([name for name in COLLECTIVES if applies(fault, name)], timeout_s, numel)
        is_victim = dist.get_rank() == VICTIM
        found[fault] = endings(calls, {name: DISAGREEMENTS[fault](name)[is_victim] for name in calls})
        dist.barrier()
    return found


def be_struck(tell: Callable[[Any], None], fault: str, timeout_s: float, numel: int) -> dict[str, Endings]:
    """Return how all collectives end; the victim is killed or stopped before them, or once its threads begin them."""
    start()
    calls = groups_for(list(COLLECTIVES), timeout_s, numel)
    doings = {name: [COLLECTIVES[name]] for name in calls}
    number, within = STRIKES[fault]
    is_victim = dist.get_rank() == VICTIM
    with ThreadPoolExecutor(1) as pool:
        if is_victim:
            tell("struck")
        future = pool.submit(endings, calls, doings) if within else None
        if is_victim:
            os.kill(os.getpid(), number)
        found = endings(calls, doings) if future is None else future.result()
    tell("over")
    return {fault: found}


def run(faults: Sequence[str], timeout_s: float = TIMEOUT_S, numel: int = SMALL) -> list[dict[str, Endings]]:
    """Return how each collective ended on each rank, by fault: several disagreements, or one strike."""
    body, given = (be_struck, faults[0]) if faults[0] in STRIKES else (disagree, faults)
    struck: list[BaseProcess] = []
    over: set[int] = set()

    def on_message(rank: int, message: str, process: BaseProcess) -> None:
        (struck.append(process) if message == "struck" else over.add(rank))
        if struck and len(over) == RANKS - 1:
            with suppress(ProcessLookupError):
                os.kill(struck[0].pid or 0, signal.SIGCONT)

    outcomes = run_processes(
        RANKS, body, given, timeout_s, numel, limit_s=LIMIT_S, on_message=on_message, holds_store=True
    )
    for outcome in outcomes:
        if outcome.value is None and outcome.exit_code != -signal.SIGKILL:
            raise RuntimeError(f"{faults}: rank {outcome.rank} hangs, or has failed: {outcome.error}")
    return [outcome.value or {} for outcome in outcomes]


Cells = dict[tuple[str, str], dict[int, Ending | None]]
"""How the ranks ended that are left, by collective and fault."""


def cells_of(ends: Sequence[dict[str, Endings]]) -> Cells:
    cells: Cells = {}
    for rank, by_fault in enumerate(ends):
        for fault, by_name in by_fault.items():
            for name, found in by_name.items():
                cells.setdefault((name, fault), {})[rank] = found
    return cells


def complaints(cells: Cells, limit_s: float = TIMEOUT_S + MARGIN_S) -> list[str]:
    """Return all that is not as the module's docstring says."""
    return [
        f"{name}, {fault}, rank {rank}: {wrong}"
        for (name, fault), by_rank in cells.items()
        for rank, found in by_rank.items()
        if (wrong := complaint(found, rank, limit_s))
    ]


def complaint(found: Ending | None, rank: int, limit_s: float) -> str | None:
    """Return what is wrong with the error that `rank` got; None if nothing is."""
    if found is None:
        return "no error"
    if not {"CommrtError", "DistBackendError"} <= {*found.kinds}:
        return f"{found.kinds[0]} is not both a CommrtError and a DistBackendError: {found.text}"
    if (names := NAMED.search(found.text)) is None or int(names["rank"]) != rank:
        return f"names too little: {found.text}"
    return f"came after {found.seconds:.1f} s" if found.seconds > limit_s else None


def table(cells: Cells) -> Iterator[str]:
    """Yield the lines of a table in Markdown: the letters of the errors, and the seconds of the slowest rank."""
    yield "| " + " | ".join(["", *FAULTS]) + " |"
    yield "|---" * (1 + len(FAULTS)) + "|"
    for name in COLLECTIVES:
        yield "| " + " | ".join([f"`{name}`", *(_cell(cells.get((name, fault))) for fault in FAULTS)]) + " |"


def _cell(by_rank: Mapping[int, Ending | None] | None) -> str:
    found = [each for each in (by_rank or {}).values() if each is not None]
    letters = "".join(sorted({each.kinds[0][0] for each in found}))
    return f"{letters} {max(each.seconds for each in found):.1f}" if found else ""


MEDIA = {
    "shared memory, 400 bytes": ("shared", SMALL),
    "shared memory, 400 kB": ("shared", LARGE),
    "Gloo, 400 bytes": ("gloo", SMALL),
}


def main() -> int:
    """Print a table for each medium, and all that is wrong; return 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*MEDIA], action="append", help="the medium, of several")
    wrong = []
    for medium in parser.parse_args().only or MEDIA:
        os.environ["COMMRT_TRANSPORT"], numel = MEDIA[medium]
        cells: Cells = {}
        for faults in (*([fault] for fault in STRIKES), list(DISAGREEMENTS)):
            cells |= cells_of(run(faults, numel=numel))
        print(f"\n{medium}, timeout {TIMEOUT_S:g} s\n", *table(cells), sep="\n")
        wrong += [f"{medium}: {each}" for each in complaints(cells)]
    print(f"\n{len(wrong)} complaints", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
