# SPDX-License-Identifier: Apache-2.0
"""Which ranks still take part, and how those that are left agree on it after one was lost.

All that is said is one log on the store, of which everybody reads the whole. Its lines, for generation g::

    missed g rank peer why    rank broke its connections, because of `peer`, and will come to g
    here g rank step          rank has come to g, before its step `step`
    left g rank why           rank comes to nothing any more: it closed its world, or failed

Who breaks its connections says so first. So a rank that is missed and says nothing is gone, or stopped. The first
verdict stands, and is everybody's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

from torch.distributed import DistNetworkError, PrefixStore, Store

from commrt.asking import ANSWER_S, ask
from commrt.errors import LeftBehind, Place, TransportError

__all__ = ["Attendance", "Loss", "Membership", "Verdict"]

GRACE_S = 1.0
"""How long one that is missed may be silent: two that miss a third do not notice it at the same instant."""
LOOK_S = 0.1
"""Between two looks of the first who came; the k-th looks k times less often, so that the store is not kept busy."""

MISSED, HERE, LEFT = "missed", "here", "left"


class Loss(NamedTuple):
    """A rank that takes no part any more."""

    rank: int
    step: int
    """From which the others go on without it."""
    why: str


class Verdict(NamedTuple):
    """How it goes on."""

    members: tuple[int, ...]
    step: int
    """From which they exchange again: the latest to which one of them had come."""
    lost: tuple[Loss, ...]


@dataclass(frozen=True, slots=True)
class Attendance:
    """Of one generation, as far as the log goes."""

    here: Mapping[int, int]
    """The step to which each had come, in the order in which they came."""
    coming: frozenset[int]
    missed: Mapping[int, str]
    """Why."""
    left: Mapping[int, str]
    """Likewise."""

    @classmethod
    def of(cls, lines: Iterable[Sequence[Any]], generation: int) -> Attendance:
        """What the log says of `generation`."""
        said = [(kind, g == generation, *rest) for kind, g, *rest in lines]
        missed = [rest for kind, is_now, *rest in said if kind == MISSED and is_now]
        return cls(
            here={rank: step for kind, is_now, rank, step, *_ in said if kind == HERE and is_now},
            coming=frozenset(rank for rank, *_ in missed),
            missed={peer: why for _, peer, why in missed},
            left={rank: why for kind, _, rank, why, *_ in said if kind == LEFT},
        )

    def verdict(self, members: Sequence[int], waited_s: float, timeout_s: float) -> Verdict | None:
        """What follows after waiting so long; None if it is too early to say."""
        absent = [rank for rank in members if rank not in self.here and rank not in self.left]
        awaited = [rank for rank in absent if rank in self.coming or rank not in self.missed]
        stay = tuple(rank for rank in members if rank in self.here and rank not in self.left)
        if not stay or waited_s < (timeout_s if awaited else GRACE_S if absent else 0.0):
            return None
        step = max(self.here[rank] for rank in stay)
        late = f"did not come within {timeout_s:g} s"
        reasons = {rank: self.left.get(rank) or self.missed.get(rank) or late for rank in members if rank not in stay}
        return Verdict(stay, step, tuple(Loss(rank, step, why) for rank, why in reasons.items()))


class Membership:
    """As one rank knows it. For one thread at a time, except `leave`."""

    def __init__(self, store: Store, rank: int, members: Sequence[int]) -> None:
        self._store, self._rank = PrefixStore("members", store), rank
        self.members = tuple(members)
        self.generation = 0
        """How often they have come together again."""
        self.lost: tuple[Loss, ...] = ()
        """All so far, in the order in which they were."""

    def miss(self, failure: TransportError) -> None:
        """Tell the others that this rank is about to break its connections because of `failure`."""
        peer = failure.place.peer
        why = f"rank {self._rank} saw {type(failure).__name__}: {failure.what}"
        self._say(MISSED, self.generation + 1, self._rank, peer, why)

    def leave(self, why: str) -> None:
        """Tell the others not to wait for this rank; from any thread. A store that is gone is no error."""
        with suppress(RuntimeError, TransportError):
            self._say(LEFT, self.generation, self._rank, why)

    def assemble(self, step: int, timeout_s: float, require_open: Callable[[], None]) -> int:
        """Wait for all that are left, and agree on who they are; the step from which all of them exchange again.

        `require_open` is called now and then, and may raise. Raises `LeftBehind` if they did not wait for this rank,
        `DeadlineExceeded` or `PeerLost` if the store is gone.
        """
        self.generation += 1
        self._say(HERE, self.generation, self._rank, step)
        begin_s, limit_s = monotonic(), LOOK_S * len(self.members) + ANSWER_S
        while (verdict := ask(lambda: self._look(begin_s, timeout_s), limit_s, self._rank)) is None:
            require_open()
        if self._rank not in verdict.members:
            what = f"the other ranks went on without this one, which came too late: {_reason(verdict, self._rank)}"
            raise LeftBehind(what, Place(self._rank, step=verdict.step))
        self.members, self.lost = verdict.members, (*self.lost, *verdict.lost)
        return verdict.step

    def _look(self, begin_s: float, timeout_s: float) -> Verdict | None:
        """The verdict that stands; gives one if it is time for that, else waits for it, for a while."""
        said = self._store.get("log").decode().splitlines()
        attendance = Attendance.of(map(json.loads, said), self.generation)
        key = f"verdict {self.generation}"
        if own := attendance.verdict(self.members, monotonic() - begin_s, timeout_s):
            self._store.compare_set(key, "", json.dumps(own))
        elif not self._comes(key, LOOK_S * (1 + list(attendance.here).index(self._rank))):
            return None
        members, step, lost = json.loads(self._store.get(key))
        return Verdict(tuple(members), step, tuple(Loss(*loss) for loss in lost))

    def _comes(self, key: str, limit_s: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=limit_s))
        except DistNetworkError:
            raise
        except RuntimeError:
            return False
        return True

    def _say(self, *line: object) -> None:
        said = json.dumps(line) + "\n"
        ask(lambda: self._store.append("log", said), ANSWER_S, self._rank)  # type: ignore[attr-defined]  # torch's stub is behind


def _reason(verdict: Verdict, rank: int) -> str:
    return next((loss.why for loss in verdict.lost if loss.rank == rank), "it was lost before")
