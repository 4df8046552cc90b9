# SPDX-License-Identifier: Apache-2.0
"""How the torch.distributed backend cuts the buffer of a collective: into pieces, and in slices.

Pure functions, which need no torch.
"""

from __future__ import annotations

WIRE_NBYTES = {"cpu": 4 << 20, "cuda": 16 << 20}
"""Most bytes of a slice on the wire, over all slots, by device; in an all-to-all, each way."""
ALIGNMENT_NBYTES = 256


def slots_of(collective: str, ranks: int) -> int:
    """Return how many pieces the buffer of a collective has.

    >>> [slots_of(collective, 4) for collective in ("broadcast", "all_gather", "all_to_all")]
    [1, 4, 16]
    """
    if collective in {"all_reduce", "broadcast", "reduce"}:
        return 1
    return ranks * ranks if collective == "all_to_all" else ranks


def slice_nbytes(collective: str, ranks: int, device: str) -> int:
    """Return the bytes of each piece that travel at once: alike on all ranks, whole in all dtypes.

    >>> slice_nbytes("all_reduce", 4, "cpu"), slice_nbytes("all_gather", 4, "cpu")
    (4194304, 1048576)
    """
    pieces = 1 if slots_of(collective, ranks) == 1 else ranks
    return max(WIRE_NBYTES[device] // pieces // ALIGNMENT_NBYTES, 1) * ALIGNMENT_NBYTES
