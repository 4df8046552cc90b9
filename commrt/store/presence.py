# SPDX-License-Identifier: Apache-2.0
"""Who may still announce a gradient: not those that are gone, and not those that do something else together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from threading import Event
from typing import TypeVar

from torch.distributed import Store

from commrt.store.asking import ANSWER_S, ask
from commrt.store.hearsay import understood
from commrt.threads.patience import Patience

__all__ = ["TRAINING", "Doing", "Presence"]

LOOK_S = 0.05
T = TypeVar("T")


class Doing(StrEnum):
    """What a rank says that it does."""

    TRAINS = "trains"
    GATHERS = "gathers"
    """It waits for all ranks in a collective call."""
    BETWEEN = "between"
    """It has not begun a step since the latest collective call, and may make another."""
    AWAITS = "awaits"
    """It is one of those that train, but has begun no step, and waits until the others come to a collective call."""
    COMES = "comes"
    """It takes the place of a rank that is gone, and waits until nobody gathers."""
    ENDS = "ends"
    """It has finished, and waits for those who may want its state."""
    LEFT = "left"
    """It asks nothing of anybody any more."""


TRAINING = frozenset({Doing.TRAINS, Doing.BETWEEN, Doing.AWAITS})
"""It may announce a gradient."""


class Presence:
    """Of all ranks, on a shelf of the store; every rank says what it does there when that changes.

    `gone` gives those of some ranks whose process does not live.
    """

    def __init__(
        self, store: Store, rank: int, ranks: Sequence[int], timeout_s: Callable[[], float], gone: Gone
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._timeout_s, self._gone = timeout_s, gone
        self.doing: Doing | None = None
        """This rank, as it said last."""

    def say(self, doing: Doing) -> None:
        """What this rank does from now on; from the thread that trains."""
        if doing != self.doing:
            self._asked(lambda: self._store.set(_key(self._rank), doing))
            self.doing = doing

    def of(self, ranks: Collection[int]) -> Mapping[int, Doing | None]:
        """What each of `ranks` said last; None for one whose process is gone without a word."""
        keys = [_key(rank) for rank in ranks]
        words = self._asked(lambda: self._store.multi_get(keys)) if keys else []
        pairs = zip(ranks, words, strict=True)
        said = {rank: understood(_key(rank), word, lambda each: Doing(each.decode())) for rank, word in pairs}
        gone = self._gone([rank for rank, doing in said.items() if doing != Doing.LEFT and rank != self._rank])
        return {rank: None if rank in gone else doing for rank, doing in said.items()}

    def outlast(self, others: Callable[[Doing | None], bool], needed: int | None = None) -> bool:
        """Wait until what each other rank does is what `others` says, but no longer than a deadline; True if it is.

        If `needed` ranks make a step, it begins anew while as many train, and the store changes as it does in steps.
        """
        patience, keys = Patience(self._timeout_s()), -1
        while patience.left_s > 0:
            doing = self.of([rank for rank in self._ranks if rank != self._rank])
            if all(others(each) for each in doing.values()):
                return True
            Event().wait(LOOK_S)
            if needed is not None and sum(each in TRAINING for each in doing.values()) >= needed:
                known, keys = keys, self._asked(self._store.num_keys)
                patience = patience if known == keys else Patience(self._timeout_s())
        return False

    def _asked(self, question: Callable[[], T]) -> T:
        return ask(question, self._timeout_s() + ANSWER_S, self._rank)


Gone = Callable[[Collection[int]], Collection[int]]


def _key(rank: int) -> str:
    return f"doing/{rank}"
