# SPDX-License-Identifier: Apache-2.0
"""The errors that a process group raises: commrt's, each of which is torch's too.

So code written for any backend catches them. Each thread turns its own errors into these at the
border to torch; below it there are commrt's only. The classes are made at import: one for each of
`commrt.errors`, with the same name.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import DistBackendError

from commrt import errors


def _torchs_too(kind: type[errors.CommrtError]) -> Any:
    names = {"__module__": __name__, "__doc__": f"See `commrt.errors.{kind.__name__}`."}
    return type(kind.__name__, (kind, DistBackendError), names)


_OURS: dict[type, Any] = {
    kind: _torchs_too(kind)
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.CommrtError)
}
"""By the kind of commrt."""
globals().update({kind.__name__: kind for kind in _OURS.values()})  # where a pickle looks for them


def as_dist_error(error: errors.CommrtError) -> errors.CommrtError:
    """Return an error that says what `error` does, and is torch's too; raise it from its cause."""
    if isinstance(error, DistBackendError):
        return error
    # of a class that stands elsewhere, the nearest one
    kind = next(_OURS[each] for each in type(error).__mro__ if each in _OURS)
    both: errors.CommrtError = kind.__new__(kind)
    both.args = error.args
    vars(both).update(vars(error))
    return both.with_traceback(error.__traceback__)
