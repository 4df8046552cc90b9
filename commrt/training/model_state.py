# SPDX-License-Identifier: Apache-2.0
"""State of models and optimizers on one rank as bytes, to compare or send; sends nothing."""

from __future__ import annotations

import hashlib
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, groupby, repeat
from pickle import PicklingError, UnpicklingError
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from commrt.errors import UsageError
from commrt.store.parsing import MALFORMED, malformed, require
from commrt.transport.protocol import Allocate

T = TypeVar("T")
ALIGNMENT_NBYTES = 16
"""Each tensor of a `FlatBuffer` begins at a multiple of this, which suits every dtype."""
PLAIN = (bool, int, float, complex, str, Tensor, type(None), np.generic)


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state and takes another's: an optimizer, scheduler, `GradScaler`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take the state `state_dict`."""


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of all `tensors`, whatever their dtypes, as one tensor of bytes."""
    with torch.no_grad():
        runs = [list(run) for _, run in groupby(tensors, key=lambda tensor: tensor.dtype)]
        parts = [_flatten_dense_tensors(run).view(torch.uint8) for run in runs]  # type: ignore[no-untyped-call]  # torch's own
    # that of one tensor would be a view
    return parts[0] if len(parts) == 1 < len(runs[0]) else torch.cat(parts)


@torch.inference_mode(False)
def restore(flat: Tensor, tensors: Sequence[Tensor], unread: frozenset[int] = frozenset()) -> None:
    """Overwrite those of `tensors` that differ from `flat`, `flatten`'s bytes of tensors like them.

    Autograd then refuses to run a graph backward that saved one of them, as after any write in
    place. It does not notice writes to tensors whose ids are in `unread`. On a GPU this waits once
    if nothing differs, and else for each.
    """
    if torch.equal(flatten(tensors), flat):  # 5 ms for 5,000 small tensors; one by one 42
        return
    for tensor, part in zip(
        tensors, torch.split(flat, [each.nbytes for each in tensors]), strict=True
    ):
        if id(tensor) in unread or not torch.equal(flatten([tensor]), part):
            written = tensor.data if id(tensor) in unread else tensor.detach()
            written.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def unread_buffers(model: nn.Module) -> frozenset[int]:
    """Return ids of buffers that a graph saves but does not read: BatchNorm's while it trains."""
    norms = (
        module for module in model.modules() if isinstance(module, _BatchNorm) and module.training
    )
    return frozenset(id(buffer) for norm in norms for buffer in norm.buffers(recurse=False))


class FlatBuffer:
    """Memory from `allocate` that carries tensors like `like` step after step, as `flat`."""

    def __init__(self, like: Sequence[Tensor], allocate: Allocate) -> None:
        sizes = [-(-tensor.nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES for tensor in like]
        self._ends = [*accumulate(sizes, initial=0)]
        self.flat = allocate(self._ends[-1], torch.uint8, like[0].device)
        self._now = torch.zeros_like(self.flat)
        self.parts, self._own = (
            [
                flat[at : at + t.nbytes].view(t.dtype).view(t.shape)
                for at, t in zip(self._ends, like, strict=False)
            ]
            for flat in (self.flat, self._now)
        )

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy `tensors` into the buffer, in one launch per dtype."""
        self._copy(self.parts, tensors, range(len(tensors)))

    def empty(self, tensors: Sequence[Tensor], unread: frozenset[int] = frozenset()) -> None:
        """Overwrite `tensors` that differ from the buffer; autograd notices as in `restore`.

        On a GPU this waits for the tensors that are not `unread`, once if nothing differs.
        """
        hidden = [i for i, tensor in enumerate(tensors) if id(tensor) in unread]
        read = [i for i, tensor in enumerate(tensors) if id(tensor) not in unread]
        self._copy([tensor.data for tensor in tensors], self.parts, hidden)
        if not read:
            return
        self._copy(self._own, self.parts, hidden)
        self._copy(self._own, tensors, read)
        if not torch.equal(self._now, self.flat):
            for i in read:
                piece = slice(self._ends[i], self._ends[i] + tensors[i].nbytes)
                if not torch.equal(self._now[piece], self.flat[piece]):
                    with torch.no_grad():
                        tensors[i].copy_(self.parts[i])

    @torch.no_grad()
    def _copy(self, into: Sequence[Tensor], source: Sequence[Tensor], which: Sequence[int]) -> None:
        by_dtype = defaultdict[torch.dtype, list[int]](list)
        for i in which:
            by_dtype[source[i].dtype].append(i)
        for some in by_dtype.values():
            torch._foreach_copy_([into[i] for i in some], [source[i] for i in some])


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


def digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 over names and bytes of tensors, equal exactly if these are."""
    seen = hashlib.sha256()
    for name, tensor in named:
        seen.update(name.encode())
        seen.update(flatten([tensor]).cpu().numpy().tobytes())
    return seen.hexdigest()


def pack(record: object, *tensors: Tensor) -> bytes:
    """Return `record`, of plain values and tensors, and `tensors` as bytes."""
    file = io.BytesIO()
    torch.save((record, *tensors), file)
    return file.getvalue()


def unpack(packed: bytes, read: Callable[[Any], T], count: int) -> tuple[T, list[Tensor]]:
    """Return what was packed, the record parsed by `read`, and `count` tensors, and run none of it.

    Raises `DisagreementError` for other bytes.
    """
    try:
        record, *tensors = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
        require(
            len(tensors) == count
            and all(
                isinstance(tensor, Tensor) and tensor.dtype == torch.uint8 for tensor in tensors
            )
        )
        return read(record), tensors
    except (
        *MALFORMED,
        UnpicklingError,
        EOFError,
        RuntimeError,
        AssertionError,
    ) as error:  # as torch has no one error
        raise malformed("state of another rank", packed) from error


def fingerprint(model: nn.Module) -> str:
    """Return the `digest` of all parameters and buffers."""
    return digest((*model.named_parameters(), *model.named_buffers()))
