# SPDX-License-Identifier: Apache-2.0
"""Where the pieces of a call lie, in slots of the wire and in its rows: pure functions.

A slot is a part of the wire. A row is one tensor of a side of the call: of what goes in, or of what
comes out. A piece is what a slot and a row have in common.
"""

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
        return (Piece(slot=rank, row=0, begin=0),)
    if layout == "joined":
        return tuple(Piece(slot, row=0, begin=slot * numel) for slot in range(slots))
    # "each"; "whole" is the same, of one slot
    return tuple(Piece(slot, row=slot, begin=0) for slot in range(slots))


def exchange_places(
    rank: int, sent: Sequence[int], received: Sequence[int]
) -> tuple[tuple[int, ...], tuple[Piece, ...], tuple[Piece, ...]]:
    """Return the sizes of all slots of an all-to-all, and where the pieces of its two sides lie.

    `sent` and `received` are the sizes of this rank's rows. What it sends itself does not travel.
    Slot ``sender * ranks + receiver`` is what the one sends the other.
    """
    ranks = len(sent)
    sizes = [0] * (ranks * ranks)
    sizes[rank::ranks] = received
    sizes[rank * ranks : (rank + 1) * ranks] = sent
    sizes[rank * ranks + rank] = 0
    others = [peer for peer in range(ranks) if peer != rank]
    put = tuple(Piece(rank * ranks + peer, row=peer, begin=0) for peer in others)
    take = tuple(Piece(peer * ranks + rank, row=peer, begin=0) for peer in others)
    return tuple(sizes), put, take
