# SPDX-License-Identifier: Apache-2.0
"""Run something at a chosen bytecode of a task, as a signal or another thread would by chance."""

from __future__ import annotations

import sys
from itertools import count


def interposed(task, at, act):
    """Run `task`, with a call of `act` before its bytecode number `at`; False if it ended before that."""
    reached, acted = count(), []

    def trace(frame, event, argument):
        frame.f_trace_opcodes = True
        if event == "call":
            sys.settrace(trace)  # or Python 3.12 does not notice the line before
        if event == "opcode" and next(reached) == at:
            acted.append(at)
            act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        task()
    finally:
        sys.settrace(before)
    return bool(acted)


def interrupted(task, at):
    """Run `task`, with a Ctrl-C before bytecode number `at`; False if it ended before that."""

    def interrupt():
        raise KeyboardInterrupt

    try:
        interposed(task, at, interrupt)
    except KeyboardInterrupt:
        return True
    except TimeoutError:
        pass
    return False
