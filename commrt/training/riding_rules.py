# SPDX-License-Identifier: Apache-2.0
"""What may ride with gradients, by the way to train: rules, and the errors of calls they forbid.

What rides are `Replica.ride`'s numbers, what gradients weigh, and wishes to stop or skip, in slots
of the first bucket (`buckets/riders`). `weights` here are what gradients weigh. Values and pure
functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commrt.algorithm import Algorithm
from commrt.buckets.gradient_bucket import GradientBucket
from commrt.errors import UsageError

NOT_ADDED_UP = "the model's weights travel there, and are not added up; use an all-reduce"
FEEDBACK = (
    "a wire that feeds back what rounding lost, which would weigh as the step before: use one"
    " without feedback"
)
EVEN = 0.5
"""The share of a partner's gradients, where ranks gossip them, in which slots stay exact."""


@dataclass(frozen=True, slots=True)
class RidingRules:
    """Why nothing may ride, or only no weights, or no wishes to stop or skip; "" where it may."""

    anything: str = ""
    weights: str = ""
    wishes: str = ""

    def require_riders(self, call: str, algorithm: Algorithm) -> None:
        """Raise `UsageError` if nothing may ride."""
        if self.anything:
            raise UsageError(f"{call} with {algorithm}: {self.anything}")

    def require_weights(self, call: str, algorithm: Algorithm) -> None:
        """Raise `UsageError` if gradients may not weigh."""
        self.require_riders(call, algorithm)
        if self.weights:
            raise UsageError(f"{call} with {self.weights}")

    def require_wishes(self, call: str, algorithm: Algorithm) -> None:
        """Raise `UsageError` if no rank may ask all to stop or skip."""
        self.require_riders(call, algorithm)
        if self.wishes:
            raise UsageError(f"{call} with {algorithm}: {self.wishes}")


ALL_MAY_RIDE = RidingRules()


def rules_of_averages(
    algorithm: Algorithm, buckets: Sequence[GradientBucket], *, mixes: bool, same_bits: bool
) -> RidingRules:
    """Return the rules where all steps average gradients in `buckets`: see `Engine.mixes`."""
    anything = ""
    if getattr(algorithm, "share", EVEN) != EVEN:
        anything = "a share other than 1/2 would round what rides; leave weight= out"
    wishes = ""
    if mixes:
        wishes = "only partners hear of it in a step: use gossip of weights, or an all-reduce"
    weights = _why_no_weights(buckets, mixes=mixes, same_bits=same_bits)
    return RidingRules(anything, weights, wishes)


def _why_no_weights(buckets: Sequence[GradientBucket], *, mixes: bool, same_bits: bool) -> str:
    """Return why gradients in `buckets` may not weigh; "" if they may."""
    if buckets[0].residual is not None:
        return FEEDBACK
    if same_bits:
        return (
            "same_bits=True, as the first bucket is multiplied after its sum: attach without one of"
            " them"
        )
    if any(bucket.wire.dtype == torch.float16 for bucket in buckets):
        if mixes:
            return "gossip in float16, whose range weights leave: use wire=torch.bfloat16"
        if not buckets[0].unpacks_wire:
            return 'gradients="views" in float16, whose range weights leave: leave views out'
    return ""
