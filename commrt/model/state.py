# SPDX-License-Identifier: Apache-2.0
"""A model's tensors as plain bytes: to send them, and to compare replicas bit by bit."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from pickle import PicklingError, UnpicklingError
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from commrt.errors import UsageError
from commrt.membership.store_client import MALFORMED

__all__ = ["Stateful", "batches", "dump", "fingerprint", "flatten", "load", "restore", "unread_buffers"]

PLAIN = (bool, int, float, complex, str, Tensor, type(None))


@runtime_checkable
class Stateful(Protocol):
    """An optimizer, a scheduler, a `GradScaler`: what can give its state and take another's."""

    def state_dict(self) -> dict[str, Any]:
        """All that matters of it."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Become as the one that gave `state_dict`."""
        ...


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all `tensors`, whatever their dtypes, as one row of bytes."""
    with torch.no_grad():
        runs = [list(run) for _, run in groupby(tensors, key=lambda tensor: tensor.dtype)]
        rows = [_flatten_dense_tensors(run).view(torch.uint8) for run in runs]  # type: ignore[no-untyped-call]  # torch's own
    return rows[0] if len(rows) == 1 < len(runs[0]) else torch.cat(rows)  # that of one tensor would be a view


@torch.inference_mode(False)
def restore(flat: Tensor, tensors: Sequence[Tensor], unread: frozenset[int] = frozenset()) -> None:
    """Overwrite `tensors` with the bytes that `flatten` made of others like them, where they differ.

    A graph that saved one of them then cannot run backward any more, as after any other write in place: autograd
    says so. It does not notice that those whose ids are in `unread` are written to. On a GPU the others are waited for,
    once if nothing differs.
    """
    pairs = list(zip(tensors, torch.split(flat, [t.nbytes for t in tensors]), strict=True))
    for tensor, part in (pair for pair in pairs if id(pair[0]) in unread):
        tensor.data.copy_(_like(part, tensor))
    read = [pair for pair in pairs if id(pair[0]) not in unread]
    there = flat if len(read) == len(pairs) else torch.cat([part for _, part in read] or [flat[:0]])
    if read and not torch.equal(flatten([tensor for tensor, _ in read]), there):
        _overwrite_where_different(read)


def _overwrite_where_different(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, part in pairs:
        if not torch.equal(flatten([tensor]), part):
            with torch.no_grad():
                tensor.copy_(_like(part, tensor))


def unread_buffers(model: nn.Module) -> frozenset[int]:
    """The ids of buffers that a graph saves and does not read: what BatchNorm counts while it trains."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm) and module.training)
    return frozenset(id(buffer) for norm in norms for buffer in norm.buffers(recurse=False))


def _like(part: Tensor, tensor: Tensor) -> Tensor:
    return part.clone().view(tensor.dtype).view(tensor.shape)


def dump(owners: Sequence[Stateful]) -> Tensor:
    """The state of all `owners` as one row of bytes, an empty one if it cannot be written; costs a copy of the state.

    An optimizer's settings that are no plain values, such as functions, are left out.
    """
    file = io.BytesIO()
    try:
        torch.save([_plain(_without_objects(owner.state_dict())) for owner in owners], file)
    except (PicklingError, AttributeError, TypeError):  # what pickle says of functions and locks
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


@torch.inference_mode(False)  # or what is loaded cannot be stepped later
def load(flat: Tensor, owners: Sequence[Stateful]) -> None:
    """Give `owners` what `dump` took from others like them; raises `UsageError` if that is more than plain values.

    Nothing of it is run. Raises `UsageError`, too, for what an owner does not take.
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
            _take(state, owner)
        except UsageError:
            raise
        except MALFORMED as error:
            what = f"{type(owner).__name__} does not take the state that another rank sent: {error!r:.200}"
            raise UsageError(f"{what}; make it of the same parameters and options on all ranks") from error


def _take(state: dict[str, Any], owner: Stateful) -> None:
    owner.load_state_dict(_with_objects(state, owner))
    if isinstance(owner, Optimizer):
        _keep_dtypes(owner, state)


def _keep_dtypes(optimizer: Optimizer, sent: dict[str, Any]) -> None:
    """Torch casts what an optimizer keeps to its parameter's dtype; master weights, for one, have their own."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    places = [place for group in sent["param_groups"] for place in group["params"]]
    for param, place in zip(params, places, strict=True):
        for key, value in sent["state"].get(place, {}).items():
            now = optimizer.state[param].get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                optimizer.state[param][key] = value.to(now.device, copy=True)


def _without_objects(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer without settings that only their own process understands."""
    if "param_groups" not in state:
        return state
    groups = [{key: value for key, value in group.items() if _is_plain(value)} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def _with_objects(state: dict[str, Any], owner: Stateful) -> dict[str, Any]:
    """`state` with what `_without_objects` left out, as `owner` has it."""
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
    """`value` with numbers of numpy, which no rank would load, as Python's; containers of other types as they are."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: _plain(part) for key, part in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(map(_plain, value))
    return value


def batches(tensors: Sequence[Tensor], nbytes: int) -> Iterator[list[Tensor]]:
    """`tensors` in order, cut where a batch reaches `nbytes`."""
    batch: list[Tensor] = []
    room = nbytes
    for tensor in tensors:
        batch.append(tensor)
        room -= tensor.nbytes
        if room <= 0:
            yield batch
            batch, room = [], nbytes
    if batch:
        yield batch


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over names and bytes of all parameters and buffers; equal exactly if they are bitwise equal."""
    seen = hashlib.sha256()
    for kind in (model.named_parameters(), model.named_buffers()):
        for name, tensor in kind:
            seen.update(name.encode())
            seen.update(flatten([tensor]).cpu().numpy().tobytes())
    return seen.hexdigest()
