# SPDX-License-Identifier: Apache-2.0
"""What torch's tests ended in, as a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
REFUSED = {
    f"test_monitored_barrier_{what}": "monitored_barrier is only implemented for GLOO backend"
    for what in ("gloo", "gloo_subgroup", "failure_order", "wait_all_ranks")
}
"""Tests that only Gloo can pass, and a part of their error: `dist.monitored_barrier` compares the backend's name."""

_RANK = re.compile(r"Process (\d+) exited with error code \d+ and exception:$", re.MULTILINE)
_HEADER = "Traceback (most recent call last):\n"
_MESSAGE = re.compile(r"^\S.*", re.MULTILINE)
_MOST_CHARACTERS = 300


@dataclass(frozen=True)
class Outcome:
    """The end of one test: torch's reason for a skip, or the first lines of its error and of those of its ranks."""

    test: str
    state: str
    seconds: float
    reason: str = ""
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The reason and the ranks' errors, one per line."""
        ranks = [f"  rank {rank}: {error}" for rank, error in sorted(self.errors.items())]
        return "\n".join([f"{self.test} {self.state} in {self.seconds:.1f} s: {self.reason}", *ranks])

    @property
    def refused(self) -> bool:
        """Whether the test failed because torch lets only Gloo pass it."""
        return self.state == FAILED and self.test in REFUSED and REFUSED[self.test] in self.reason


def first_line(trace: str) -> str:
    """Return the first line of the message at the end of a Python traceback."""
    found = _MESSAGE.search(trace.rpartition(_HEADER)[2])
    return found[0][:_MOST_CHARACTERS] if found else ""


def rank_errors(message: str) -> dict[int, str]:
    """Return the first line of each rank's error from what torch's parent process reports."""
    parts = _RANK.split(message)
    return {int(rank): first_line(trace) for rank, trace in zip(parts[1::2], parts[2::2], strict=True)}


def table(outcomes: Sequence[Outcome]) -> str:
    """Return how many tests ran, passed, failed and were skipped, then the failures, then the reasons for skips."""
    failed = [outcome for outcome in outcomes if outcome.state == FAILED and not outcome.refused]
    refused = [outcome for outcome in outcomes if outcome.refused]
    reasons = Counter(outcome.reason for outcome in outcomes if outcome.state == SKIPPED)
    rows = [
        (len(outcomes) - reasons.total(), "run"),
        (sum(outcome.state == PASSED for outcome in outcomes), "passed"),
        (len(failed), "failed"),
        (len(refused), "failed because torch lets only Gloo pass"),
        (reasons.total(), "skipped by torch's rules"),
    ]
    lines = [f"{count:4d} {what}" for count, what in rows]
    lines += [outcome.text for outcome in [*failed, *refused]]
    return "\n".join([*lines, *(f"{count:4d} skipped: {reason}" for reason, count in reasons.most_common())])
