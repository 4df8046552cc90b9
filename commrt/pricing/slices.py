# SPDX-License-Identifier: Apache-2.0
"""How the torch.distributed backend cuts the buffer of a collective: into pieces, and in slices.

This is the definition: `commrt.c10d` cuts by it, so a change here changes what ranks send, and
prices follow. It stands in this room since those who price may need no torch. Pure functions.
"""

from __future__ import annotations

WIRE_NBYTES = {"cpu": 4 << 20, "cuda": 16 << 20}
"""Most bytes of a slice on the wire, over all slots, by device; in an all-to-all, each way."""
ALIGNMENT_NBYTES = 256
"""Slices are multiples of it: whole elements, in all dtypes."""


def slots_of(collective: str, ranks: int) -> int:
    """Return how many pieces the buffer of a collective has.

    >>> [slots_of(collective, 4) for collective in ("broadcast", "all_gather", "all_to_all")]
    [1, 4, 16]
    """
    if collective in {"all_reduce", "broadcast", "reduce"}:
        return 1
    return ranks * ranks if collective == "all_to_all" else ranks


def slice_nbytes(collective: str, ranks: int, device: str) -> int:
    """Return how many bytes of each piece travel at once; alike on all ranks.

    >>> slice_nbytes("all_reduce", 4, "cpu"), slice_nbytes("all_gather", 4, "cpu")
    (4194304, 1048576)
    """
    used = min(slots_of(collective, ranks), ranks)  # an all-to-all uses a slot per peer, each way
    return max(WIRE_NBYTES[device] // used // ALIGNMENT_NBYTES, 1) * ALIGNMENT_NBYTES
