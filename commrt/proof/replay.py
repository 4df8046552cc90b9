# SPDX-License-Identifier: Apache-2.0
"""The proof of a schedule, or a counter-example; and its traffic, which is counted on the way.

`verify` replays a schedule symbolically. Each cell (rank, chunk) holds the set of ranks whose
contribution is in it. If the schedule mixes, the cell holds exact weights of these ranks instead.
Each step is checked:

1. transfers name existing ranks and chunks, and no rank sends to itself;
2. no rank sends a chunk before it holds a value;
3. no rank overwrites a chunk that it sends in the same step, and several transfers into one chunk
   all add: the calls of an NCCL group have no order among themselves, so anything else would depend
   on timing;
4. no contribution is added twice.

After the last step every cell must hold what the `Collective` says. Both ends of a transfer come
from one canonical step (`commrt.program`), so sends meet their receives in order and size. By the
same replay `ends_alike` tells whether it matters where a buffer is cut. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from commrt.errors import ScheduleError, UsageError
from commrt.proof.spec import MAX_RANKS, Collective
from commrt.proof.symbols import Cells, Masks, Refuted, Weights, different, select
from commrt.schedule import ADD, COPY, MIX, Schedule, malformed, require_schedule

BLOCK_BYTES = 1 << 28
"""Chunks are replayed in blocks whose symbolic state stays below this size."""
MAX_CELLS = 1 << 32


@dataclass(frozen=True, slots=True)
class Traffic:
    """The size of a schedule, whatever it runs on."""

    steps: int
    transfers: int
    bytes_per_rank: Fraction
    """Bytes sent by the busiest rank, in units of the buffer."""
    max_peers: int
    """Most peers that any rank exchanges with in one step."""


NO_TRAFFIC = Traffic(0, 0, Fraction(0), 0)
"""Traffic of a schedule that is malformed, or has another shape than its collective."""


@dataclass(frozen=True, slots=True)
class CounterExample:
    """What is wrong with a schedule, and where; ``str()`` is a sentence."""

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
    """The outcome of `verify`: the schedule's traffic, and the first counter-example or None."""

    schedule: str
    collective: str
    ranks: int
    chunks: int
    traffic: Traffic
    counterexample: CounterExample | None

    @property
    def ok(self) -> bool:
        """True if the schedule is correct."""
        return self.counterexample is None


def verify(schedule: Schedule, collective: Collective) -> Proof:
    """Replay `schedule` and check it against `collective`; the proof says where it is wrong.

    Raises `ScheduleError` if `steps()` fails or does not end, and for too many ranks or chunks for
    the memory. Cost: O(chunks carried x ranks / 64); a 32 x 32 torus takes about half a second.

    >>> from commrt.proof.spec import all_reduce
    >>> from commrt.schedule import Step
    >>> both = Step.of([0, 1], [1, 0], 0, 1, COPY)
    >>> swap = Schedule("swap", ranks=2, chunks=1, steps=lambda: iter([both]))
    >>> print(verify(swap, all_reduce(2, 1)).counterexample)
    step 0, rank 1, chunk 0: overwrites what it sends in the same step; the result depends on timing
    """
    require_schedule(schedule)
    if not isinstance(collective, Collective):
        raise UsageError(
            f"{collective!r:.80} is no collective: give what a schedule must do, such as"
            " commrt.proof.all_reduce(schedule.ranks, schedule.chunks)"
        )
    size = NO_TRAFFIC
    mixes = False
    found = _misfit(schedule, collective)
    if found is None:
        size, mixes, found = _surveyed(schedule)
    if found is None:
        weighted = mixes or collective.total is not None
        for lo, hi in _blocks(schedule, weighted=weighted):
            defined = collective.defined[:, lo:hi]
            found = found or _replay(
                schedule, collective, Weights(defined) if weighted else Masks(defined), lo
            )
    return Proof(schedule.name, collective.name, schedule.ranks, schedule.chunks, size, found)


def prove(schedule: Schedule, collective: Collective) -> Proof:
    """Return the proof of `verify`, or raise `ScheduleError` with the counter-example."""
    proof = verify(schedule, collective)
    if proof.counterexample is not None:
        raise ScheduleError(
            f"{schedule.name} is not a correct {collective.name}: {proof.counterexample}"
        )
    return proof


def ends_alike(schedule: Schedule) -> bool:
    """Return True if each rank ends with one sum in all chunks, as after all-reduce or broadcast.

    Then it does not matter where a buffer is cut. False for a schedule that mixes, and for sums
    that count a contribution twice. Cost: that of `verify`.

    >>> from commrt.algorithms.ring import all_gather, all_reduce
    >>> ends_alike(all_reduce(4)), ends_alike(all_gather(4))
    (True, False)
    """
    first = None
    for lo, hi in _blocks(schedule, weighted=False):
        state = Masks(np.ones((schedule.ranks, hi - lo), dtype=bool))
        try:
            for step in schedule.checked_steps():
                if (step.combine == int(MIX)).any():
                    return False
                state.apply(select(step, lo, hi))
        except Refuted:
            return False
        held = state.by_rank
        first = held[:, :1] if first is None else first
        if (held != first).any():
            return False
    return True


