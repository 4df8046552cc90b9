# SPDX-License-Identifier: Apache-2.0
"""A part of a model under local SGD: its anchor, what leaves when a period ends, and how an average is merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Any

import torch
from torch import Tensor, nn

from commrt.algorithms.local import LocalSGD, Mix
from commrt.algorithms.outer import Outer
from commrt.buckets.engine import Span
from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.layout import Named
from commrt.buckets.weight_bucket import TensorSlot, WeightPart
from commrt.elastic.generations import Generation
from commrt.errors import CommrtError, UsageError
from commrt.runtime.membership import LOST
from commrt.threads.future import Future

__all__ = ["Fragment", "InFlight", "cut_fragments"]


@dataclass(slots=True, eq=False)
class InFlight:
    """An exchange of a fragment, from the step in which its weights leave to that in which the average is merged."""

    step: int
    """After which the weights left."""
    settings: int
    """A digest of the optimizers' settings."""
    rates: Sequence[float | None]
    """The learning rate of each tensor in the step after which the weights left; None if no optimizer steps it."""
    generation: Generation | None = None
    """The ranks that average; None before it was sent."""
    vote: str = ""
    """The name of the vote on it."""
    answer: Future[tuple[Span, ...]] | None = None
    """What averages `buckets`."""
    buckets: Sequence[GradientBucket] = ()
    residuals: Mapping[str, Tensor] | None = None
    """The residuals when the weights left; None before they were sent."""

    def arrived(self) -> bool:
        """Wait for the end of the exchange; return True if this rank has the average. Other errors are raised."""
        try:
            return self.answer is not None and bool(self.answer.result())
        except LOST:
            return False

    def wait(self) -> None:
        """Wait for the end of the exchange, in whatever it ends."""
        with suppress(CommrtError):
            self.arrived()


