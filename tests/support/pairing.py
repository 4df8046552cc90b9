# SPDX-License-Identifier: Apache-2.0
"""Whether programs that were not derived from one schedule fit together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from commrt.program import Program
from commrt.proof.replay import CounterExample


def check_pairing(programs: Sequence[Program]) -> CounterExample | None:
    """Check that in each hop the sends of every rank to every peer meet that peer's receives in order and size."""
    lengths = {len(program.hops) for program in programs}
    if len(lengths) > 1:
        return CounterExample(f"ranks disagree about the number of steps: {sorted(lengths)}")
    for number in range(max(lengths, default=0)):
        sent: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        received: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for program in programs:
            for each in program.hops[number].sends:
                sent[program.rank, each.peer].append((each.lo, each.hi))
            for each in program.hops[number].recvs:
                received[each.peer, program.rank].append((each.lo, each.hi))
        for src, dst in sorted(sent.keys() | received.keys()):
            ours, theirs = sent[src, dst], received[src, dst]
            if ours != theirs:
                return CounterExample(f"sends chunks {ours} to rank {dst}, which expects {theirs}", number, src)
    return None