def _blocks(schedule: Schedule, *, weighted: bool) -> Iterator[tuple[int, int]]:
    """Yield ranges of chunks that are replayed at once."""
    words = schedule.ranks if weighted else -(-schedule.ranks // 64)
    block = max(1, BLOCK_BYTES // (schedule.ranks * words * 8))
    for lo in range(0, schedule.chunks, block):
        yield lo, min(lo + block, schedule.chunks)


def _misfit(schedule: Schedule, collective: Collective) -> CounterExample | None:
    """Return what is wrong with the schedule's shape; raise for what would not fit into memory."""
    ranks = schedule.ranks
    chunks = schedule.chunks
    if collective.goal.shape != (ranks, chunks):
        return CounterExample(f"has {ranks} ranks x {chunks} chunks, not {collective.goal.shape}")
    if ranks > MAX_RANKS or ranks * chunks > MAX_CELLS:
        raise ScheduleError(
            f"{schedule.name} of {ranks:,} ranks and {chunks:,} chunks is too large for a proof,"
            f" which takes ranks x chunks x ranks / 8 bytes: prove it for at most {MAX_RANKS:,}"
            f" ranks and {MAX_CELLS:,} ranks x chunks"
        )
    return None


def traffic(schedule: Schedule) -> Traffic:
    """Count steps, transfers, bytes and peers of a valid `schedule`; one pass, O(transfers)."""
    return _surveyed(schedule)[0]


def _surveyed(schedule: Schedule) -> tuple[Traffic, bool, CounterExample | None]:
    """Return in one pass traffic, whether `schedule` mixes, and its first bad transfer."""
    ranks = schedule.ranks
    sent = np.zeros(schedule.ranks, dtype=np.int64)
    peers = 0
    mixes = False
    count = 0
    transfers = 0
    for number, step in enumerate(schedule.checked_steps()):
        for transfer, what in malformed(step, ranks, schedule.chunks):
            return (
                NO_TRAFFIC,
                mixes,
                CounterExample(f"the transfer {transfer.text()} {what}", number),
            )
        mixes = mixes or bool((step.combine == int(MIX)).any())
        moved = step.canonical()
        count += 1
        transfers += len(moved)
        np.add.at(sent, moved.src, moved.hi - moved.lo)
        pairs = different(
            np.concatenate((moved.src * ranks + moved.dst, moved.dst * ranks + moved.src))
        )
        peers = max(peers, int(np.bincount(pairs // ranks).max(initial=0)))
    return (
        Traffic(count, transfers, Fraction(int(sent.max(initial=0)), schedule.chunks), peers),
        mixes,
        None,
    )


def _replay(
    schedule: Schedule, collective: Collective, state: Masks | Weights, lo: int
) -> CounterExample | None:
    """Replay the chunks of `state` from chunk `lo` on; chunks never influence each other."""
    goal = np.ascontiguousarray(collective.goal[:, lo : lo + state.chunks]).reshape(-1)
    races = _Races(len(goal))
    at: int | None = None
    try:
        for number, step in enumerate(schedule.checked_steps()):
            at = number
            cells = select(step, lo, lo + state.chunks)
            races.check(cells)
            state.apply(cells)
        at = None
        state.check(goal, collective)
    except Refuted as refuted:
        rank, chunk = divmod(refuted.cell, state.chunks)
        return CounterExample(refuted.what, at, rank, lo + chunk)
    return None


class _Races:
    """Rule 3: scratch marks over all cells, cleared after each step."""

    def __init__(self, cells: int) -> None:
        self._sent = np.zeros(cells, dtype=bool)
        self._writer = np.zeros(cells, dtype=np.int64)

    def check(self, cells: Cells) -> None:
        """Refute results that depend on the order in which the transfers of a step happen."""
        self._sent[cells.src] = True
        overwritten = self._sent[cells.dst] & (cells.combine == int(COPY))
        self._sent[cells.src] = False
        if overwritten.any():
            what = "overwrites what it sends in the same step; the result depends on timing"
            raise Refuted(what, int(cells.dst[overwritten][0]))
        order = np.arange(len(cells.dst))
        self._writer[cells.dst] = order
        crowded = self._writer[cells.dst] != order
        if crowded.any():
            shared = np.isin(cells.dst, cells.dst[crowded]) & (cells.combine != int(ADD))
            if shared.any():
                what = (
                    "receives this chunk twice in one step and not all of it adds; the result"
                    " depends on timing"
                )
                raise Refuted(what, int(cells.dst[shared][0]))
