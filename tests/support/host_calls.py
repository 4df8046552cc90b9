# SPDX-License-Identifier: Apache-2.0
"""Count the calls of functions that commrt makes where nothing moves; docs/architecture.md has the table of them.

A count depends on no machine, but for a percent where threads wait for each other, and it grows with what is done per
gradient. ``python tests/support/host_calls.py`` prints the rows of the table.
"""

import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple
from unittest import mock
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed import HashStore

import commrt
from commrt.runtime.comparison import ConsistencyCheck
from commrt.training import optimizer_steps
from commrt.transport.null import NullTransport
from commrt.transport.protocol import Exchange, P2PGroup, Tag, Transport

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = f"{Path(commrt.__file__).parent}/"  # as frames name it, through links
STEADY, COUNTED, SLACK = 8, 3, 1.01
TRIES = 8
"""Of which the least counts: a thread may be late, and wait elsewhere."""
NUMEL = 64


class Null(NullTransport):
    """A transport on which all transfers are always done."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, range(ranks), timeout_s=60.0)

    def bind(self, group: P2PGroup) -> Exchange:
        return lambda tag: None


class Mirror(Null):
    """A transport that receives what it sends, so that the headers of gossip agree."""

    def bind(self, group: P2PGroup) -> Exchange:
        sides = zip(group.sends, group.recvs, strict=False)
        pairs = [(mine.data, theirs.data) for mine, theirs in sides if mine.data.shape == theirs.data.shape]

        def run(_: Tag) -> None:
            for source, target in pairs:
                target.copy_(source)

        return run


class Step(NamedTuple):
    """A step of training of one rank, which runs alone."""

    transport: Transport
    algorithm: Callable[[], commrt.Algorithm]
    tensors: int
    buckets: int

    def of(self, world: commrt.World) -> Callable[[], None]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(NUMEL)) for _ in range(self.tensors)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        cap_mb = 4 * self.tensors * NUMEL / self.buckets / 2**20 * 1.02
        commrt.attach(model, optimizer, self.algorithm(), world=world, bucket_cap_mb=cap_mb)

        def step() -> None:
            torch.stack([param.sum() for param in model]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step


class Run(NamedTuple):
    """``World.run`` of a ring of two."""

    transport: Transport

    def of(self, world: commrt.World) -> Callable[[], object]:
        return partial(world.run, commrt.Ring().schedule(0, 2), torch.zeros(NUMEL))


WORK: dict[str, Run | Step] = {
    "`world.run` of 256 bytes": Run(Null(0, 2)),
    "synchronous step, 161 gradients in 5 buckets": Step(Null(0, 2), commrt.Ring, 161, 5),
    "step of gossip, 2 buckets, 8 ranks": Step(Mirror(3, 8), commrt.Gossip, 16, 2),
    "step of gossip, 2 buckets, 1,024 ranks": Step(Mirror(3, 1024), commrt.Gossip, 16, 2),
}


def agreed(_: object, claim: object, ranks: Iterable[int], *__: object, **___: object) -> dict[int, object]:
    """Return that all of `ranks` claim what this rank does."""
    return dict.fromkeys(ranks, claim)


def calls_of(what: str) -> int:
    """Return the calls of functions, of Python and of C, that commrt's own code made or was entered by, on average."""
    work = WORK[what]
    with (
        mock.patch.object(ConsistencyCheck, "_gather", agreed),
        mock.patch.object(optimizer_steps, "_living", WeakValueDictionary()),  # others would be asked in each step, too
        commrt.World(work.transport, HashStore(), work.transport.rank) as world,
    ):
        return _counted(world, work.of(world))


def _counted(world: commrt.World, call: Callable[[], object]) -> int:
    for _ in range(STEADY):
        call()
    number = count()

    def note(frame, event, _) -> None:
        if event in {"call", "c_call"} and frame.f_code.co_filename.startswith(PACKAGE):
            next(number)

    world.comm_thread.submit(lambda: sys.setprofile(note)).result()
    sys.setprofile(note)
    try:
        for _ in range(COUNTED):
            call()
    finally:
        sys.setprofile(None)
        world.comm_thread.submit(lambda: sys.setprofile(None)).result()
    calls = next(number) // COUNTED
    assert calls, f"no code below {PACKAGE} ran"
    return calls


def least_calls(what: str, enough: int = 0) -> int:
    """Return the least of a few counts, or the first that is `enough`."""
    least = calls_of(what)
    for _ in range(TRIES - 1):
        if least <= enough:
            break
        least = min(least, calls_of(what))
    return least


def written() -> dict[str, int]:
    """Return the calls in the table of the page."""
    text = PAGE.read_text("utf-8")
    rows = {what: re.search(rf"^\| {re.escape(what)} \| ([\d,]+) \|", text, re.MULTILINE) for what in WORK}
    return {what: int(row[1].replace(",", "")) for what, row in rows.items() if row}


if __name__ == "__main__":
    for each in WORK:
        sys.stdout.write(f"| {each} | {round(least_calls(each) * SLACK):,} |\n")
