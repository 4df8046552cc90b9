# SPDX-License-Identifier: Apache-2.0
"""Bring texts of all ranks together, over the store of the world."""

from __future__ import annotations

import commrt

__all__ = ["gather", "gather_on_first"]


def gather(world: commrt.World, topic: str, text: str) -> dict[int, str]:
    """Return the text of every rank that is left, by rank; collective."""
    return _texts(world, topic, text, is_reader=True)


def gather_on_first(world: commrt.World, topic: str, text: str) -> list[str] | None:
    """Return the texts of all ranks that are left on the first of them, None on the others;
    collective.
    """
    is_first = world.rank == world.members[0]
    texts = _texts(world, topic, text, is_first)
    return [*texts.values()] if is_first else None


def _texts(world: commrt.World, topic: str, text: str, is_reader: bool) -> dict[int, str]:
    world.store.set(f"{topic}/{world.rank}", text)
    world.agree(topic)  # returns when all ranks have written
    ranks = world.members if is_reader else ()
    texts = {rank: world.store.get(f"{topic}/{rank}").decode() for rank in ranks}
    world.agree(f"{topic} read")  # rank 0 may hold the store
    return texts
