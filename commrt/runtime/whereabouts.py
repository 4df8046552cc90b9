# SPDX-License-Identifier: Apache-2.0
"""In which call of its program, and at which step of training, a rank is: words for errors.

Pure functions on any thread; a world has what they are given.
"""

from __future__ import annotations

from typing import Protocol

from commrt.errors import TransportError
from commrt.runtime.tags import UNNAMED, UNNAMED_SUM
from commrt.store.reports import BACKWARD, UNKNOWN, Call

CALLS: dict[int | str, str] = {
    "agree (attach)": "attach()",
    "agree (join)": "join()",
    "run()": "world.run()",
    "all_reduce()": "world.all_reduce()",
    UNNAMED.bucket: "world.run()",
    UNNAMED_SUM.bucket: "world.all_reduce()",
}
"""What a user types, by the name of a collective or the word of a tag."""


class Totals(Protocol):
    """What a model's steps were since it was attached."""

    @property
    def steps(self) -> int:
        """How many there were."""

    @property
    def exposed_s(self) -> float:
        """Seconds that they waited."""


class Trained(Protocol):
    """What is asked of an attached model, on any thread."""

    @property
    def step(self) -> int:
        """Steps so far."""

    @property
    def waits_for(self) -> int | None:
        """The bucket for which its rank waits now, if it does, and that is known."""

    def stats(self) -> Totals:
        """Return the totals since it was attached."""


def whereabouts(
    failure: BaseException, collective: str | None, latest: str, trained: Trained | None
) -> Call:
    """Return in which call a rank was that `failure` ended.

    `collective` runs on the training thread, unless it is None; `latest` was the one before, since
    the latest step. Steps count from 0.
    """
    if not isinstance(failure, TransportError):
        return UNKNOWN
    if failure.call is not None:
        return Call(*failure.call)
    bucket = failure.place.bucket
    if collective is None and isinstance(bucket, int):
        return Call(BACKWARD, f"of step {failure.place.step}", CALLS.get(latest, latest))
    name = bucket if collective is None else collective
    if name is None:
        return UNKNOWN
    when = "" if trained is None else f"before step {trained.step}"
    return Call(CALLS.get(name, str(name)), when)
