# SPDX-License-Identifier: Apache-2.0
"""Turn a model's tensors and the state of optimizers into bytes: to send them, and to compare replicas bit by bit."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pickle import PicklingError, UnpicklingError
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from commrt.errors import UsageError
from commrt.store.client import MALFORMED

__all__ = [
    "Stateful",
    "batches",
    "digest",
    "dump",
    "fingerprint",
    "flatten",
    "load",
    "own_residuals",
    "restore",
    "unread_buffers",
]

PLAIN = (bool, int, float, complex, str, Tensor, type(None))


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state and takes another's: an optimizer, a scheduler, a `GradScaler`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take the state `state_dict`."""
        ...


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of all `tensors`, whatever their dtypes, as one tensor of bytes."""
    with torch.no_grad():
        runs = [list(run) for _, run in groupby(tensors, key=lambda tensor: tensor.dtype)]
        parts = [_flatten_dense_tensors(run).view(torch.uint8) for run in runs]  # type: ignore[no-untyped-call]  # torch's own
    return parts[0] if len(parts) == 1 < len(runs[0]) else torch.cat(parts)  # that of one tensor would be a view


@torch.inference_mode(False)
def restore(flat: Tensor, tensors: Sequence[Tensor], unread: frozenset[int] = frozenset()) -> None:
    """Overwrite those of `tensors` that differ from `flat`, the bytes that `flatten` made of tensors like them.

    Autograd then refuses to run a graph backward that saved one of them, as after any write in place. It does not
    notice writes to tensors whose ids are in `unread`. On a GPU this waits for the other tensors, once if nothing
    differs.
    """
    pairs = list(zip(tensors, torch.split(flat, [t.nbytes for t in tensors]), strict=True))
    read = [pair for pair in pairs if id(pair[0]) not in unread]
    for tensor, part in pairs:
        if id(tensor) in unread:
            tensor.data.copy_(_like(part, tensor))
    expected = flat if len(read) == len(pairs) else torch.cat([part for _, part in read] or [flat[:0]])
    if read and not torch.equal(flatten([tensor for tensor, _ in read]), expected):
        with torch.no_grad():
            for tensor, part in read:
                if not torch.equal(flatten([tensor]), part):
                    tensor.copy_(_like(part, tensor))


def _like(part: Tensor, tensor: Tensor) -> Tensor:
    return part.clone().view(tensor.dtype).view(tensor.shape)


def unread_buffers(model: nn.Module) -> frozenset[int]:
    """Return the ids of buffers that a graph saves and does not read: what BatchNorm counts while it trains."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm) and module.training)
    return frozenset(id(buffer) for norm in norms for buffer in norm.buffers(recurse=False))


def dump(owners: Sequence[Stateful]) -> Tensor:
    """Return the state of all `owners` as one tensor of bytes, an empty one if it cannot be written.

    An optimizer's settings that are no plain values, such as functions, are left out. Costs a copy of the state.
    """
    file = io.BytesIO()
    try:
        torch.save([_plain(_without_objects(owner.state_dict())) for owner in owners], file)
    except (PicklingError, AttributeError, TypeError):  # what pickle raises for functions and locks
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


@torch.inference_mode(False)  # or what is loaded could not be stepped later
def load(flat: Tensor, owners: Sequence[Stateful]) -> None:
    """Give `owners` the state that `dump` took from others like them; runs nothing of what it reads.

    Raises `UsageError` for a state of other than plain values, and for one that an owner does not take.
    """
    try:
        states = torch.load(io.BytesIO(flat.numpy().data), map_location="cpu", weights_only=True)
    except (UnpicklingError, EOFError, RuntimeError, *MALFORMED) as error:
        kinds = ", ".join(type(owner).__name__ for owner in owners)
        raise UsageError(
            f"the state of {kinds} cannot be sent to other ranks: state_dict() must hold numbers, strings, tensors and "
            "lists, tuples or dicts of these only"
        ) from error
    if not isinstance(states, list) or len(states) != len(owners):
        raise UsageError(f"another rank sent no states of {len(owners)} owners: start all ranks with the same program")
    for owner, state in zip(owners, states, strict=True):
        try:
            owner.load_state_dict(_with_objects(state, owner))
            if isinstance(owner, Optimizer) and "param_groups" in state:  # one that wraps another may have none
                _keep_dtypes(owner, state)
        except UsageError:
            raise
        except MALFORMED as error:
            what = f"{type(owner).__name__} does not take the state that another rank sent: {error!r:.200}"
            raise UsageError(f"{what}; make it of the same parameters and options on all ranks") from error


