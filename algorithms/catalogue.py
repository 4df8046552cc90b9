# SPDX-License-Identifier: Apache-2.0
"""Algorithms and schedules by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import cast

from commrt.algorithms import bruck, chain, direct, double_tree, halving_doubling, ring, tree
from commrt.algorithms.direct import Direct
from commrt.algorithms.double_tree import DoubleTree
from commrt.algorithms.halving_doubling import HalvingDoubling
from commrt.algorithms.parts import require_root
from commrt.algorithms.ring import Ring, Rings
from commrt.algorithms.torus import Torus2D
from commrt.errors import UsageError
from commrt.schedule import Algorithm, Schedule

GOSSIP = "gossip"
DIRECT = "direct"
POLICIES = {
    GOSSIP: "commrt.algorithms.gossip.Gossip",
    "backup": "commrt.backup_workers.policy.BackupWorkers",
    "local": "commrt.local_sgd.policy.LocalSGD",
}
"""Other ways to train by name: options, which are imported when they are asked for."""

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "ring": Ring,
    "rings": Rings,
    "halving_doubling": HalvingDoubling,
    "double_tree": DoubleTree,
    "torus2d": Torus2D,
    DIRECT: Direct,
}
"""Constructors of the all-reduces by name; each works without arguments."""


def by_name(name: str) -> Algorithm:
    """Return the algorithm called `name`, or of the class of that name, with its defaults.

    Raises `UsageError` that lists the names.

    >>> by_name("torus2d"), by_name("Torus2D")
    (Torus2D(grid=None, both_ways=False), Torus2D(grid=None, both_ways=False))
    """
    for key, algorithm in ALGORITHMS.items():
        if name in {key, cast("type", algorithm).__name__}:
            return algorithm()
    for key, home in POLICIES.items():
        module, _, policy = home.rpartition(".")
        if name in {key, policy}:
            return cast("Algorithm", getattr(import_module(module), policy)())
    offered = ", ".join(sorted({*ALGORITHMS, *POLICIES}))
    raise UsageError(f"no algorithm is called {name!r}: choose one of {offered}")


COLLECTIVES: Mapping[str, Mapping[str, Callable[..., Schedule]]] = {
    "broadcast": {
        "tree": tree.broadcast,
        "direct": direct.broadcast,
        "chain": chain.broadcast,
        "scatter_gather": tree.broadcast_in_parts,
    },
    "reduce": {
        "tree": tree.reduce,
        "direct": direct.reduce,
        "chain": chain.reduce,
        "scatter_gather": tree.reduce_in_parts,
    },
    "gather": {"tree": tree.gather, "direct": direct.gather},
    "scatter": {"tree": tree.scatter, "direct": direct.scatter},
    "all_gather": {
        "ring": ring.all_gather,
        "doubling": halving_doubling.all_gather,
        "bruck": bruck.all_gather,
        "direct": direct.all_gather,
    },
    "reduce_scatter": {
        "ring": ring.reduce_scatter,
        "halving": halving_doubling.reduce_scatter,
        "bruck": bruck.reduce_scatter,
        "direct": direct.reduce_scatter,
    },
    "all_reduce": {
        "ring": ring.all_reduce,
        "halving_doubling": halving_doubling.all_reduce,
        "torus2d": partial(Torus2D().schedule, 0),
        "doubling": halving_doubling.doubling,
        "double_tree": double_tree.all_reduce,
        "direct": direct.all_reduce,
        "one_shot": direct.one_shot,
    },
    "all_to_all": {"pairwise": direct.pairwise_all_to_all, "direct": direct.all_to_all},
    "barrier": {"dissemination": bruck.barrier},
}
"""For each collective its schedules by name, as functions of the ranks, and of the root for those
of `ROOTED`.
"""
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})


def candidates(collective: str, ranks: int, root: int = 0) -> dict[str, Schedule]:
    """Return the schedules of `collective` that take `ranks` ranks, by name; equal arguments give
    the same objects.

    Raises `UsageError` for an unknown collective, listing all, and for a root outside the ranks.

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
