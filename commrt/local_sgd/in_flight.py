# SPDX-License-Identifier: Apache-2.0
"""An exchange of a fragment that is under way: what leaves, and what was submitted of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.riders import NOTHING_LEAVES, Leaving
from commrt.buckets.span import Span
from commrt.runtime.generation import Generation
from commrt.threads.future import Future


class Submitted(NamedTuple):
    """One attempt to average it, on the communication thread."""

    generation: Generation
    """The ranks that average."""
    vote: str
    """What they vote on once each has the average; "" if they do not."""
    buckets: Sequence[GradientBucket]
    answer: Future[tuple[Span, ...]]
    """What averages `buckets`, and what that cost."""


@dataclass(slots=True, eq=False)
class InFlight:
    """An exchange of a fragment, from the step after which its weights leave to the merge.

    Only the thread that trains writes it. The replica says what leaves in a step, `checkpoint` what
    leaves again; after that only `FragmentExchange` writes, the last two fields.
    """

    step: int
    """The step after which the weights left."""
    settings: int
    """A digest of the optimizers' settings in that step; ranks compare it."""
    rates: Sequence[float | None]
    """The learning rate of each tensor in that step; None if no optimizer steps it."""
    weight: float = 1.0
    """What this rank's differences weigh."""
    leaving: Leaving = NOTHING_LEAVES
    """What rides along."""
    submitted: Submitted | None = None
    """The latest attempt; None if it is held back as ranks were lost."""
    residuals: Mapping[str, Tensor] | None = None
    """The residuals before the first attempt, from which each other one begins."""
