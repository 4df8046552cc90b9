# SPDX-License-Identifier: Apache-2.0
"""What a module of this folder says of its schedules, in `REGISTERED` at its end; terms of costs.

From this follow the catalogue, the command line, the shapes that ``commrt plan`` tries, what the
backend of torch.distributed may choose, the page of the reference, and the proofs of schedules and
of their costs in ``make prove`` and in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from commrt.algorithm import Algorithm
from commrt.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Nodes:
    """Ranks to plan for: `per_node` consecutive ones share a node of `cards` network cards."""

    ranks: int
    per_node: int = 1
    cards: int = 1

    @property
    def within(self) -> int:
        """The ranks of each node, if there are several nodes and all are full; else 1."""
        fills = self.per_node < self.ranks and self.ranks % self.per_node == 0
        return self.per_node if fills else 1


class Shape(NamedTuple):
    """An all-reduce that ``commrt plan`` may try."""

    algorithm: Algorithm
    steps: int = 0
    """Its steps, if so many that it is priced only where it may be the best; 0: always price it."""


def no_shapes(_: Nodes) -> Iterable[Shape]:
    """Return nothing: ``commrt plan`` does not try the algorithm."""
    return ()


@dataclass(frozen=True, slots=True)
class Registration:
    """A schedule as the catalogue offers it.

    `steps` and `sent` are its cost, for two ranks or more: what the docstring of `schedule` says,
    and the proofs hold it to.
    """

    collective: str
    """What it does; one of `commrt.proof.spec.collective_of`."""
    name: str
    """Its name on the command line."""
    schedule: Callable[..., Schedule]
    """A function of the ranks, and of the root if the collective has one."""
    steps: Callable[[int], int]
    sent: Callable[[int], Fraction | int]
    """What the busiest of so many ranks sends, in buffers."""
    is_limit: bool = False
    """True if it may also send less than `sent`."""
    algorithm: type[Algorithm] | None = None
    """The class that users pass to `attach`: made without arguments, it gives `schedule`."""
    shapes: Callable[[Nodes], Iterable[Shape]] = no_shapes
    """All that ``commrt plan`` tries on some nodes, by this or by similar algorithms."""
    for_groups: bool = True
    """True if the backend of torch.distributed may choose it."""


def doublings(p: int) -> int:
    """Return ceil(log2(p))."""
    return (p - 1).bit_length()


def is_power_of_two(p: int) -> bool:
    """Return True if `p` is 1, 2, 4, 8, ..."""
    return p & (p - 1) == 0


def all_but_one(p: int) -> Fraction:
    """Return (p - 1)/p: what a rank sends that keeps one chunk of p."""
    return Fraction(p - 1, p)


def twice_all_but_one(p: int) -> Fraction:
    """Return 2(p - 1)/p, the least that all ranks can send in an all-reduce."""
    return 2 * all_but_one(p)
