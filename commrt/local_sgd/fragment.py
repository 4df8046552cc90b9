# SPDX-License-Identifier: Apache-2.0
"""Fragments of a model under local SGD: how it is cut; what leaves of each, and how that is merged.

Each keeps an anchor: the weights that all ranks agreed on last (in gossip, this rank's own). They
write the model's weights, and know no other rank. On the thread that trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from commrt.buckets.digest import Digest
from commrt.buckets.tensors import Named, TensorSlot
from commrt.buckets.weight_part import WeightPart
from commrt.errors import UsageError
from commrt.local_sgd.in_flight import InFlight
from commrt.local_sgd.outer import Outer
from commrt.local_sgd.policy import LocalSGD, Mix


class _Tensor:
    """What is kept for one weight or buffer, which `slot` finds in its module.

    The anchor is in fp32 for narrower weights, so that small outer steps do not vanish.
    """

    def __init__(self, slot: TensorSlot, algorithm: LocalSGD) -> None:
        tensor = slot.tensor()
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        device = "cpu" if algorithm.anchor == "cpu" else tensor.device
        self.slot = slot
        self.anchor = tensor.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
        is_stepped = algorithm.outer is not None and not slot.is_buffer
        # the outer optimizer's momentum
        self.velocity = torch.zeros_like(self.anchor) if is_stepped else None
        # takes no memory
        nothing = torch.zeros((), dtype=dtype, device=tensor.device).expand(self.anchor.shape)
        self.outgoing = nn.Parameter(nothing, requires_grad=False)
        """Its ``grad`` is what this rank sends, and then the average."""


class Fragment(WeightPart):
    """Tensors that leave together.

    The replica calls `leave`, replaces what left by its average (`GradientBucket.unpack`), and then
    calls `merge`. In between the communication thread reads what leaves, and the anchors through
    `digest`. All fields are written here, by calls of the thread that trains; of what is
    `in_flight`, the replica, `checkpoint` and the exchange write fields (see `InFlight`).
    """

    IN_FLIGHT = (
        "{name} was written while an average of the old weights was in flight, and not by a step of"
        " an optimizer given to attach(): call replica.drain() on all ranks before you write"
        " weights, or replica.load_state_dict() after a checkpoint was loaded"
    )
    WRITTEN = (
        "{name} was written, not by a step of an optimizer given to attach(), and outer= would take"
        " that for learning: leave outer out if your loop writes weights. After a checkpoint was"
        " loaded call replica.load_state_dict(), or replica.overwrite_with_first() to begin anew"
    )
    in_flight: InFlight | None

    def __init__(self, index: int, held: Sequence[TensorSlot], algorithm: LocalSGD) -> None:
        super().__init__(index, held)
        self.exchanges = 0
        """Those that have begun."""
        self.left = 0
        """The step after which the weights left last."""
        self._algorithm = algorithm
        self._is_gossip = algorithm.is_gossip
        self.is_relied_on = algorithm.outer is not None
        self.ids = [id(slot.place[slot.key]) for slot in held]
        """Of the parameters, as optimizers hold them."""
        self._tensors = [_Tensor(slot, algorithm) for slot in held]
        self.outgoing: list[Named] = [(each.slot.name, each.outgoing) for each in self._tensors]
        """What buckets carry: the gradients of these."""
        self.anchors = [each.anchor for each in self._tensors]
        self.digest = Digest(self.anchors)
        self.note()

    @torch.no_grad()
    def settle(self) -> None:
        """Take the weights as they are for the anchor."""
        for each in self._tensors:
            each.anchor.copy_(each.slot.tensor())
        self.note()

    @torch.no_grad()
    def restart(self) -> None:
        """Take the weights for the anchor, without momentum and with nothing in flight."""
        self.drop_in_flight()
        self.settle()
        for each in self._tensors:
            if each.velocity is not None:
                each.velocity.zero_()

    @torch.no_grad()
    def leave(self, in_flight: InFlight) -> None:
        """Note what this rank sends: the anchor minus its weights; in gossip minus the weights."""
        self.require_attached()
        for each in self._tensors:
            weights = each.slot.tensor().to(each.anchor.dtype)
            sent = -weights if self._is_gossip else each.anchor.to(weights.device) - weights
            each.outgoing.grad = sent.contiguous()
        self.in_flight = in_flight
        self.left = in_flight.step
        self.exchanges += 1
        self.note()

    @torch.no_grad()
    def learned(self) -> list[Tensor]:
        """Return what the weights have changed by since they left."""
        found = []
        for each in self._tensors:
            weights = each.slot.tensor().to(each.anchor.dtype)
            sent = cast("Tensor", each.outgoing.grad)
            origin = 0.0 if self._is_gossip else each.anchor.to(sent.device)
            found.append(weights - origin + sent)
        return found

    @torch.no_grad()
    def merge(
        self, in_flight: InFlight, learned: Sequence[Tensor] | None, outer: Outer | None
    ) -> None:
        """Move the anchor by the averages that have arrived, and merge it with the weights.

        `learned` is None where the anchor replaces them.
        """
        merge = self._algorithm.merge
        for i, each in enumerate(self._tensors):
            anchor = each.anchor
            weights = each.slot.tensor()
            average = cast("Tensor", each.outgoing.grad).to(anchor.device)
            rate = in_flight.rates[i]
            difference = anchor + average if self._is_gossip else average
            if outer is None or each.velocity is None or rate is None:
                anchor -= difference
            else:
                outer.step(anchor, difference, each.velocity, rate)
            if each.slot.is_buffer:  # what was learned since could make a variance negative
                weights.copy_(anchor)
            elif isinstance(merge, Mix) and in_flight.step > self._algorithm.warmup:
                weights.copy_(
                    torch.lerp(anchor.to(weights.device), weights.to(anchor.dtype), merge.local)
                )
            else:
                weights.copy_(
                    anchor.to(weights.device) + learned[i] if learned is not None else anchor
                )
        self.drop_in_flight()

    def drop_in_flight(self) -> None:
        """Forget what is in flight."""
        self.in_flight = None
        for each in self._tensors:
            each.outgoing.grad = None

    @torch.no_grad()
    def land(self) -> None:
        """Set the weights to the anchor."""
        for each in self._tensors:
            each.slot.tensor().copy_(each.anchor)
        self.note()

    def state_dict(self) -> dict[str, Any]:
        """Return all that training goes on with; of what is in flight, what this rank has sent."""
        state: dict[str, Any] = {"exchanges": self.exchanges, "left": self.left, "in_flight": None}
        if self.in_flight is not None:
            sent = {
                each.slot.name: cast("Tensor", each.outgoing.grad).clone() for each in self._tensors
            }
            is_weighed = self.in_flight.leaving.weighed == 1
            own = self.in_flight
            state["in_flight"] = {"sent": sent, "rates": [*own.rates], "settings": own.settings}
            state["in_flight"]["weight"] = own.weight if is_weighed else None
        return state | {
            key: {name: each.clone() for name, each in kept.items()}
            for key, kept in self._kept().items()
        }

    def _kept(self) -> dict[str, dict[str, Tensor]]:
        velocities = {
            each.slot.name: each.velocity for each in self._tensors if each.velocity is not None
        }
        return {
            "anchors": {each.slot.name: each.anchor for each in self._tensors},
            "velocities": velocities,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a checkpoint's state, after `check_state`; what was in flight is to be resent."""
        self.drop_in_flight()
        self.exchanges = state["exchanges"]
        self.left = state["left"]
        if (in_flight := state["in_flight"]) is not None:
            self.in_flight = InFlight(self.left, in_flight["settings"], in_flight["rates"])
            for each in self._tensors:
                each.outgoing.grad = in_flight["sent"][each.slot.name].to(
                    each.outgoing.device, copy=True
                )
        for key, kept in self._kept().items():
            for name, tensor in kept.items():
                tensor.copy_(state[key][name])
        self.note()

    def anchors_in(self, state: Mapping[str, Any] | None) -> Iterator[Tensor]:
        """Yield the anchors after `load_state_dict` of `state`, or `restart` without one."""
        for each in self._tensors:
            found = each.slot.tensor() if state is None else state["anchors"][each.slot.name]
            yield found.to(each.anchor.dtype)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `UsageError` if `state` is not that of such a fragment."""
        kept = self._kept()
        _require_fit("anchor", state.get("anchors"), kept["anchors"])
        _require_fit("momentum", state.get("velocities"), kept["velocities"])
        if in_flight := state.get("in_flight"):
            _require_fit("difference", in_flight.get("sent"), kept["anchors"])


def _require_fit(what: str, given: object, wanted: Mapping[str, Tensor]) -> None:
    for name, like in wanted.items():
        tensor = given.get(name) if isinstance(given, Mapping) else None
        if not isinstance(tensor, Tensor) or tensor.shape != like.shape:
            holds = f"one of shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else "none"
            raise UsageError(
                f"the state holds {holds} as the {what} of {name}, which has shape"
                f" {list(like.shape)}: load a state that was saved with the same model and"
                " algorithm"
            )


def cut_fragments(held: Sequence[TensorSlot], algorithm: LocalSGD) -> list[Fragment]:
    """Return the fragments: each module goes, in order, to the one that has fewest bytes so far."""
    modules: dict[int, list[TensorSlot]] = {}
    for slot in held:
        modules.setdefault(id(slot.module), []).append(slot)
    parts: list[list[TensorSlot]] = [[] for _ in range(min(algorithm.fragments, len(modules)))]
    nbytes = [0] * len(parts)
    for slots in modules.values():
        emptiest = nbytes.index(min(nbytes))
        parts[emptiest] += slots
        nbytes[emptiest] += sum(slot.tensor().nbytes for slot in slots)
    return [Fragment(index, part, algorithm) for index, part in enumerate(parts)]
