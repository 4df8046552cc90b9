# SPDX-License-Identifier: Apache-2.0
"""Local SGD beside the best plan of a step: whether it helps there, and with which period.

Prices; nothing runs or is changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from commrt.pricing.cluster import Cluster
from commrt.quantizer import QUANTIZERS
from commrt.tools.planning.local_steps import LocalSteps, hiding_period
from commrt.tools.planning.planner import Plan
from commrt.tools.planning.python_calls import PYTHON_WIRES, python_call
from commrt.tools.planning.wires import WirePricing

EXPOSED = 0.2
"""If more of the best step is exposed, local SGD is named too."""
SHORTEST_PERIOD = 16
LONGEST_PERIOD = 512
"""The periods that are named."""


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """Local SGD that hides its whole exchange."""

    python: str
    """The call that makes it."""
    period: int
    delay: int
    step_s: float
    """Mean time of a step."""


def local_plan(best: Plan, cluster: Cluster, ranks: int) -> LocalPlan | None:
    """Return what hides the exchange of `best` with least delay; None if a step exposes little."""
    if best.compute_s is None or best.efficiency is None or best.efficiency >= 1 - EXPOSED:
        return None
    schedule = best.algorithm.schedule(0, ranks)
    pricing = WirePricing(schedule, cluster, QUANTIZERS.get(best.wire or ""))
    priced = LocalSteps.priced(pricing, best.nbytes, best.compute_s, SHORTEST_PERIOD)
    steps = hiding_period(priced, LONGEST_PERIOD)
    if steps is None or steps.hiding_delay is None:
        return None
    delay = steps.hiding_delay
    wire = f", wire={PYTHON_WIRES[best.wire]}" if best.wire in PYTHON_WIRES else ""
    given = f"period={steps.period}, delay={delay}, inner={python_call(best.algorithm)}{wire}"
    python = f"commrt.LocalSGD({given})"
    return LocalPlan(python, steps.period, delay, steps.step_s(delay))
