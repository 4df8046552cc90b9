# SPDX-License-Identifier: Apache-2.0
"""Questions to the store that end: the process that holds it may be stopped, and then it never answers.

torch's own timeouts do not help there: after one has expired, the client asks the store to forget the question, and
waits without limit for its consent (torch 2.13).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from torch.distributed import DistNetworkError, Store

from commrt.errors import DeadlineExceeded, PeerLost, Place
from commrt.threads.answer import Answer
from commrt.threads.patience import Patience

__all__ = ["ANSWER_S", "HOLDER", "another_connection", "ask", "begun", "forget", "settle", "within"]

ANSWER_S = 2.0
"""How long a store may take to answer what it knows already."""
HOLDER = "the process that holds the store (rank 0, unless a launcher such as torchrun holds it)"

T = TypeVar("T")


def ask(question: Callable[[], T], limit_s: float, rank: int | None = None) -> T:
    """What `question`, which may use a store, returns to `rank` within `limit_s` seconds.

    It runs on a thread of its own, which is abandoned when the time is up (`Patience`). Raises `DeadlineExceeded` then,
    `PeerLost` if the connection to the store broke, and whatever else `question` raises. Cost: 0.14 ms.
    """
    answer, patience = begun(question), Patience(limit_s)
    while not answer.given and (left_s := patience.left_s) > 0:
        with suppress(TimeoutError):  # what counts is whether the answer is there when we look
            answer.error(min(left_s, patience.most_s))
    if not answer.given:
        what = f"the store gave no answer within {limit_s:g} s: {HOLDER} is stopped or cannot be reached"
        raise DeadlineExceeded(what, Place(rank=rank, peer=0))
    try:
        return answer.result()
    except DistNetworkError as error:
        what = f"the connection to the store broke: {HOLDER} ended; look at its output"
        raise PeerLost(what, Place(rank=rank, peer=0)) from error


def another_connection(store: Store) -> Store:
    """To the same `store`, where torch can make one: questions on one wait for each other, and abandoned ones too."""
    with suppress(AttributeError, RuntimeError):
        another: Store = store.clone()  # type: ignore[attr-defined]  # torch's stub is behind
        return another
    return store


def settle(store: Store, key: str, value: str) -> str:
    """Write `value` under `key` unless something is there, and wake those who wait for it; what stands then.

    What stands is decided under a key for which nobody waits, so that who decides it is answered at once, and is copied
    by a message that has no answer. Who dies between the two leaves it to the next who settles the same.
    """
    stands: str = store.compare_set(_decided(key), "", value).decode(errors="replace")
    store.set(key, stands)
    return stands


def forget(store: Store, key: str) -> None:
    """As if nobody had settled `key`."""
    store.delete_key(key)
    store.delete_key(_decided(key))


def _decided(key: str) -> str:
    return f"{key}/decided"


def within(limit_s: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises on a thread of its own, abandoned by a `TimeoutError` when the time is up."""
    return begun(call).result(limit_s)


def begun(call: Callable[[], T]) -> Answer[T]:
    """What `call` will return or raise, on a thread of its own."""
    answer: Answer[T] = Answer()
    threading.Thread(target=_put, args=(call, answer), daemon=True, name="commrt-asking").start()
    return answer


def _put(question: Callable[[], T], answer: Answer[T]) -> None:
    try:
        value = question()
    except BaseException as error:
        answer.fail(error)
    else:
        answer.give(value)
