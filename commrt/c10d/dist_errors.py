# SPDX-License-Identifier: Apache-2.0
"""The errors that a process group raises: commrt's, each of which is torch's too.

So code written for any backend catches them. Each thread turns its own errors into these at the
border to torch; below it there are commrt's only.
"""

from __future__ import annotations

from torch.distributed import DistBackendError

from commrt import errors
from commrt.errors import CommrtError


class UsageError(errors.UsageError, DistBackendError):
    """See `commrt.errors.UsageError`."""


class ScheduleError(errors.ScheduleError, DistBackendError):
    """See `commrt.errors.ScheduleError`."""


class DisagreementError(errors.DisagreementError, DistBackendError):
    """See `commrt.errors.DisagreementError`."""


class TransportError(errors.TransportError, DistBackendError):
    """See `commrt.errors.TransportError`."""


class DeadlineExceeded(errors.DeadlineExceeded, DistBackendError):
    """See `commrt.errors.DeadlineExceeded`."""


class PeerLost(errors.PeerLost, DistBackendError):
    """See `commrt.errors.PeerLost`."""


class SizeMismatch(errors.SizeMismatch, DistBackendError):
    """See `commrt.errors.SizeMismatch`."""


class CallMismatch(errors.CallMismatch, DistBackendError):
    """See `commrt.errors.CallMismatch`."""


class TransportClosed(errors.TransportClosed, DistBackendError):
    """See `commrt.errors.TransportClosed`."""


_OURS: dict[type[CommrtError], type[CommrtError]] = {
    ours.__bases__[0]: ours
    for ours in (
        UsageError,
        ScheduleError,
        DisagreementError,
        TransportError,
        DeadlineExceeded,
        PeerLost,
        SizeMismatch,
        CallMismatch,
        TransportClosed,
    )
}
"""By the kind of commrt."""


def as_dist_error(error: CommrtError) -> CommrtError:
    """Return an error that says what `error` does, and is torch's too; raise it from its cause."""
    kind = _OURS.get(type(error))
    if kind is None:  # it is one already
        return error
    both = kind.__new__(kind)
    both.args = error.args
    vars(both).update(vars(error))
    return both.with_traceback(error.__traceback__)
