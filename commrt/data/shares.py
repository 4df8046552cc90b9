# SPDX-License-Identifier: Apache-2.0
"""A sampler for ranks that may be lost: each sample is used once per epoch nevertheless.

It sends nothing itself: ranks agree as they compute the same. A late rank takes the position of
another one by `Replica.drain`, which calls `Shares.load_state_dict`. On the thread that trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from functools import lru_cache, partial
from math import ceil
from typing import Any, NamedTuple, TypeVar

import numpy as np

from commrt.data.positions import Ranges, deal, left_after, length, order_of
from commrt.errors import UsageError
from commrt.runtime.init import current, is_open
from commrt.store.parsing import MALFORMED, parse_int, require
from commrt.training.replica import Replica

MAKE_LOADER = "make it with DataLoader(dataset, batch_sampler=shares), and iterate over it anew"
CALL_DONE = "call it once for each batch of shares.batches(loader, replica), after optimizer.step()"
T = TypeVar("T")


class _Point(NamedTuple):
    """How far training is."""

    seed: int
    epoch: int
    todo: Ranges


class _Draw(NamedTuple):
    """What this rank takes in one step."""

    point: _Point
    ranks: int
    batch_size: int
    share: Ranges

    def is_like(self, other: _Draw) -> bool:
        """Return True if both take the same samples in the same epoch."""
        (seed, epoch, _), (other_seed, other_epoch, _) = self.point, other.point
        return (seed, epoch, self.share) == (other_seed, other_epoch, other.share)


class Shares:
    """Deal the samples of each epoch to the ranks, so that every sample is used once per epoch.

    It is a ``batch_sampler``, and gives batches by `batches`::

        loader = DataLoader(dataset, batch_sampler=shares)
        while shares.epoch < 90:
            for x, y in shares.batches(loader, replica):
                ...  # backward(), optimizer.step()
                shares.done()

    The order follows from `seed` and the epoch. A step takes its next `batch_size` samples for each
    rank, and the last step of an epoch evenly fewer. `place` returns this rank's place and the
    number of ranks, in each step anew; by default those of the world, as with backup workers. All
    ranks need equal arguments and the same state: name it in ``attach(also=[shares])``.

    Samples of a step that failed, of gradients that backup workers dropped and of a dead rank come
    again before the epoch ends. If fewer samples than ranks are left, all ranks take the same ones,
    and their mean counts once. So the last batches may have one sample, of which BatchNorm makes no
    mean. Gossip and local SGD notice a lost rank at different steps, so nobody uses the samples of
    its place until you start again.

    One batch makes one step: split it to accumulate gradients. Costs 8 bytes of memory per sample.
    Raises `UsageError` for a dataset without a length, and a batch without samples.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        seed: int = 0,
        place: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self.batch_size = batch_size
        """Samples of a rank in a step. May change between two steps, on all ranks alike."""
        try:
            parse_int(batch_size, least=1)
            self._size = parse_int(len(dataset), least=1)
            self._point = self._start(parse_int(seed), 0)
            """How far training is; `_go_to` alone changes it, also inside of `Replica.drain`."""
        except MALFORMED as error:
            raise UsageError(
                f"Shares of a {type(dataset).__name__}, batch_size={batch_size!r:.40}, "
                f"seed={seed!r:.40}: give a dataset with a length and samples, a batch size from 1 "
                "on, and a seed from 0 on"
            ) from error
        if place is not None and not callable(place):
            raise UsageError(f"place={place!r:.80}: give a function that returns (place, ranks)")
        self._place = _place_in_world() if place is None else place
        self._order = lru_cache(1)(partial(order_of, self._size))
        self._drawn: deque[_Draw] = deque()
        """What the loader has drawn, and the loop does not have yet."""
        self._hand: _Draw | None = None
        """What the loop has, until it is done; None again if another position is loaded."""
        self._replica: Replica | None = None
        """That of the latest `batches`."""

    @property
    def epoch(self) -> int:
        """The number of whole epochs so far."""
        return self._point.epoch

    def __len__(self) -> int:
        """Return the steps that are left of this epoch, if all gradients are used."""
        ranks = self._draw(self._point).ranks
        whole, rest = divmod(length(self._point.todo), ranks * self.batch_size)
        return whole + (1 if rest >= ranks else ceil(rest / self.batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's samples of each step to come, if all gradients are used.

        From now on batches are those of this iterator, not of an earlier one.
        """
        self._drawn = deque()
        return self._draws(self._drawn)

    def _draws(self, drawn: deque[_Draw]) -> Iterator[list[int]]:
        point = self._point
        while point.todo:
            draw = self._draw(point)
            drawn.append(draw)
            order = self._order(point.seed, point.epoch)
            yield np.concatenate([order[begin:end] for begin, end in draw.share]).tolist()
            _, rest = deal(point.todo, draw.ranks, draw.batch_size)
            point = point._replace(todo=rest)

    def _draw(self, point: _Point) -> _Draw:
        rank, ranks = place = self._place()
        if not 0 <= rank < ranks:
            what = "return this rank's place, from 0 on, and the number of ranks"
            raise UsageError(f"place() returned {place}: {what}")
        shares, _ = deal(point.todo, ranks, self.batch_size)
        return _Draw(point, ranks, self.batch_size, shares[rank])

    def batches(self, loader: Iterable[T], replica: Replica | None = None) -> Iterator[T]:
        """Yield this rank's batches until the epoch ends; call `done` after each step.

        When ranks change, or this one was late, it drops what the loader has read ahead, and
        iterates over it anew. So give a loader with workers ``persistent_workers=True``.

        Raises `UsageError` for a loader of other samples, or one that changes their order.
        """
        if not getattr(loader, "in_order", True):
            raise UsageError("a loader with in_order=False: leave it out, as Shares count batches")
        if (
            is_open()
            and current().size > current().founders
            and not (replica and replica.drops_gradients)
        ):
            raise UsageError(
                "Shares with init(up_to=) need BackupWorkers, and their replica: others draw at"
                " random"
            )
        self._replica = replica
        self._hand = None
        if replica is not None and (replica.last is None or not replica.last.counted):
            replica.drain()  # this process may have come in a lost one's place
        epoch = self.epoch
        found = True
        while self.epoch == epoch:
            if not found:
                raise UsageError(f"the loader gave no batch of these Shares: {MAKE_LOADER}")
            found = False
            self._drawn = deque()  # stays empty if the loader draws from another sampler
            for batch in loader:
                if not self._drawn:
                    break
                found = True
                draw = self._draw(self._point)
                if not self._drawn.popleft().is_like(draw):
                    break
                self._hand = draw
                yield batch
                if self._hand is not None:
                    raise UsageError(f"the next batch came before shares.done(): {CALL_DONE}")

    def done(self, counted: Collection[int] | None = None) -> None:
        """Note that a step was made; call it on all ranks after ``optimizer.step()``, then save.

        `counted` are the places whose gradients were used: by default those that the replica of
        `batches` reports, or all. Pass () if no step was made. A rank whose gradient backup workers
        dropped takes the weights and the position of another rank here.

        Raises `UsageError` without a batch, or if the other ranks have left the loop.
        """
        replica = self._replica
        report = None if replica is None else replica.last
        if counted is None and replica is not None and report is not None:
            if not report.counted:
                self._hand = None
                replica.drain()  # goes to another rank's position
                if report.ended and not replica.stopping:
                    what = "let all ranks leave it after the same step"
                    raise UsageError(f"the other ranks have left the loop over Shares: {what}")
                return
            if replica.drops_gradients:
                counted = report.members
        hand = self._hand
        self._hand = None
        if hand is None:
            raise UsageError(f"done() without a batch of the position that is loaded: {CALL_DONE}")
        point, ranks, batch_size, _ = hand
        todo = left_after(
            point.todo, ranks, batch_size, range(ranks) if counted is None else counted
        )
        self._go_to(point._replace(todo=todo) if todo else self._start(point.seed, point.epoch + 1))

    def _start(self, seed: int, epoch: int) -> _Point:
        return _Point(seed, epoch, ((0, self._size),))

    def _go_to(self, point: _Point) -> None:
        """Use `point` from now on; a batch of another one is no longer the next."""
        if point != self._point:
            self._point = point
            self._hand = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, equal on all ranks: seed, epoch, and what is left of its order."""
        seed, epoch, todo = self._point
        return {"size": self._size, "seed": seed, "epoch": epoch, "todo": [*map(list, todo)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of `state`, also with other ranks or another batch size.

        Its seed goes on too. Raises `UsageError` for a state of a dataset of another size, and for
        what is no state of `Shares`.
        """
        try:
            size, seed, epoch = (parse_int(state[key]) for key in ("size", "seed", "epoch"))
            todo = tuple((parse_int(begin), parse_int(end)) for begin, end in state["todo"])
            edges = [edge for each in sorted(todo) for edge in each]
            require(edges and edges == sorted(edges) and edges[-1] <= size)
            require(all(begin < end for begin, end in todo))
        except MALFORMED as error:
            what = "pass what state_dict() returned"
            raise UsageError(f"{state!r:.200} is no state of Shares: {what}") from error
        if size != self._size:
            raise UsageError(
                f"a state of {size} samples, and the dataset has {self._size}: load it with the "
                "dataset of the run that saved it, or begin anew without it"
            )
        self._go_to(_Point(seed, epoch, todo))


def _place_in_world() -> Callable[[], tuple[int, int]]:
    if not is_open():
        raise UsageError("Shares without a world: call commrt.init() first, or pass place=")
    world = current()
    return lambda: (world.rank, world.size)
