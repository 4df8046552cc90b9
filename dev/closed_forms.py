# SPDX-License-Identifier: Apache-2.0
"""The steps and bytes of each schedule of the catalogue, as `docs/algorithms.md` and the docstrings
give them.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from commrt.proof.replay import Traffic

Steps = Callable[[int], int]
Sent = Callable[[int], Fraction | int]


def doublings(p: int) -> int:
    """Return ceil(log2(p))."""
    return (p - 1).bit_length()


def is_power(p: int) -> bool:
    """Return True if `p` is a power of two."""
    return p & (p - 1) == 0


def all_but_one(p: int) -> Fraction:
    """Return the bytes of a rank that sends all chunks but one."""
    return Fraction(p - 1, p)


def ring_bytes(p: int) -> Fraction:
    """Return the bytes that each rank of a ring sends."""
    return 2 * all_but_one(p)


def up_to_half(p: int) -> int:
    """Return the chunks that the busiest rank of a tree sends towards the root."""
    half = 1 << max(0, doublings(p) - 1)
    return max(p - half, half // 2)


def torus_steps(p: int) -> int:
    """Return the steps of the most square torus, which folds one rank of a prime above 3."""
    core = p - is_folded(p)
    x = max(x for x in range(1, core + 1) if core % x == 0 and x * x <= core)
    return 2 * (x + core // x - 2) + 2 * is_folded(p)


def is_folded(p: int) -> bool:
    """Return True for a prime above 3: one rank stays outside the torus."""
    return p > 3 and all(p % d for d in range(2, p))


def chain_steps(p: int) -> int:
    """Return the steps of a chain, which cuts the buffer into 4 p - 6 slices."""
    return p - 2 + 4 * p - 7


RING = (lambda p: p - 1, all_but_one)
LOGARITHMIC = (doublings, all_but_one)
AT_ONCE = (lambda _: 1, all_but_one)
COSTS: dict[str, tuple[Steps, Sent]] = {
    "broadcast tree": (doublings, doublings),
    "broadcast direct": (lambda _: 1, lambda p: p - 1),
    "broadcast chain": (chain_steps, lambda _: 1),
    "broadcast scatter_gather": (lambda p: doublings(p) + p - 1, ring_bytes),
    "reduce tree": (doublings, lambda _: 1),
    "reduce direct": (lambda _: 1, lambda _: 1),
    "reduce chain": (chain_steps, lambda _: 1),
    "reduce scatter_gather": (
        lambda p: p - 1 + doublings(p),
        lambda p: Fraction(p - 1 + up_to_half(p), p),
    ),
    "gather tree": (doublings, lambda p: Fraction(up_to_half(p), p)),
    "gather direct": (lambda _: 1, lambda p: Fraction(1, p)),
    "scatter tree": LOGARITHMIC,
    "scatter direct": AT_ONCE,
    "all_gather ring": RING,
    "all_gather doubling": LOGARITHMIC,
    "all_gather bruck": LOGARITHMIC,
    "all_gather direct": AT_ONCE,
    "reduce_scatter ring": RING,
    "reduce_scatter halving": LOGARITHMIC,
    "reduce_scatter bruck": LOGARITHMIC,
    "reduce_scatter direct": AT_ONCE,
    "all_reduce ring": (lambda p: 2 * (p - 1), ring_bytes),
    "all_reduce halving_doubling": (
        lambda p: 2 * (p.bit_length() - 1) + 2 * (not is_power(p)),
        lambda _: 3,
    ),
    "all_reduce torus2d": (torus_steps, lambda p: 3 if is_folded(p) else ring_bytes(p)),
    "all_reduce doubling": (
        lambda p: p.bit_length() - 1 + 2 * (not is_power(p)),
        lambda p: p.bit_length() - 1 + (not is_power(p)),
    ),
    "all_reduce double_tree": (lambda p: 10 * doublings(p) - 1, lambda _: 2),
    "all_reduce direct": (lambda _: 2, ring_bytes),
    "all_reduce one_shot": (lambda _: 1, lambda p: p - 1),
    "all_to_all pairwise": (lambda p: p - 1, lambda p: Fraction(p - 1, p * p)),
    "all_to_all direct": (lambda _: 1, lambda p: Fraction(p - 1, p * p)),
    "barrier dissemination": LOGARITHMIC,
}
"""Steps, and bytes of the busiest rank in buffers, for two ranks or more.
One rank needs no step.
"""
LIMITS = {"all_reduce halving_doubling", "all_reduce torus2d", "all_reduce double_tree"}
"""Schedules whose bytes are a limit, as ranks are folded in or trees are uneven."""


def wrong_cost(key: str, ranks: int, cost: Traffic) -> str | None:
    """Return in words how `cost` differs from `COSTS[key]`, or None."""
    steps, sent = (each(ranks) for each in COSTS[key]) if ranks > 1 else (0, 0)
    is_right = cost.bytes_per_rank <= sent if key in LIMITS else cost.bytes_per_rank == sent
    if (cost.steps, is_right) == (steps, True):
        return None
    return (
        f"takes {cost.steps} steps and {cost.bytes_per_rank} buffers instead of {steps} and {sent}"
    )
