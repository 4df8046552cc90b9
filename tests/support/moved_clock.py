# SPDX-License-Identifier: Apache-2.0
"""A clock that a test moves, so that a test of a deadline waits for nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, get_ident
from time import monotonic

from commrt.threads.deadline import clock

POLL_S = 0.002
"""Real seconds that a wait sleeps before it looks at the clock again."""
MOVE_S, SEEN_S = 0.02, 0.1
"""Real seconds between two moves of the clock, at least and at most: all who wait, and stores, act in between."""
REAL_LIMIT_S = 60.0
"""Real seconds in which what a test waits for must happen."""


class MovedClock:
    """Stands still until a test moves it. Deadlines in this process read it, on all threads; torch's do not."""

    def __init__(self) -> None:
        self._now_s = clock.now_s()  # deadlines that have begun go on
        self._readers: set[int] = set()

    def now_s(self) -> float:
        now_s = self._now_s
        self._readers.add(get_ident())  # afterwards: whoever counts readers moves the clock for all of them
        return now_s

    def advance(self, seconds: float) -> None:
        """Move the clock; who waits sees it within `POLL_S` real seconds."""
        self._now_s += seconds

    def wait_for_readers(self, count: int) -> None:
        """Wait until `count` threads have asked for the time: a wait does so when it begins."""
        end_s = monotonic() + REAL_LIMIT_S
        while len(self._readers) < count:
            _pause(end_s, f"{len(self._readers)} threads of {count} have asked for the time")

    def advance_until(self, is_over: Callable[[], bool], step_s: float = 1.0) -> None:
        """Move the clock by `step_s` again and again until ``is_over()``, or raise `TimeoutError`."""
        end_s, begin_s = monotonic() + REAL_LIMIT_S, self._now_s
        while not is_over():
            waiting, self._readers = self._readers, set()
            moved_s = monotonic()
            while not is_over() and (passed_s := monotonic() - moved_s) < SEEN_S:
                if waiting <= self._readers and passed_s >= MOVE_S:
                    break  # else some of them may wait no more
                _pause(end_s, f"what was waited for did not happen within {self._now_s - begin_s:g} s")
            self.advance(step_s)


def _pause(end_s: float, what: str) -> None:
    """Give other threads real time."""
    if monotonic() > end_s:
        raise TimeoutError(what)
    Event().wait(2 * POLL_S)


@contextmanager
def moved_clock() -> Iterator[MovedClock]:
    """Let all deadlines of this process read a `MovedClock` inside the block; end there what begins there."""
    moved = MovedClock()
    before = clock.now_s, clock.slice_s
    clock.now_s, clock.slice_s = moved.now_s, POLL_S  # the test may move the clock meanwhile
    try:
        yield moved
    finally:
        clock.now_s, clock.slice_s = before
