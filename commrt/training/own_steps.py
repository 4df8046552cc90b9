# SPDX-License-Identifier: Apache-2.0
"""How many steps a rank has made alone between exchanges, and what they weigh; values only.

`AfterStepReplica` adds them up, local SGD looks what is new since weights left last.
"""

from __future__ import annotations

from typing import NamedTuple


class OwnSteps(NamedTuple):
    """How many steps, how many of them were weighed, and what these weigh together."""

    steps: int = 0
    weighed_steps: int = 0
    weight: float = 0.0

    def since(self, before: tuple[int, int, float]) -> OwnSteps:
        """Return what came since it was `before`."""
        return OwnSteps(
            self.steps - before[0], self.weighed_steps - before[1], self.weight - before[2]
        )

    def plus(self, more: OwnSteps) -> OwnSteps:
        """Return the sum of both."""
        return OwnSteps(
            self.steps + more.steps,
            self.weighed_steps + more.weighed_steps,
            self.weight + more.weight,
        )


NO_STEPS = OwnSteps()
ONE_STEP = OwnSteps(1)
