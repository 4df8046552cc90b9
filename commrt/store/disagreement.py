# SPDX-License-Identifier: Apache-2.0
"""What must be equal on all ranks: claims by name, and the error for the first difference.

Pure functions: who asks them has gathered the claims.
"""

from __future__ import annotations

from collections.abc import Mapping

from commrt.errors import DisagreementError

TOPIC = "topic"
"""The name of the claim that says what a rank does at all; named before others that differ."""
EXCERPT_WIDTH = 160
"""Characters of each of two texts that differ, in an error."""


def find_disagreement(
    topic: str, claims: Mapping[int, Mapping[str, str]]
) -> DisagreementError | None:
    """Return the error for the first of `claims` that differs from the first one, or None."""
    (first, expected), *others = claims.items()
    for rank, claim in others:
        differing = [
            name for name in claim.keys() | expected.keys() if claim.get(name) != expected.get(name)
        ]
        if differing:
            about = min(differing, key=lambda name: (name != TOPIC, name))
            texts = _excerpt(claim.get(about, "nothing"), expected.get(about, "nothing"))
            return DisagreementError(
                f"{topic}: rank {rank} disagrees with rank {first} about {about}: {texts}. Start"
                " every rank with the same code and arguments",
                about,
            )
    return None


def _excerpt(mine: str, first: str) -> str:
    """Return both texts from shortly before the place where they differ."""
    part = next(
        (i for i, (a, b) in enumerate(zip(mine, first, strict=False)) if a != b),
        min(len(mine), len(first)),
    )
    start = max(0, part - EXCERPT_WIDTH // 4)
    cut = [("..." if start else "") + text[start : start + EXCERPT_WIDTH] for text in (mine, first)]
    return f"{cut[0]!r} against {cut[1]!r}"
