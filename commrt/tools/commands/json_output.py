# SPDX-License-Identifier: Apache-2.0
"""JSON as ``--json`` prints it."""

from __future__ import annotations

import json
from math import isfinite

__all__ = ["json_of"]


def json_of(facts: object) -> str:
    """Return `facts` as JSON; numbers that are not finite become null.

    >>> json_of({"loss": float("nan"), "steps": [1, 2.5]})
    '{"loss": null, "steps": [1, 2.5]}'
    """
    return json.dumps(_finite(facts), allow_nan=False)


def _finite(facts: object) -> object:
    match facts:
        case dict():
            return {key: _finite(value) for key, value in facts.items()}
        case list() | tuple():
            return [_finite(value) for value in facts]
        case float() if not isfinite(facts):
            return None
    return facts
