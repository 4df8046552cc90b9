# SPDX-License-Identifier: Apache-2.0
"""What ``commrt doctor`` says of one thing, and that nothing it looks at can end it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Finding", "Verdict", "guarded"]

Verdict = Literal["ok", "absent", "warning", "problem"]
"""absent: not here, and not needed for everything; warning: it runs, but not as it could; problem: it would fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""
    """One sentence, where there is something to do."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """The same as numbers and names, for JSON."""


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What `check` finds; what ends it is a finding too, called `name`."""
    try:
        yield from check()
    except Exception as error:  # drivers and libraries raise what they like
        yield Finding(name, "problem", f"{type(error).__name__}: {error}", "The message says what to do.")
