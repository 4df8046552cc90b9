# SPDX-License-Identifier: Apache-2.0
"""What a rank reads and writes to signal its peers and to wait for theirs, as data.

A kernel of the rank's GPU does what a plan says (`commrt.kernels.device.signal_wait`), and
`commrt.transport.signals` makes plans, and reads and writes the words in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

ABORT = 0
"""Word in host memory that the host writes: not 0 to give up."""
TIMEOUT_NS = 1
"""Word that the host writes: the deadline of each wait."""
FAILED = 2
"""Word that the GPU writes: the number of the plan that failed times `MOST_RANKS`, plus 1 and the
rank of the peer that did not come.
"""
ENDED = 3
"""Word that the GPU writes: how many programs have ended."""
HOST_WORDS = (ABORT, TIMEOUT_NS, FAILED, ENDED)
MOST_RANKS = 1 << 20
BACK = 1 << 30
"""How far back a rank goes when its wait fails, so that its peers read no more of it."""


class SignalWaitPlan(NamedTuple):
    """A rank signals its position to each peer, then waits until each has signalled one far enough.

    Positions are int32 and count on from program to program; they wrap, and are compared by their
    difference.

    A rank whose wait fails signals to all peers a position `BACK` behind, because the kernels after
    it overwrite what the rank said was ready. If a peer has gone back, a rank fails before it
    signals anything: the kernels before it may have read what that peer overwrote. So data of a
    rank whose waits all went well is right.
    """

    outboxes: Sequence[Tensor]
    """By peer, int32 [1] in the peer's memory: what this rank signals."""
    inboxes: Sequence[Tensor]
    """By peer, int32 [1]: what the peer signals."""
    counts: Sequence[Tensor]
    """By peer, int32 [1]: from where both count."""
    ranks: Sequence[int]
    """By peer, its rank."""
    needs: Sequence[int]
    """By peer, how far it must be, from `counts` on; 0 if it does not matter."""
    state: Tensor
    """int32 [2]: not 0 once a wait failed: later plans do nothing; programs that have ended."""
    host: Tensor
    """int64 [4] in host memory, see `HOST_WORDS`."""
    position: int
    """What is signalled, from `counts` on."""
    last: int
    """How far `counts` move at the end of a program; 0 in all plans but the last."""
    number: int
    """Says in errors which plan of a program it was."""
    checks_abort: bool = False
    """True if the host may have given up what comes before: then nothing is signalled."""