def _keep_dtypes(optimizer: Optimizer, sent: dict[str, Any]) -> None:
    """Undo torch's cast of an optimizer's state to its parameter's dtype: master weights, for one, have their own."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    places = [place for group in sent["param_groups"] for place in group["params"]]
    for param, place in zip(params, places, strict=True):
        for key, value in sent["state"].get(place, {}).items():
            now = optimizer.state[param].get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                optimizer.state[param][key] = value.to(now.device, copy=True)


def _without_objects(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer without settings that only their own process understands."""
    if "param_groups" not in state:
        return state
    groups = [{key: value for key, value in group.items() if _is_plain(value)} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def _with_objects(state: dict[str, Any], owner: Stateful) -> dict[str, Any]:
    """Return `state` with the settings of `owner` that `_without_objects` left out."""
    if "param_groups" not in state:
        return state
    own_groups = owner.state_dict()["param_groups"]
    if len(own_groups) != len(state["param_groups"]):
        raise UsageError(
            f"{type(owner).__name__} has {len(own_groups)} param_groups here and {len(state['param_groups'])} on the "
            "rank whose state this one takes: add_param_group() at the same update (replica.step) of all ranks"
        )
    pairs = zip(own_groups, state["param_groups"], strict=True)
    groups = [{**{key: value for key, value in own.items() if not _is_plain(value)}, **sent} for own, sent in pairs]
    return {**state, "param_groups": groups}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, (*PLAIN, np.generic))


def _plain(value: Any) -> Any:
    """Return `value` with numpy's numbers, which no rank would load, as Python's; other types of containers stay."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: _plain(part) for key, part in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(map(_plain, value))
    return value


def own_residuals(state: object, rank: int, wanted: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return what `rank` owes by a replica's `state`, for the `wanted` parameters of a wire with feedback.

    Raises `UsageError` if another rank saved it, or another model.
    """
    found = state.get("residuals") if isinstance(state, Mapping) else None
    if not isinstance(state, Mapping) or not found or not wanted:
        return {}
    if state.get("rank") != rank:
        raise UsageError(
            f"the state of rank {state.get('rank')} on rank {rank}: with feedback each rank keeps what rounding lost "
            "there. Save state_dict() on every rank, and load each rank's own; or set its 'residuals' to {} to forget "
            "what was lost"
        )
    for name, part in wanted.items():
        if (tensor := found.get(name)) is not None and tensor.numel() != part.numel():
            raise UsageError(
                f"the state's residual of {name} has {tensor.numel()} values and the parameter {part.numel()}: load a "
                "state that was saved with the same model"
            )
    return cast("Mapping[str, Tensor]", found)


def batches(tensors: Sequence[Tensor], nbytes: int) -> Iterator[list[Tensor]]:
    """Yield `tensors` in order, in lists that end when they reach `nbytes`."""
    batch: list[Tensor] = []
    left = nbytes
    for tensor in tensors:
        batch.append(tensor)
        left -= tensor.nbytes
        if left <= 0:
            yield batch
            batch, left = [], nbytes
    if batch:
        yield batch


def digest(tensors: Sequence[Tensor]) -> str:
    """Return the SHA-256 over the bytes of `tensors`."""
    seen = hashlib.sha256()
    for tensor in tensors:
        seen.update(flatten([tensor]).cpu().numpy().tobytes())
    return seen.hexdigest()


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 over names and bytes of parameters and buffers: equal exactly if these are bitwise equal."""
    seen = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        seen.update(name.encode())
        seen.update(flatten([tensor]).cpu().numpy().tobytes())
    return seen.hexdigest()
