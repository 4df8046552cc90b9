# SPDX-License-Identifier: Apache-2.0
"""The wish to stop, which ranks that gossip pass on until all know it; values without a state."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commrt.buckets.riders import SLOT, Leaving


class Stop(NamedTuple):
    """The wish of rank `asker` that all stop after `step`."""

    step: int
    asker: int

    def leaving(self) -> Leaving:
        """Return the slot of numbers that rides with a message, and tells its receiver."""
        slot = np.zeros((), SLOT)
        slot["present"], slot["stop_at"], slot["asker"] = 1, *self
        return Leaving(slot)


NO_STOP = Stop(1 << 32, -1)
