# SPDX-License-Identifier: Apache-2.0
"""The fragments in a checkpoint: whether they fit and all ranks load the same, and taking them.

`require_fit` and `agree` come first and write nothing; `take` overwrites fragments and what is in
flight of them, and lets what `riding` has ride with that. On the thread that trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from commrt.errors import UsageError
from commrt.local_sgd.fragment import Fragment
from commrt.local_sgd.policy import LocalSGD
from commrt.runtime.world import World
from commrt.training.riding import Riding
from commrt.training.tensor_bytes import digest

Saved = Sequence[Mapping[str, Any]]
"""What `Fragment.state_dict` returned, of each."""


def require_fit(
    saved: Saved, period: int, delay: int, fragments: Sequence[Fragment], algorithm: LocalSGD
) -> None:
    """Raise `UsageError` unless `fragments` fit `saved`, made with this `period` and `delay`."""
    if len(saved) != len(fragments):
        raise UsageError(
            f"the state has {len(saved)} fragments and the model was attached with"
            f" {len(fragments)}: attach it with the algorithm of the run that saved it"
        )
    own = algorithm.period, algorithm.delay
    if (period, delay) != own and any(part.get("in_flight") for part in saved):
        raise UsageError(
            f"the state has averages in flight of period={period}, delay={delay}, and the model"
            f" was attached with period={own[0]}, delay={own[1]}: attach it as it was, or save"
            " after replica.consolidate()"
        )
    for fragment, part in zip(fragments, saved, strict=True):
        fragment.check_state(part)


def agree(
    world: World,
    passes: int,
    saved: Saved | None,
    fragments: Sequence[Fragment],
    algorithm: LocalSGD,
) -> None:
    """Raise `DisagreementError` if ranks load what does not belong together; collective.

    `passes` are those after which each goes on. Where nothing was `saved`, fragments begin anew.
    """
    parts = [None] * len(fragments) if saved is None else saved
    in_flight = ", ".join(
        f"{i} after step {part['left']}"
        for i, part in enumerate(saved or ())
        if part["in_flight"] is not None
    )
    anchors = (
        ("", anchor)
        for fragment, part in zip(fragments, parts, strict=True)
        for anchor in fragment.anchors_in(part)
    )
    digests = "its own" if algorithm.is_gossip else digest(anchors)
    world.agree("load_state_dict", step=str(passes), in_flight=in_flight, anchors=digests)


def take(saved: Saved | None, fragments: Sequence[Fragment], riding: Riding) -> None:
    """Let `fragments` go on from `saved`, or begin anew; what was in flight is to be sent again."""
    if saved is None:
        for fragment in fragments:
            fragment.restart()
        return
    for fragment, part in zip(fragments, saved, strict=True):
        fragment.load_state_dict(part)
        if (
            fragment.in_flight is not None
            and (weight := part["in_flight"].get("weight")) is not None
        ):
            fragment.in_flight.weight = weight
            fragment.in_flight.leaving = riding.leave_again(weight)
