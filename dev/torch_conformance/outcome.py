# SPDX-License-Identifier: Apache-2.0
"""What torch's tests ended in, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
REFUSED = {
    f"test_monitored_barrier_{what}": "monitored_barrier is only implemented for GLOO backend"
    for what in ("gloo", "gloo_subgroup", "failure_order", "wait_all_ranks")
}
"""Tests that only Gloo can pass, and a part of their error: `dist.monitored_barrier` compares the
backend's name.
"""


@dataclass(frozen=True)
class Outcome:
    """The end of one test, with torch's reason for a skip, or the errors of a failure and of its
    ranks.
    """

    test: str
    state: str
    seconds: float
    reason: str = ""

    @property
    def refused(self) -> bool:
        """Whether the test failed because torch lets only Gloo pass it."""
        return self.state == FAILED and self.test in REFUSED and REFUSED[self.test] in self.reason


def table(outcomes: Sequence[Outcome]) -> str:
    """Return how many tests ran, passed, failed and were skipped, then the failures, then the
    reasons for skips.
    """
    failed = [outcome for outcome in outcomes if outcome.state == FAILED and not outcome.refused]
    refused = [outcome.test for outcome in outcomes if outcome.refused]
    reasons = Counter(outcome.reason for outcome in outcomes if outcome.state == SKIPPED)
    rows = [
        (len(outcomes) - reasons.total(), "run"),
        (sum(outcome.state == PASSED for outcome in outcomes), "passed"),
        (len(failed), "failed"),
        (len(refused), " ".join(["failed because torch lets only Gloo pass", *refused])),
        (reasons.total(), "skipped by torch's rules"),
    ]
    lines = [f"{count:4d} {what}" for count, what in rows]
    lines += [
        f"{outcome.test} failed in {outcome.seconds:.1f} s: {outcome.reason}" for outcome in failed
    ]
    return "\n".join(
        [*lines, *(f"{count:4d} skipped: {reason}" for reason, count in reasons.most_common())]
    )
