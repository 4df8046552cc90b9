# SPDX-License-Identifier: Apache-2.0
"""How many steps a rank has made alone between exchanges, and what they weigh; values only.

`AfterStepReplica` adds them up, local SGD looks what is new since weights left last.
"""

from __future__ import annotations

from typing import NamedTuple


class OwnSteps(NamedTuple):
    """How many steps, how many of them were weighed, and what these weigh together; and how often
    optimizers have stepped, which may be more than once with the same gradients.
    """

    steps: int = 0
    weighed_steps: int = 0
    weight: float = 0.0
    updates: int = 0

    def since(self, before: OwnSteps) -> OwnSteps:
        """Return what came since it was `before`."""
        return OwnSteps(
            self.steps - before.steps,
            self.weighed_steps - before.weighed_steps,
            self.weight - before.weight,
            self.updates - before.updates,
        )

    def plus(self, more: OwnSteps) -> OwnSteps:
        """Return the sum of both."""
        return OwnSteps(
            self.steps + more.steps,
            self.weighed_steps + more.weighed_steps,
            self.weight + more.weight,
            self.updates + more.updates,
        )


NO_STEPS = OwnSteps()
ONE_STEP = OwnSteps(1)
ONE_UPDATE = OwnSteps(updates=1)