class Fragment(WeightPart):
    """Tensors that leave together. All calls belong to the thread that trains.

    `outgoing` names the differences that travel: their ``grad`` holds what this rank sends, and then the average. The
    anchor is kept in fp32 for narrower weights, so that small outer steps are not rounded away.
    """

    in_flight: InFlight | None

    def __init__(self, index: int, held: Sequence[TensorSlot], algorithm: LocalSGD) -> None:
        super().__init__(index, held)
        self.exchanges = self.left = 0
        """How many have begun; the step after which the weights left last."""
        self._algorithm, self.is_relied_on = algorithm, algorithm.outer is not None
        self.anchors = [self._anchor_of(slot.tensor()) for slot in held]
        self.velocities = [
            None if slot.is_buffer or algorithm.outer is None else torch.zeros_like(anchor)
            for slot, anchor in zip(held, self.anchors, strict=True)
        ]
        self.outgoing: list[Named] = [
            (slot.name, _outgoing_param(anchor, slot.tensor().device))
            for slot, anchor in zip(held, self.anchors, strict=True)
        ]
        self.note()

    def _anchor_of(self, tensor: Tensor) -> Tensor:
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        device = "cpu" if self._algorithm.anchor == "cpu" else tensor.device
        return tensor.to(device, dtype, copy=True, memory_format=torch.contiguous_format)

    def rates(self, of: Mapping[int, float]) -> list[float | None]:
        """Return the learning rate of each tensor, given those `of` parameters by their ids; None for others."""
        return [of.get(id(slot.place[slot.key])) for slot in self.held]

    @torch.no_grad()
    def settle(self) -> None:
        """Take the weights as they are for the anchor."""
        for slot, anchor in zip(self.held, self.anchors, strict=True):
            anchor.copy_(slot.tensor())
        self.note()

    @torch.no_grad()
    def restart(self) -> None:
        """Take the weights as they are for the anchor, without momentum and with nothing in flight."""
        self.drop_in_flight()
        self.settle()
        for velocity in self.velocities:
            if velocity is not None:
                velocity.zero_()

    @torch.no_grad()
    def leave(self, in_flight: InFlight) -> None:
        """Note what this rank sends: the anchor minus its weights; where ranks gossip, minus the weights."""
        for slot, anchor, (_, param) in zip(self.held, self.anchors, self.outgoing, strict=True):
            weights = slot.tensor().to(anchor.dtype)
            param.grad = (-weights if self._algorithm.is_gossip else anchor.to(weights.device) - weights).contiguous()
        self.in_flight, self.left = in_flight, in_flight.step
        self.exchanges += 1
        self.note()

    @torch.no_grad()
    def learned(self) -> list[Tensor]:
        """Return what the weights have changed by since they left."""
        return [
            slot.tensor().to(anchor.dtype) - self._origin(anchor, own) + own
            for slot, anchor, own in zip(self.held, self.anchors, self.differences(), strict=True)
        ]

    def _origin(self, anchor: Tensor, like: Tensor) -> Tensor | float:
        """Return what weights were subtracted from when they left."""
        return 0.0 if self._algorithm.is_gossip else anchor.to(like.device)

    def differences(self) -> list[Tensor]:
        """Return what this rank has sent, or the averages once they have arrived."""
        found = [param.grad for _, param in self.outgoing]
        return [tensor for tensor in found if tensor is not None]

    @torch.no_grad()
    def merge(self, learned: Sequence[Tensor] | None, outer: Outer | None) -> None:
        """Move the anchor by the averages that have arrived, and merge it with the weights; nothing is in flight then.

        `learned` is None where the anchor replaces the weights.
        """
        in_flight = self.in_flight
        assert in_flight is not None  # noqa: S101  # for mypy
        for i, (slot, average) in enumerate(zip(self.held, self.differences(), strict=True)):
            anchor, weights = self.anchors[i], slot.tensor()
            self._move(i, average, outer, in_flight.rates[i])
            if slot.is_buffer:  # what was learned since could make a variance negative
                weights.copy_(anchor)
            elif isinstance(self._algorithm.merge, Mix) and in_flight.step > self._algorithm.warmup:
                weights.copy_(
                    torch.lerp(anchor.to(weights.device), weights.to(anchor.dtype), self._algorithm.merge.local)
                )
            else:
                weights.copy_(anchor.to(weights.device) + learned[i] if learned is not None else anchor)
        self.drop_in_flight()

    def _move(self, i: int, average: Tensor, outer: Outer | None, rate: float | None) -> None:
        anchor, velocity = self.anchors[i], self.velocities[i]
        average = average.to(anchor.device)
        difference = anchor + average if self._algorithm.is_gossip else average
        if outer is None or velocity is None or rate is None:
            anchor -= difference
        else:
            outer.step(anchor, difference, velocity, rate)

    def drop_in_flight(self) -> None:
        """Forget what is in flight."""
        self.in_flight = None
        for _, param in self.outgoing:
            param.grad = None

    @torch.no_grad()
    def land(self) -> None:
        """Set the weights to the anchor."""
        for slot, anchor in zip(self.held, self.anchors, strict=True):
            slot.tensor().copy_(anchor)
        self.note()

    def state_dict(self) -> dict[str, Any]:
        """Return all that training goes on with; of what is in flight, what this rank has sent."""
        state: dict[str, Any] = {"exchanges": self.exchanges, "left": self.left, "in_flight": None}
        if self.in_flight is not None:
            sent = self._named(self.differences())
            state["in_flight"] = {"sent": sent, "rates": [*self.in_flight.rates], "settings": self.in_flight.settings}
        return state | {"anchors": self._named(self.anchors), "velocities": self._named(self.velocities)}

    def _named(self, tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
        pairs = zip(self.held, tensors, strict=True)
        return {slot.name: tensor.clone() for slot, tensor in pairs if tensor is not None}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint, after `check_state`; what was in flight is to be sent again."""
        self.drop_in_flight()
        self.exchanges, self.left = state["exchanges"], state["left"]
        for slot, anchor, velocity in zip(self.held, self.anchors, self.velocities, strict=True):
            anchor.copy_(state["anchors"][slot.name])
            if velocity is not None:
                velocity.copy_(state["velocities"][slot.name])
        if (in_flight := state["in_flight"]) is not None:
            self.in_flight = InFlight(self.left, in_flight["settings"], in_flight["rates"])
            for (name, param), slot in zip(self.outgoing, self.held, strict=True):
                param.grad = in_flight["sent"][name].to(slot.tensor().device, copy=True)
        self.note()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `UsageError` if `state` is not that of such a fragment."""
        held: list[tuple[str, object, Sequence[Tensor | None]]] = [
            ("anchor", state.get("anchors"), self.anchors),
            ("momentum", state.get("velocities"), self.velocities),
        ]
        if in_flight := state.get("in_flight"):
            held.append(("difference", in_flight.get("sent"), self.anchors))
        for what, given, wanted in held:
            for slot, like in zip(self.held, wanted, strict=True):
                if like is not None:
                    found = given.get(slot.name) if isinstance(given, Mapping) else None
                    _require_fit(what, found, slot.name, like)


def _outgoing_param(anchor: Tensor, device: torch.device) -> nn.Parameter:
    """Return a parameter of the anchor's shape that takes no memory."""
    return nn.Parameter(torch.zeros((), dtype=anchor.dtype, device=device).expand(anchor.shape), requires_grad=False)


def _require_fit(what: str, tensor: object, name: str, like: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.shape != like.shape:
        holds = f"one of shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else "none"
        raise UsageError(
            f"the state holds {holds} as the {what} of {name}, which has shape {list(like.shape)}: load a state that "
            "was saved with the same model and algorithm"
        )


def cut_fragments(held: Sequence[TensorSlot], algorithm: LocalSGD) -> list[Fragment]:
    """Return the fragments: each module goes, in order, to the one that has fewest bytes so far."""
    modules: dict[int, list[TensorSlot]] = {}
    for slot in held:
        modules.setdefault(id(slot.module), []).append(slot)
    filled = [(0, index) for index in range(min(algorithm.fragments, len(modules)))]
    parts: list[list[TensorSlot]] = [[] for _ in filled]
    heapify(filled)
    for slots in modules.values():
        nbytes, index = filled[0]
        parts[index] += slots
        heapreplace(filled, (nbytes + sum(slot.tensor().nbytes for slot in slots), index))
    return [Fragment(index, part, algorithm) for index, part in enumerate(parts)]
