# SPDX-License-Identifier: Apache-2.0
"""A watch over callbacks of futures, which run on the communication thread and may never return.

For a thread of its own, which writes nothing: it logs, and `on_stuck` ends the world.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from commrt.errors import DeadlineExceeded
from commrt.threads.deadline import Deadline
from commrt.threads.future import Future

_log = logging.getLogger("commrt")

STUCK = (
    "a callback of a future kept the communication thread waiting for longer than {:g} s, so the"
    " world was given up: let it wait for no other thread and for no transfer that comes later, but"
    " begin in it what it waits for"
)


def watch_callbacks(
    running: Callable[[], object | None],
    limit_s: Callable[[], float],
    ended: Future[None],
    on_stuck: Callable[[BaseException], None],
) -> None:
    """Call `on_stuck` if callbacks take longer than ``limit_s()``; return once `ended` is set.

    ``running()`` is another object each time that callbacks begin or go on; None while none runs.
    `on_stuck` runs on the calling thread.
    """
    seen = None
    deadline = Deadline(limit_s())
    while not ended.done():
        with suppress(TimeoutError):
            ended.result(deadline.poll_s)
        now = running()
        if now is None or now is not seen:
            seen = now
            deadline = Deadline(limit_s())
        elif deadline.left_s <= 0:
            failure = DeadlineExceeded(STUCK.format(limit_s()))
            _log.error("commrt: %s", failure)
            on_stuck(failure)
