# SPDX-License-Identifier: Apache-2.0
"""The proof of a schedule, or a counter-example.

`verify` replays a schedule symbolically. Each cell (rank, chunk) holds the set of ranks whose contribution is
in it (bit masks), or, where the schedule mixes, an exact row of weights over the origin ranks. Checked in every step:

1. transfers name existing ranks and chunks, and no rank sends to itself;
2. no sender sends what it does not hold yet;
3. no chunk that a rank sends is overwritten by it in the same step, and of several transfers into one chunk
   all add: a group of point-to-point calls has no inner order, so anything else depends on luck;
4. no contribution is added twice.

After the last step every cell must be what the `Collective` promised. That sends meet receives in order and
size follows from deriving both ends of a transfer from one canonical step; `check_pairing` proves the same
of programs that were *not* derived together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from commrt.collective import ANYTHING, Collective, Kind
from commrt.errors import ScheduleError
from commrt.flaws import flaws
from commrt.program import Program
from commrt.proving.symbols import Cells, Masks, Weights, select
from commrt.schedule import ADD, COPY, MIX, Schedule, Traffic, traffic

__all__ = ["CounterExample", "Proof", "check_pairing", "prove", "verify"]

BLOCK_BYTES = 1 << 28
"""Chunks are replayed in blocks whose symbolic state stays below this."""

MOST_RANKS, MOST_CELLS = 1 << 17, 1 << 32

State = Masks | Weights


@dataclass(frozen=True, slots=True)
class CounterExample:
    """Where a schedule goes wrong; ``str()`` is a sentence."""

    what: str
    step: int | None = None
    rank: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        places = (("step", self.step), ("rank", self.rank), ("chunk", self.chunk))
        where = ", ".join(f"{name} {value}" for name, value in places if value is not None)
        return f"{where}: {self.what}" if where else self.what


@dataclass(frozen=True, slots=True)
class Proof:
    """The outcome of `verify`: what it costs, and None or the first counter-example found."""

    schedule: str
    collective: str
    ranks: int
    chunks: int
    traffic: Traffic
    counterexample: CounterExample | None

    @property
    def ok(self) -> bool:
        """True if the schedule keeps its promise."""
        return self.counterexample is None


class _Refuted(Exception):
    def __init__(self, counterexample: CounterExample) -> None:
        self.counterexample = counterexample


def verify(schedule: Schedule, collective: Collective) -> Proof:
    """Replay `schedule` and check it against `collective`; never raises for a wrong schedule, says where it is wrong.

    Raises `ScheduleError` for what is none: steps that are no steps, or do not end, or too many ranks for the memory.
    Cost: O(chunks carried x ranks / 64); a 32 x 32 torus takes about half a second.

    >>> from commrt.collective import all_reduce
    >>> from commrt.schedule import Step
    >>> swap = Schedule("swap", ranks=2, chunks=1, steps=lambda: iter([Step.of([0, 1], [1, 0], 0, 1, COPY)]))
    >>> print(verify(swap, all_reduce(2, 1)).counterexample)
    step 0, rank 1, chunk 0: overwrites what it sends in the same step; which comes first is luck
    """
    found: CounterExample | None = None
    cost = Traffic(0, 0, Fraction(0), 0)
    try:
        _check_form(schedule, collective)
        cost = traffic(schedule)
        weights = _needs_weights(schedule, collective)
        for lo, hi in _blocks(schedule, weights):
            defined = collective.defined[:, lo:hi]
            _replay(schedule, collective, Weights(defined) if weights else Masks(defined), lo, hi)
    except _Refuted as refuted:
        found = refuted.counterexample
    return Proof(schedule.name, collective.name, schedule.ranks, schedule.chunks, cost, found)


def prove(schedule: Schedule, collective: Collective) -> Proof:
    """As `verify`, but raises `ScheduleError` with the counter-example if the promise is not kept."""
    proof = verify(schedule, collective)
    if proof.counterexample is not None:
        raise ScheduleError(f"{schedule.name} is not a correct {collective.name}: {proof.counterexample}")
    return proof


def check_pairing(programs: Sequence[Program]) -> CounterExample | None:
    """Check that in each hop the sends of every rank to every peer meet that peer's receives in order and size."""
    lengths = {len(program.hops) for program in programs}
    if len(lengths) > 1:
        return CounterExample(f"ranks disagree about the number of steps: {sorted(lengths)}")
    for number in range(max(lengths, default=0)):
        sent: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        received: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for program in programs:
            for leg in program.hops[number].sends:
                sent[program.rank, leg.peer].append((leg.lo, leg.hi))
            for leg in program.hops[number].recvs:
                received[leg.peer, program.rank].append((leg.lo, leg.hi))
        for src, dst in sorted(sent.keys() | received.keys()):
            ours, theirs = sent[src, dst], received[src, dst]
            if ours != theirs:
                return CounterExample(f"sends chunks {ours} to rank {dst}, which expects {theirs}", number, src)
    return None


