# SPDX-License-Identifier: Apache-2.0
"""Samples passed round a ring: each rank trains on the others' too, without anybody reading or shuffling everything.

Daily et al., "GossipGraD", 2018: while a rank computes on one batch, the batch that it used before travels to the next
rank, and takes the place of the one that comes from the rank before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from commrt.errors import UsageError
from commrt.journey import Journey, Neighbours, Past
from commrt.runtime.opening import current
from commrt.runtime.world import World

__all__ = ["RingShuffle"]


@runtime_checkable
class _Indexed(Protocol):
    def __getitem__(self, index: int, /) -> Any: ...

    def __len__(self) -> int: ...


class RingShuffle:
    """This rank's shard as batches, pass after pass; in each pass every sample is used once, and moves on by one rank.

    `samples` is a map-style dataset (or list) whose items are tensors and numbers or tuples of them, a tuple of
    tensors [n, ...], or batches from a ``DataLoader`` or another iterator, which is read once. They are kept in memory:
    apply random augmentation to batches, afterwards. All ranks need as many samples, of the same dtypes and shapes, and
    take as many batches. After as many passes as there are ranks, each rank has seen every sample.

    ``for batch in ring`` is one pass: a tuple of tensors [batch_size, ...], the last of a pass may be smaller; their
    order follows from `seed`, the rank and the pass. Batches leave on the world's lane while the next one is used, so
    the iterator belongs to the thread that trains, and between two batches all ranks make the same collective calls.
    With a model that gossips, the ring closes around a rank that is lost: what it held is lost with it, and nothing
    else (who was ahead takes back what others did not get), if no rank was more than 8 batches ahead of another.

    Costs one batch sent per rank and step, two of them in memory. Raises `UsageError` for samples that cannot travel,
    `DisagreementError` if ranks come with different ones.
    """

    def __init__(
        self,
        samples: _Indexed | Iterable[Any],
        batch_size: int | None = None,
        *,
        world: World | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._world = current() if world is None else world
        self._fields, found = _stacked(samples)
        self._batch_size = _positive(found if batch_size is None else batch_size)
        self._seed, self._shuffles = seed, shuffle
        self.passes = 0
        """Whole ones so far."""
        self._taken = 0  # batches of the running pass
        self._used: Tensor | None = None  # places of the batch that was used last, which is still here
        self._neighbours, self._past = Neighbours(self._world), Past(self._fields)
        self._under_way: Journey | None = None
        self._journeys: dict[int, list[Journey]] = {}  # by size, those at home
        kinds = ", ".join(f"{field.dtype}{list(field.shape)}" for field in self._fields)
        self._world.agree("RingShuffle", samples=kinds, batch_size=str(self._batch_size))

    def __len__(self) -> int:
        """Batches of a pass."""
        return (len(self._fields[0]) + self._batch_size - 1) // self._batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """The rest of the running pass."""
        order = self._order()
        while self._taken < len(self):
            places = order[self._taken * self._batch_size : (self._taken + 1) * self._batch_size]
            self._pass_on()
            if self._taken == 0:  # the last batch of the pass before may be in here
                self.drain()
            self._taken, self._used = self._taken + 1, places
            yield tuple(field[places] for field in self._fields)
        self.passes, self._taken = self.passes + 1, 0

    def _order(self) -> Tensor:
        """The same for the same rank and pass."""
        count = len(self._fields[0])
        if not self._shuffles:
            return torch.arange(count, device="cpu")
        seed = np.random.SeedSequence([self._seed, self._world.rank, self.passes]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(seed[0] >> 1))
        return torch.randperm(count, generator=generator, device="cpu")

    def _pass_on(self) -> None:
        """Take in what has come, and send what was used last."""
        self._arrive()
        if self._used is not None and len(self._world.members) > 1:
            batch = [field[self._used] for field in self._fields]
            self._under_way = self._journey(batch)
            self._under_way.begin(batch, self._used, self._past.completed)
        self._used = None

    def _journey(self, batch: Sequence[Tensor]) -> Journey:
        """One that is at home, unless ranks were lost since it was made: who was to get a batch may still read it."""
        waiting = self._journeys.setdefault(len(batch[0]), [])
        while waiting:
            if (journey := waiting.pop()).room == self._world.elastic.room:
                return journey
        return Journey(self._neighbours, batch)

    def _arrive(self) -> None:
        if self._under_way is not None:
            journey, self._under_way = self._under_way, None
            journey.end(self._past)
            self._journeys[len(journey.places)].append(journey)

    def drain(self) -> None:
        """Wait for the batch that is under way. Not collective."""
        self._arrive()

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on, samples included: they are other ones than at the start."""
        self.drain()
        fields = [field.clone() for field in self._fields]
        used = None if self._used is None else self._used.clone()
        return {"passes": self.passes, "taken": self._taken, "used": used, "samples": fields}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, on the same rank; ranks must load states that were taken together."""
        self._require_fit(state)
        self.drain()
        self.passes, self._taken, self._used = state["passes"], state["taken"], state.get("used")
        for own, saved in zip(self._fields, state["samples"], strict=True):
            own.copy_(saved)
        self._past.forget()

    def _require_fit(self, state: object) -> None:
        found = state if isinstance(state, Mapping) else {}
        samples, used = found.get("samples"), found.get("used")
        kinds = [_kind(field) for field in samples] if isinstance(samples, list | tuple) else None
        if kinds != [_kind(field) for field in self._fields]:
            raise UsageError("a state of other samples: make the RingShuffle with the shard that it was saved with")
        counts = [found.get("passes"), found.get("taken")]
        are_counts = all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts)
        places = torch.empty(0, dtype=torch.int64) if used is None else used
        if (
            not are_counts
            or found["taken"] > len(self)
            or _kind(places)[0] != torch.int64
            or (places.numel() and not 0 <= int(places.min()) <= int(places.max()) < len(self._fields[0]))
            or places.dim() != 1
        ):
            raise UsageError("a state that no RingShuffle has saved: pass what state_dict() returned")


def _kind(field: object) -> tuple[torch.dtype | None, tuple[int, ...]]:
    return (field.dtype, tuple(field.shape)) if isinstance(field, Tensor) else (None, ())


def _stacked(samples: _Indexed | Iterable[Any]) -> tuple[list[Tensor], int | None]:
    """Fields [n, ...] of all samples, and the size of a batch if they came in batches."""
    if isinstance(samples, list | tuple) and samples and all(isinstance(part, Tensor) for part in samples):
        return _checked([part.clone() for part in samples]), None
    if isinstance(samples, _Indexed) and not hasattr(samples, "batch_size") and len(samples):
        return _checked(_parts(default_collate([samples[i] for i in range(len(samples))]))), None
    batches = [_parts(batch) for batch in samples] if isinstance(samples, Iterable) else []
    if not batches:
        raise UsageError(f"a {type(samples).__name__} has no samples: pass a dataset, tensors, or a loader of batches")
    return _checked([torch.cat(parts) for parts in zip(*batches, strict=True)]), len(batches[0][0])


def _parts(batch: Any) -> list[Tensor]:
    parts = list(batch) if isinstance(batch, list | tuple) else [batch]
    if not all(isinstance(part, Tensor) for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise UsageError(f"samples of {kinds} cannot travel: make them tensors, numbers, or tuples of these")
    return parts


def _checked(fields: list[Tensor]) -> list[Tensor]:
    lengths = {len(field) for field in fields}
    if len(lengths) != 1 or not min(lengths):
        raise UsageError(f"fields of {sorted(lengths)} samples: all need as many, and at least one")
    return fields


def _positive(batch_size: int | None) -> int:
    if batch_size is None or batch_size < 1:
        raise UsageError(f"batch_size={batch_size}: say how many samples a batch has")
    return batch_size
