# SPDX-License-Identifier: Apache-2.0
"""Schedules that users force by name, in COMMRT_SCHEDULES, COMMRT_SAME_BITS and ``--schedule``.

Pure functions of text, which need no torch and do not read the environment.
"""

from __future__ import annotations

from commrt.algorithms.catalogue import COLLECTIVES, SUMS, candidates
from commrt.errors import UsageError
from commrt.schedule import Schedule


def require_candidate(collective: str, name: str, ranks: int, root: int = 0) -> Schedule:
    """Return the schedule `name`; raises `UsageError` if `collective` has none for `ranks`."""
    offered = candidates(collective, ranks, root)
    if name not in offered:
        known = (
            f"does not take {ranks} ranks" if name in COLLECTIVES[collective] else "is not known"
        )
        raise UsageError(
            f"the schedule {name!r} of {collective} {known}: choose one of {', '.join(offered)}"
        )
    return offered[name]


def parse_forced(text: str, *, same_bits: bool = False) -> dict[str, str]:
    """Return the schedules that a text such as "all_reduce=ring,broadcast=tree" names.

    Raises `UsageError`. With `same_bits` every sum is direct: of all that add all elements in one
    order, only this one is offered for every collective and adds alike in each, in order of ranks.

    >>> parse_forced("all_reduce=ring, broadcast=tree")
    {'all_reduce': 'ring', 'broadcast': 'tree'}
    >>> parse_forced("broadcast=tree", same_bits=True)
    {'broadcast': 'tree', 'all_reduce': 'direct', 'reduce': 'direct', 'reduce_scatter': 'direct'}
    """
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    forced = {collective.strip(): name.strip() for collective, _, name in pairs}
    for collective, name in forced.items():
        if name not in COLLECTIVES.get(collective, {}):
            offered = COLLECTIVES.get(collective) or COLLECTIVES
            raise UsageError(
                f"{collective}={name} in {text!r:.200} is not known: write collective=schedule,"
                f" with one of {', '.join(offered)}"
            )
    for collective in SUMS if same_bits else ():
        if forced.setdefault(collective, "direct") != "direct":
            raise UsageError(
                f"COMMRT_SAME_BITS with {collective}={forced[collective]}: sums are direct then;"
                " unset one of them"
            )
    return forced
