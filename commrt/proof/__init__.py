# SPDX-License-Identifier: Apache-2.0
"""Proofs of schedules by symbolic replay. Needs only numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commrt.lazy import names_in

if TYPE_CHECKING:
    from commrt.proof.replay import prove, verify

_HOMES = {
    "commrt.proof.replay": (
        "prove",
        "verify",
    ),
}

__all__ = ["prove", "verify"]

__getattr__ = names_in(__name__, _HOMES)
