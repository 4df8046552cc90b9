# SPDX-License-Identifier: Apache-2.0
"""The samples of one rank in memory, of which batches are replaced, and put back after a loss.

Nothing here is sent, and nothing else is written. On the thread that trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils.data import default_collate

from commrt.errors import UsageError

UNDO_BATCHES = 8
"""Batches that can be taken back: so far a rank may be ahead of one that lost its neighbour."""


@runtime_checkable
class Indexed(Protocol):
    """Samples by number: a map-style dataset, or a list."""

    def __getitem__(self, index: int, /) -> Any: ...

    def __len__(self) -> int: ...


class Shard:
    """Samples as fields [n, ...], cloned from `samples`, and what the latest batches replaced."""

    def __init__(self, samples: Indexed) -> None:
        self.fields = _stacked(samples)
        """Written here only."""
        self.replaced = 0
        """How many batches were replaced, without those that were put back."""
        self._before: deque[tuple[Tensor, list[Tensor]]] = deque(maxlen=UNDO_BATCHES)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.fields[0])

    def batch(self, places: Tensor) -> list[Tensor]:
        """Return copies of the samples at `places`, by field."""
        return [field[places] for field in self.fields]

    def replace(self, places: Tensor, batch: Sequence[Tensor]) -> None:
        """Replace the samples at `places` by those of `batch`."""
        self._before.append((places, self.batch(places)))
        self._put(places, batch)
        self.replaced += 1

    def take_back(self, replaced: int) -> None:
        """Put samples back until only so many batches are `replaced`, as far as they are known."""
        while self.replaced > replaced and self._before:
            self._put(*self._before.pop())
            self.replaced -= 1
        self.replaced = replaced

    def load(self, samples: Sequence[Tensor]) -> None:
        """Overwrite all fields; what was replaced before cannot be put back any more."""
        for own, saved in zip(self.fields, samples, strict=True):
            own.copy_(saved)
        self._before.clear()

    def _put(self, places: Tensor, batch: Sequence[Tensor]) -> None:
        for field, part in zip(self.fields, batch, strict=True):
            field[places] = part


def _stacked(samples: Indexed) -> list[Tensor]:
    """Return the fields [n, ...] of all samples."""
    if (
        isinstance(samples, list | tuple)
        and samples
        and all(isinstance(part, Tensor) for part in samples)
    ):
        fields = [part.clone() for part in samples]
    elif isinstance(samples, Indexed) and len(samples):
        collated = default_collate([samples[i] for i in range(len(samples))])
        fields = [*collated] if isinstance(collated, list | tuple) else [collated]
    else:
        raise UsageError(f"a {type(samples).__name__} has no samples: pass a dataset, or tensors")
    if not all(isinstance(field, Tensor) for field in fields):
        kinds = ", ".join(type(field).__name__ for field in fields)
        raise UsageError(
            f"samples of {kinds} cannot be sent: make them tensors, numbers, or tuples of these"
        )
    lengths = {len(field) for field in fields}
    if len(lengths) != 1 or not min(lengths):
        raise UsageError(
            f"fields of {sorted(lengths)} samples: all need the same number, and at least one"
        )
    return fields
