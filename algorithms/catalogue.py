# SPDX-License-Identifier: Apache-2.0
"""All schedules and algorithms by name: what `MODULES` register, and the other ways to train.

Pure functions of tables that are made once, at import. Those ways stand in rooms above this one, so
`POLICIES` has them as text, and `by_name` imports one when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import cast

from commrt.algorithm import Algorithm
from commrt.algorithms import (
    bruck,
    chain,
    direct,
    double_tree,
    halving_doubling,
    recursive_doubling,
    ring,
    torus,
    tree,
)
from commrt.algorithms.arguments import require_root
from commrt.algorithms.registration import Registration
from commrt.errors import UsageError
from commrt.schedule import Schedule

GOSSIP = "gossip"
DIRECT = "direct"

MODULES = (
    tree,
    ring,
    halving_doubling,
    recursive_doubling,
    double_tree,
    torus,
    bruck,
    direct,
    chain,
)
"""Of two schedules that cost the same, that of the earlier module is taken."""


def registered() -> tuple[Registration, ...]:
    """Return what all modules register; raise `ValueError` for a name that two of them take."""
    found = dict[tuple[str, str], Registration]()
    for module in MODULES:
        for each in module.REGISTERED:
            key = (each.collective, each.name)
            if key in found:
                raise ValueError(
                    f"{module.__name__} registers {each.name!r} of {each.collective}, a name that"
                    f" {found[key].schedule.__module__} has taken: choose another"
                )
            found[key] = each
    return tuple(found.values())


REGISTERED = registered()
ALGORITHMS: dict[str, type[Algorithm]] = {
    each.name: each.algorithm for each in REGISTERED if each.algorithm is not None
}
"""Classes of the all-reduces by name; each works without arguments."""
POLICIES = {
    GOSSIP: "commrt.algorithms.gossip.Gossip",
    "backup": "commrt.backup_workers.policy.BackupWorkers",
    "local": "commrt.local_sgd.policy.LocalSGD",
}
"""Other ways to train by name: the homes of their classes."""
COLLECTIVES: Mapping[str, Mapping[str, Callable[..., Schedule]]] = {
    collective: {
        each.name: each.schedule
        for each in REGISTERED
        if each.collective == collective and each.for_groups
    }
    for collective in dict.fromkeys(each.collective for each in REGISTERED)
}
"""Schedules by collective and name: functions of the ranks, and of the root in `ROOTED`."""
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
SUMS = ("all_reduce", "reduce", "reduce_scatter")
"""Collectives that combine; the others only move."""


def by_name(name: str) -> Algorithm:
    """Return the algorithm called `name`, or of the class of that name, with its defaults.

    Raises `UsageError` that lists the names.

    >>> by_name("torus2d"), by_name("Torus2D")
    (Torus2D(grid=None, both_ways=False), Torus2D(grid=None, both_ways=False))
    """
    for key, algorithm in ALGORITHMS.items():
        if name in {key, algorithm.__name__}:
            return algorithm()
    for key, home in POLICIES.items():
        module, _, policy = home.rpartition(".")
        if name in {key, policy}:
            return cast("Algorithm", getattr(import_module(module), policy)())
    offered = ", ".join(sorted({*ALGORITHMS, *POLICIES}))
    raise UsageError(f"no algorithm is called {name!r}: choose one of {offered}")


def candidates(collective: str, ranks: int, root: int = 0) -> dict[str, Schedule]:
    """Return the schedules of `collective` that take `ranks` ranks, by name.

    Equal arguments give the same objects. Raises `UsageError` for an unknown collective, listing
    all, and for a root outside the ranks.

    >>> list(candidates("all_gather", 4)), list(candidates("all_gather", 6))
    (['ring', 'doubling', 'bruck', 'direct'], ['ring', 'bruck', 'direct'])
    """
    if collective not in COLLECTIVES:
        raise UsageError(
            f"no collective is called {collective!r}: choose one of"
            f" {', '.join(sorted(COLLECTIVES))}"
        )
    require_root(ranks, root, collective)
    given = (ranks, root) if collective in ROOTED else (ranks,)
    found = {}
    for name, build in COLLECTIVES[collective].items():
        with suppress(UsageError):  # it takes other rank counts only
            found[name] = build(*given)
    return found
