# SPDX-License-Identifier: Apache-2.0
"""What rounding lost on one rank, as a checkpoint holds it: only that rank may load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from commrt.errors import UsageError


def own_residuals(state: object, rank: int, wanted: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the residuals of `rank` for `wanted` names; raise `UsageError` for another rank's."""
    found = state.get("residuals") if isinstance(state, Mapping) else None
    if not isinstance(state, Mapping) or not found or not wanted:
        return {}
    if state.get("rank") != rank:
        raise UsageError(
            f"the state of rank {state.get('rank')} on rank {rank}: with feedback each rank keeps"
            " what rounding lost there. Save state_dict() on every rank, and load each rank's own;"
            " or set its 'residuals' to {} to forget what was lost"
        )
    for name, part in wanted.items():
        if (tensor := found.get(name)) is not None and tensor.numel() != part.numel():
            raise UsageError(
                f"the state's residual of {name} has {tensor.numel()} values and the parameter"
                f" {part.numel()}: load a state that was saved with the same model"
            )
    return cast("Mapping[str, Tensor]", found)
