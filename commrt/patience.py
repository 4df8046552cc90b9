# SPDX-License-Identifier: Apache-2.0
"""Asking what may never answer: a store whose process was stopped keeps its clients waiting for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["within"]

T = TypeVar("T")


def within(limit_s: float, ask: Callable[[], T]) -> T:
    """The answer of ``ask()``, or its error; raises `TimeoutError` if there is none after `limit_s`.

    `ask` runs on a thread of its own, which is left behind if it never ends.
    """
    answer: Future[T] = Future()

    def asking() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # whoever waits raises it
            answer.set_exception(error)

    threading.Thread(target=asking, daemon=True, name="commrt-asks").start()
    return answer.result(limit_s)
