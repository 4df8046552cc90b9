# SPDX-License-Identifier: Apache-2.0
"""Before and after training: plan, simulate, draw, measure. No training job imports this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commrt.lazy import names_in

if TYPE_CHECKING:
    from commrt.tools.measuring.workload_of import workload_of
    from commrt.tools.planning.workload import Workload

_HOMES = {
    "commrt.tools.measuring.workload_of": ("workload_of",),
    "commrt.tools.planning.workload": ("Workload",),
}

__all__ = ["Workload", "workload_of"]

__getattr__ = names_in(__name__, _HOMES)
