# SPDX-License-Identifier: Apache-2.0
"""Why a communication thread takes no task: what the errors of such calls say.

Constants and a pure function, for any thread.
"""

from __future__ import annotations

from copy import copy

from commrt.errors import Evicted, TransportClosed, TransportError

CLOSED = "the world was closed, so nothing more can be sent: open a new world or group"
IN_A_CALL = (
    "a collective call of this thread has not ended, and what runs within it, such as a signal"
    " handler or a quantizer's rule, can neither communicate nor close anything: set a flag in the"
    " handler and act on it in your loop, or raise an exception to end the call; let a rule only"
    " compute"
)
INHERITED = (
    "this world belongs to the process that opened it, and a forked child cannot use it:"
    " communicate in that process only, or start this one with multiprocessing's spawn or a"
    " launcher and call init() in it"
)
ON_COMM_THREAD = (
    "a callback of a future runs on the thread that communicates, so it can neither wait for a"
    " transfer that comes later, nor close the world, nor use one that survives lost ranks: do that"
    " where the future's transfer was begun"
)


def refusal_after(failure: BaseException) -> TransportError:
    """Return the error of a call after `failure` ended the world: it says what that was."""
    if isinstance(failure, Evicted):
        return copy(failure)
    text = failure.what if isinstance(failure, TransportError) else str(failure)
    cause = f"It was {type(failure).__name__}" + (f": {text}" if text else "")
    if not isinstance(failure, TransportError):
        return TransportClosed(f"this world was given up: open a new world or group. {cause}")
    what = "an earlier transfer failed, so this one was not started: open a new world or group"
    refusal = TransportClosed(f"{what}. {cause}", failure.place)
    refusal.elsewhere = failure.elsewhere
    return refusal
