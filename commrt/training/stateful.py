# SPDX-License-Identifier: Apache-2.0
"""States of optimizers, schedulers and scalers: who has one, and as a tensor of bytes and back.

The bytes are for other ranks. `load` changes the owners of states, and runs nothing that it reads.
On the thread that trains; sends nothing.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from itertools import repeat
from pickle import PicklingError, UnpicklingError
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from commrt.errors import UsageError
from commrt.store.parsing import MALFORMED

PLAIN = (bool, int, float, complex, str, Tensor, type(None), np.generic)


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state and takes another's: an optimizer, scheduler, `GradScaler`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take the state `state_dict`."""


def check_stateful(owners: Sequence[object], call: str = "join()") -> None:
    """Raise `UsageError` for an object without a state to send, given to `call`."""
    if not isinstance(owners, Iterable):
        raise UsageError(f"{call} takes a list, not a {type(owners).__name__}: put it into one")
    for owner in owners:
        if not isinstance(owner, Stateful):
            raise UsageError(
                f"{call} was given a {type(owner).__name__}, which has no state_dict() and"
                " load_state_dict(): pass learning rate schedulers, a GradScaler and the like"
            )


def dump(owners: Sequence[Stateful]) -> Tensor:
    """Return the state of all `owners` as one tensor of bytes, empty if it cannot be written.

    An optimizer's settings that are no plain values, such as functions, are left out. Costs a copy.
    """
    file = io.BytesIO()
    try:
        states = [_without_objects(owner.state_dict()) for owner in owners]
        # no rank would load numbers of numpy
        torch.save(tree_map_only(np.generic, np.generic.item, states), file)
    except (PicklingError, AttributeError, TypeError):  # what pickle raises for functions and locks
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


@torch.inference_mode(False)  # or what is loaded could not be stepped later
def load(flat: Tensor, owners: Sequence[Stateful]) -> None:
    """Give `owners` the state that `dump` took from others like them; runs nothing that it reads.

    Raises `UsageError` for a state of other than plain values, or one that an owner does not take.
    """
    try:
        states = torch.load(io.BytesIO(flat.numpy().data), map_location="cpu", weights_only=True)
    except (UnpicklingError, EOFError, RuntimeError, *MALFORMED) as error:
        kinds = ", ".join(type(owner).__name__ for owner in owners)
        raise UsageError(
            f"the state of {kinds} cannot be sent to other ranks: state_dict() must hold numbers,"
            " strings, tensors and lists, tuples or dicts of these only"
        ) from error
    if not isinstance(states, list) or len(states) != len(owners):
        raise UsageError(
            f"another rank sent no states of {len(owners)} owners: start all ranks with the same"
            " program"
        )
    for owner, state in zip(owners, states, strict=True):
        try:
            owner.load_state_dict(_with_objects(state, owner))
            # an optimizer that wraps another may have none
            if isinstance(owner, Optimizer) and "param_groups" in state:
                _keep_dtypes(owner, state)
        except UsageError:
            raise
        except MALFORMED as error:
            what = (
                f"{type(owner).__name__} does not take the state that another rank sent:"
                f" {error!r:.200}"
            )
            raise UsageError(
                f"{what}; make it of the same parameters and options on all ranks"
            ) from error


def _keep_dtypes(optimizer: Optimizer, sent: dict[str, Any]) -> None:
    """Undo torch's cast of optimizer state to the parameter's dtype, such as of fp32 masters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    places = [place for group in sent["param_groups"] for place in group["params"]]
    for param, place in zip(params, places, strict=True):
        for key, value in sent["state"].get(place, {}).items():
            now = optimizer.state[param].get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                optimizer.state[param][key] = value.to(now.device, copy=True)


def _without_objects(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state without settings that only their own process understands."""
    if "param_groups" not in state:
        return state
    groups = [
        {key: value for key, value in group.items() if _is_plain(value)}
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


def _with_objects(state: dict[str, Any], owner: Stateful) -> dict[str, Any]:
    """Return `state` with the settings of `owner` that `_without_objects` left out."""
    if "param_groups" not in state:
        return state
    own_groups = owner.state_dict()["param_groups"]
    if len(own_groups) != len(state["param_groups"]):
        raise UsageError(
            f"{type(owner).__name__} has {len(own_groups)} param_groups here and"
            f" {len(state['param_groups'])} on the rank whose state this one takes:"
            " add_param_group() at the same update (replica.step) of all ranks"
        )
    pairs = zip(own_groups, state["param_groups"], strict=True)
    groups = [
        {**{key: value for key, value in own.items() if not _is_plain(value)}, **sent}
        for own, sent in pairs
    ]
    return {**state, "param_groups": groups}


def _is_plain(value: object) -> bool:
    return all(map(isinstance, tree_leaves(value), repeat(PLAIN)))