def _check_form(schedule: Schedule, collective: Collective) -> None:
    if collective.shape != (schedule.ranks, schedule.chunks):
        raise _Refuted(CounterExample(f"has {schedule.ranks} ranks x {schedule.chunks} chunks, not {collective.shape}"))
    _require_room(schedule)
    for number, step in enumerate(schedule.played()):
        for at, what in flaws(step, schedule.ranks, schedule.chunks):
            raise _Refuted(CounterExample(f"the transfer {at.text()} {what}", number))


def _require_room(schedule: Schedule) -> None:
    """Raise `ScheduleError` for what would end with the memory, or after days."""
    ranks, chunks = schedule.ranks, schedule.chunks
    if ranks > MOST_RANKS or ranks * chunks > MOST_CELLS:
        raise ScheduleError(
            f"{schedule.name} of {ranks:,} ranks and {chunks:,} chunks is too large for a proof, which takes ranks x "
            f"chunks x ranks / 8 bytes: prove it with fewer, at most {MOST_RANKS:,} ranks and {MOST_CELLS:,} of both"
        )


def _needs_weights(schedule: Schedule, collective: Collective) -> bool:
    return collective.kind is not Kind.SUM or any((step.combine == MIX).any() for step in schedule.played())


def _blocks(schedule: Schedule, weights: bool) -> Iterator[tuple[int, int]]:
    """Ranges of chunks small enough to replay at once."""
    words = schedule.ranks if weights else -(-schedule.ranks // 64)
    size = max(1, BLOCK_BYTES // (schedule.ranks * words * 8))
    for lo in range(0, schedule.chunks, size):
        yield lo, min(lo + size, schedule.chunks)


def _replay(schedule: Schedule, collective: Collective, state: State, lo: int, hi: int) -> None:
    """Replay the chunks [lo, hi) alone: chunks never influence each other."""
    hazards = _Hazards(schedule.ranks * (hi - lo))
    for number, step in enumerate(schedule.played()):

        def refute(what: str, cell: int, number: int = number) -> None:
            rank, chunk = divmod(cell, hi - lo)
            raise _Refuted(CounterExample(what, number, rank, lo + chunk))

        cells = select(step, lo, hi)
        hazards.check(cells, refute)
        state.apply(cells, refute)
    _check_goal(state, collective, lo, hi)


class _Hazards:
    """Rule 3: scratch marks over all cells, cleared after each step."""

    def __init__(self, cells: int) -> None:
        self._sent = np.zeros(cells, dtype=bool)
        self._writer = np.zeros(cells, dtype=np.int64)

    def check(self, cells: Cells, refute: Callable[[str, int], None]) -> None:
        self._sent[cells.src] = True
        overwritten = self._sent[cells.dst] & (cells.combine == COPY)
        self._sent[cells.src] = False
        if overwritten.any():
            what = "overwrites what it sends in the same step; which comes first is luck"
            refute(what, int(cells.dst[overwritten][0]))
        order = np.arange(len(cells.dst))
        self._writer[cells.dst] = order
        crowded = self._writer[cells.dst] != order
        if crowded.any():
            shared = np.isin(cells.dst, cells.dst[crowded]) & (cells.combine != ADD)
            if shared.any():
                what = "receives this chunk twice in one step and not all of it adds; the order is luck"
                refute(what, int(cells.dst[shared][0]))


def _check_goal(state: State, collective: Collective, lo: int, hi: int) -> None:
    goal = np.ascontiguousarray(collective.goal[:, lo:hi]).reshape(-1)
    wrong = state.first_wrong(goal, collective)
    if wrong is None:
        return
    cell, content = wrong
    rank, chunk = divmod(cell, hi - lo)
    family = collective.families[goal[cell]] if goal[cell] != ANYTHING else ()
    what = f"ends with {content}; promised: {_promise(collective.kind, family)}"
    raise _Refuted(CounterExample(what, None, rank, lo + chunk))


def _promise(kind: Kind, family: Sequence[int]) -> str:
    return f"the {kind.value} over ranks {_ranks(family)}" if kind is not Kind.DOUBLY_STOCHASTIC else kind.value


def _ranks(ranks: Sequence[int]) -> str:
    head = ", ".join(map(str, ranks[:12]))
    return f"{{{head}{', ...' if len(ranks) > 12 else ''}}}"
