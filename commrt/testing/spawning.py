# SPDX-License-Identifier: Apache-2.0
"""Call a function as several ranks on this machine, from a script or a notebook.

Each rank is a new process that imports for itself, so this one may have threads, or have used a
GPU. It waits for them, kills what still runs at the end, and changes nothing here. On the thread
that calls.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from multiprocessing import current_process, get_context
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch

from commrt.algorithms.arguments import require_whole
from commrt.errors import CommrtError, UsageError
from commrt.runtime.object_rows import packed, unpacked
from commrt.testing.processes import Crew
from commrt.testing.ranks import severity

CAUSE_S = 2.0
"""How long the others may take after one has failed: their error may be the cause."""
GUARD = 'call commrt.spawn() under `if __name__ == "__main__":`'


class _End(NamedTuple):
    """What a rank sends at its end."""

    result: bytes = b""
    error: Exception | None = None
    trace: str = ""


def spawn(function: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Any]:
    """Call ``function(*args)`` in `ranks` new processes, and return what each rank returned.

    There ``commrt.init()`` joins them. In a script, call it under ``if __name__ == "__main__":``,
    as each process imports the script. `function` stands at the top of a script or module, so not
    in a notebook's cell. Arguments and results are numbers, strings, bytes, tensors, and lists,
    tuples or dicts of these; each rank has copies of its own.

    Raises the error of the rank that failed, with its traceback as a note, and kills the others
    after a moment. Raises `UsageError` for what cannot be sent to a new process.
    """
    require_whole("ranks", ranks)
    sent = _name_of(function), _bytes_of(args)
    if getattr(current_process(), "_inheriting", False):  # it imports the script that started it
        raise UsageError(f"a new process imports this script, and would start others: {GUARD}")
    crew = Crew(ranks, _call, sent, get_context("spawn"), None, inf, daemon=False)
    try:
        crew.start()
        crew.listen(inf, patience_s=lambda: CAUSE_S if any(_failures(crew)) else inf)
    finally:
        crew.close()
    if failures := [*_failures(crew)]:
        raise min(failures, key=severity)
    return [_value_of(outcome.value.result) for outcome in crew.outcomes]


def _name_of(function: Callable[..., Any]) -> str:
    """Return by what name a new process finds `function`."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "")
    found = None
    with suppress(AttributeError, ImportError, ValueError):
        found = resolve_name(f"{module}:{name}")
    if found is not function:
        raise UsageError(
            f"a new process cannot find {function!r:.80}: give a function that stands at the top of"
            " a script or module, without arguments in it"
        )
    if module == "__main__" and not hasattr(sys.modules[module], "__file__"):
        raise UsageError(
            f"a new process cannot import {name}() from a notebook or prompt: write it into a file,"
            " as by %%writefile, and import it from there"
        )
    return f"{module}:{name}"


def _bytes_of(values: object) -> bytes:
    return packed(values).numpy().tobytes()


def _value_of(data: bytes) -> Any:
    return unpacked(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _call(_: object, name: str, args: bytes) -> _End:
    """Call the function in a new process."""
    try:
        return _End(_bytes_of(resolve_name(name)(*_value_of(args))))
    except Exception as error:  # the parent raises it
        return _End(error=_sendable(error), trace=traceback.format_exc())


def _sendable(error: Exception) -> Exception:
    """Return `error`, or its text if it cannot be made again elsewhere."""
    try:
        again = copy.copy(error)
    except Exception:
        again = None
    if type(again) is type(error):
        return error
    return CommrtError(f"{type(error).__name__}: {error}")


def _failures(crew: Crew) -> Iterator[Exception]:
    """Yield the errors of ranks, in the order in which they ended."""
    for outcome in crew.ended:
        end: _End | None = outcome.value
        if end is None:
            yield CommrtError(
                f"rank {outcome.rank} ended with exit code {outcome.exit_code} and returned"
                f" nothing: what it printed says why; in a script, {GUARD}"
            )
        elif end.error is not None:
            if not hasattr(end.error, "__notes__"):
                end.error.add_note(f"rank {outcome.rank}: {end.trace}")
            yield end.error
