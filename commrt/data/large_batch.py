# SPDX-License-Identifier: Apache-2.0
"""Train with large batches that grow from epoch to epoch, and a learning rate that follows.

Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", 2018. The noise
of a step is about rate over batch, so a growing batch can replace a decay of the learning rate.

Of what others own, it changes the rates in an optimizer's groups, and the epoch of a sampler.
Nothing is sent. On the thread that trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from math import ceil, inf
from typing import Any, Literal, NamedTuple, TypeGuard

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler, Sampler

from commrt.errors import UsageError
from commrt.store.parsing import MALFORMED, parse_int
from commrt.training.replica import Replica

MOST_COUNT = 1_000_000_000
Rule = Literal["keep", "sqrt", "linear"]
RULES: Mapping[str, float] = {"keep": 0.0, "sqrt": 0.5, "linear": 1.0}
"""The rate grows by the batch's growth to this power."""


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
        epochs = _epochs_in(state, "a BatchSizeControl")
        self.epoch = int(epochs)
        self._given = 0
        self._done = round((epochs - self.epoch) * self.steps)
        if self._done and self._done == self.steps:
            self.epoch = self.epoch + 1
            self._done = 0


def _epochs_in(state: object, whose: str) -> float:
    epochs = state.get("epochs") if isinstance(state, Mapping) else None
    if not _is_number(epochs):
        raise UsageError(
            f"{state!r:.200} is no state of {whose}: pass what its state_dict() returned"
        )
    return epochs


def _is_number(value: object) -> TypeGuard[float]:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST_COUNT
    )


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


class Rate:
    """A learning rate that rises for some epochs, then falls to 0: call `step` after each update.

    It depends on the fraction of the training that is done, and sets the rate itself: use none of
    torch's schedulers beside it. `rule` says what growing batches do to it: with ``keep`` their
    growth replaces a decay, with ``linear`` and ``sqrt`` the rate grows too. A step of more ranks
    is a larger batch: tell `step` of how many. With backup workers name it in
    ``attach(also=[...])``, so that a late rank has the rate of the others.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        control: BatchSizeControl,
        epochs: float,
        *,
        warmup_epochs: float = 5.0,
        power: float = 2.0,
        rule: Rule = "keep",
    ) -> None:
        if rule not in RULES:
            raise UsageError(f"rule={rule!r}: choose one of {', '.join(RULES)}")
        if not 0 <= warmup_epochs < epochs < inf:
            raise UsageError(
                f"{warmup_epochs:g} of {epochs:g} epochs to warm up: give 0 or more, and fewer than"
                " there are"
            )
        self._optimizer = optimizer
        self._control = control
        self._epochs = epochs
        self._warmup = warmup_epochs
        self._power = power
        self._rule = RULES[rule]
        self._highest: list[float] = [group["lr"] for group in optimizer.param_groups]
        self._updates = 0
        # of the first update for which that was said, and of the latest
        self._ranks: tuple[int, int] | None = None
        self._set()

    def step(self, ranks: int | None = None) -> None:
        """Count an update.

        Its gradients are those of `ranks`: ``len(replica.last.members)``, by default as many as
        before.
        """
        self._updates += 1
        if ranks:  # a late rank of backup workers knows none
            self._ranks = (ranks if self._ranks is None else self._ranks[0], ranks)
        self._set()

    def _set(self) -> None:
        now, after = (self._control.epochs_after(self._updates + one) for one in (0, 1))
        first, ranks = self._ranks or (1, 1)
        growth = self._control.batch_in(int(now)) * ranks / (self._control.batch_in(0) * first)
        begun = after / self._warmup if self._warmup else 1.0
        rest = max(self._epochs - now, 0.0) / (self._epochs - self._warmup)
        factor = float(growth**self._rule * min(begun, 1.0) * min(rest, 1.0) ** self._power)
        for group, highest in zip(self._optimizer.param_groups, self._highest, strict=True):
            group["lr"] = highest * factor

    def state_dict(self) -> dict[str, Any]:
        """Return the highest rates, how much of the training is done, and of how many ranks."""
        epochs = self._control.epochs_after(self._updates)
        return {"highest": self._highest, "epochs": epochs, "ranks": self._ranks and [*self._ranks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; with other ranks, as far in the training after other updates."""
        epochs = _epochs_in(state, "a Rate")
        highest = state.get("highest")
        rates = highest if isinstance(highest, list | tuple) else []
        try:
            told = state.get("ranks")
            first, latest = (
                (1, 1) if told is None else (parse_int(count, least=1) for count in told)
            )
        except MALFORMED:
            rates = []
        if len(rates) != len(self._highest) or not all(map(_is_number, rates)):
            raise UsageError(
                f"a state of other rates: {state!r:.200}; pass what state_dict() of this"
                " optimizer's returned"
            )
        self._updates = self._control.updates_after(epochs)
        self._highest = [*rates]
        self._ranks = told and (first, latest)
        self._set()
