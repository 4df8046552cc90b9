# SPDX-License-Identifier: Apache-2.0
"""What a check of ``commrt doctor`` finds: a verdict, what it saw, and what to do.

Needs no torch; runs only the checks that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["ok", "absent", "warning", "problem"]
"""absent: not installed, not always needed; warning: works, but slowly or oddly; problem: fails."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""
    """One sentence; empty if there is nothing to do."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """What was measured, for JSON."""


def guarded(name: str, check: Callable[..., Iterable[Finding]], *of: object) -> Iterator[Finding]:
    """Yield the findings of ``check(*of)``; an exception becomes a finding called `name`."""
    try:
        yield from check(*of)
    except Exception as error:  # drivers and libraries raise errors of any type
        yield Finding(
            name, "problem", f"{type(error).__name__}: {error}", "Do what the message says."
        )
