# SPDX-License-Identifier: Apache-2.0
"""Batches that grow from epoch to epoch, for a `DataLoader`; `learning_rate` follows them.

It changes the epoch of the sampler that it was given, and nothing else of others. On the thread
that trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from math import ceil, inf
from typing import Any, NamedTuple, TypeGuard

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, Sampler

from commrt.errors import UsageError
from commrt.training.replica import Replica

MOST_COUNT = 1_000_000_000


class Part(NamedTuple):
    """A part of a batch, which goes through the model at once."""

    share: float
    """The weight of its loss: one over the number of parts."""
    is_last: bool
    """True if the optimizer is to step now."""


class BatchSizeControl(Sampler[list[int]]):
    """Batches of one rank, with a size for each epoch: a ``batch_sampler`` for a `DataLoader`.

    `sizes` maps an epoch to the batch size from then on. `sampler` gives this rank's samples, as
    torch's DistributedSampler does. A batch of more than `most` samples comes in equal parts; use
    each inside of `part`. Samples that do not fill a batch are left out, so that all ranks make as
    many steps. `state_dict` has the position, so a resumed run goes on in the middle of an epoch.

    >>> control = BatchSizeControl(range(100), {0: 10, 2: 40}, most=20)
    >>> len(control), control.steps
    (10, 10)
    >>> control.set_epoch(2)
    >>> len(control), control.steps, next(iter(control))[:3]
    (4, 2, [0, 1, 2])
    """

    def __init__(
        self,
        sampler: DistributedSampler[Any] | Sequence[int],
        sizes: Mapping[int, int],
        most: int | None = None,
    ) -> None:
        _require_sizes(sizes, most)
        self._sampler = sampler
        self._most = inf if most is None else most
        self._sizes = dict(sorted(sizes.items()))
        self._done = 0  # steps of this epoch
        self._given = 0  # parts of this step
        self.epoch = 0
        """The epoch of the batches to come; `set_epoch` and `load_state_dict` alone change it."""

    def batch_in(self, epoch: int) -> int:
        """Return the samples of this rank in a step of `epoch`."""
        return next(size for since, size in reversed(self._sizes.items()) if since <= epoch)

    @property
    def parts(self) -> int:
        """The number of parts in which a batch comes."""
        return max(ceil(self.batch_in(self.epoch) / self._most), 1)

    @property
    def steps(self) -> int:
        """Steps of this epoch."""
        return self.steps_in(self.epoch)

    def steps_in(self, epoch: int) -> int:
        """Return the number of steps of `epoch`."""
        return len(self._sampler) // self.batch_in(epoch)

    def epochs_after(self, updates: int) -> float:
        """Return the number of epochs that `updates` are: the inverse of `updates_after`."""
        epoch = 0
        last = max(self._sizes)
        while (steps := self.steps_in(epoch)) <= updates and steps and epoch < last:
            epoch = epoch + 1
            updates = updates - steps
        if steps:  # from the last size on, all epochs have as many
            epoch = epoch + updates // steps
            updates = updates % steps
        return epoch + (updates / steps if steps else 0.0)

    def updates_after(self, epochs: float) -> int:
        """Return the number of updates in `epochs`.

        >>> control = BatchSizeControl(range(100), {0: 10, 2: 50})
        >>> [control.updates_after(epochs) for epochs in (0.5, 2.0, 2.5, 5.0)]
        [5, 20, 21, 26]
        """
        whole = int(epochs)
        last = max(self._sizes)
        later = max(whole - last, 0) * self.steps_in(last)
        return (
            sum(map(self.steps_in, range(min(whole, last))))
            + later
            + round((epochs - whole) * self.steps_in(whole))
        )

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, unless a resumed run is in the middle of it."""
        if epoch != self.epoch or self._done == self.steps:
            self.epoch = epoch
            self._done = 0
        self._given = 0
        if not self.steps:
            raise UsageError(
                f"a batch of {self.batch_in(epoch)} samples in epoch {epoch}, and this rank has"
                f" {len(self._sampler)}: no step could be made; use smaller batches, or fewer ranks"
            )
        if callable(begin := getattr(self._sampler, "set_epoch", None)):
            begin(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        if self._done == self.steps:
            raise UsageError(
                f"epoch {self.epoch} is done: call set_epoch() before the loader is asked for"
                " batches"
            )
        size = self.batch_in(self.epoch)
        samples = islice(self._sampler, self._done * size, self.steps * size)
        while part := list(islice(samples, size // self.parts)):
            yield part

    def __len__(self) -> int:
        return (self.steps - self._done) * self.parts

    @contextmanager
    def part(self, replica: Replica | DistributedDataParallel | None = None) -> Iterator[Part]:
        """Wrap the passes of one part; `replica` accumulates until the last part of a batch."""
        is_last = self._given + 1 == self.parts
        with nullcontext() if is_last or replica is None else replica.no_sync():
            yield Part(1 / self.parts, is_last)
        if is_last:
            self._given = 0
            self._done += 1
        else:
            self._given += 1

    def state_dict(self) -> dict[str, float]:
        """Return the position, between steps."""
        return {"epochs": self.epoch + self._done / max(self.steps, 1)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go to the position in `state` before the loader is asked; nearly, with other ranks."""
        epochs = epochs_in(state, "a BatchSizeControl")
        self.epoch = int(epochs)
        self._given = 0
        self._done = round((epochs - self.epoch) * self.steps)
        if self._done and self._done == self.steps:
            self.epoch = self.epoch + 1
            self._done = 0


def _require_sizes(sizes: Mapping[int, int], most: int | None) -> None:
    if (
        0 not in sizes
        or any(not isinstance(size, int) or size < 1 for size in sizes.values())
        or min(sizes) < 0
    ):
        raise UsageError(
            f"sizes {dict(sizes)}: give a batch of one sample or more from epoch 0 on, as {{0: 16,"
            " 30: 32}"
        )
    if most is None:
        return
    if most < 1:
        raise UsageError(f"most={most}: at least one sample must fit into memory")
    for size in sizes.values():
        if size % (parts := ceil(size / most)):
            raise UsageError(
                f"a batch of {size} cannot come in {parts} equal parts of at most {most}: choose"
                " sizes that are a multiple of it"
            )


def epochs_in(state: object, whose: str) -> float:
    """Return how many epochs are done, as a `state` says; raises `UsageError` for no such state."""
    epochs = state.get("epochs") if isinstance(state, Mapping) else None
    if not is_count(epochs):
        raise UsageError(
            f"{state!r:.200} is no state of {whose}: pass what its state_dict() returned"
        )
    return epochs


def is_count(value: object) -> TypeGuard[float]:
    """Return True for a number, perhaps with a fraction, that a state may hold."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST_COUNT
    )
