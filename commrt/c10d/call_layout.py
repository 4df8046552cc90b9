# SPDX-License-Identifier: Apache-2.0
"""Where the pieces of a call lie, in slots of the wire and in its rows: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from commrt.c10d.call import Piece

Layout = Literal["nothing", "whole", "own", "each", "joined"]
"""What the rows of one side of a call hold.

``nothing``: there are none; ``whole``: the wire's only slot, in place if both sides are that;
``own``: this rank's piece; ``each``: one row for each slot; ``joined``: one row, with all pieces.
"""


def places(layout: Layout, rank: int, slots: int, numel: int) -> tuple[Piece, ...]:
    """Return where pieces of `numel` elements of the wire lie in rows of `layout`."""
    if layout == "nothing":
        return ()
    if layout == "own":
        return (Piece(rank, 0, 0),)
    if layout == "joined":
        return tuple(Piece(slot, 0, slot * numel) for slot in range(slots))
    return tuple(Piece(slot, slot, 0) for slot in range(slots))


def exchange_places(
    rank: int, sent: Sequence[int], received: Sequence[int]
) -> tuple[tuple[int, ...], tuple[Piece, ...], tuple[Piece, ...]]:
    """Return the sizes of all slots of an all-to-all, and where the pieces of its two sides lie.

    `sent` and `received` are the sizes of this rank's rows. What it sends itself does not travel.
    """
    ranks = len(sent)
    sizes = [0] * (ranks * ranks)
    sizes[rank::ranks] = received
    sizes[rank * ranks : (rank + 1) * ranks] = sent
    sizes[rank * ranks + rank] = 0
    others = [peer for peer in range(ranks) if peer != rank]
    put = tuple(Piece(rank * ranks + peer, peer, 0) for peer in others)
    take = tuple(Piece(peer * ranks + rank, peer, 0) for peer in others)
    return tuple(sizes), put, take
