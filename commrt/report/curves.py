# SPDX-License-Identifier: Apache-2.0
"""Files of recorded curves: JSON lines, one line about the run and one for each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from commrt.cost.curve import Curve, Losses
from commrt.errors import UsageError

__all__ = ["curve_text", "read_curve"]

VERSION = 1
HEAD = ("training", "ranks", "batch", "settings", "seed")


def curve_text(curve: Curve) -> str:
    """Return `curve` as the text of a file, which `read_curve` reads."""
    head = {"commrt_curve": VERSION} | {name: getattr(curve, name) for name in HEAD}
    columns = {"loss": curve.losses, "signal": curve.signal, "noise": curve.noise}
    known = {name: values for name, values in columns.items() if values is not None}
    rows = ({name: float(values[step]) for name, values in known.items()} for step in range(len(curve.losses)))
    return "".join(f"{json.dumps(each)}\n" for each in (head, *({"step": i} | row for i, row in enumerate(rows))))


def read_curve(file: str) -> Curve:
    """Return the curve in `file`; raise `UsageError` that names the malformed line."""
    try:
        lines = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    head, *steps = [_parsed(file, number, line) for number, line in enumerate(lines, 1)] or [{}]
    if head.get("commrt_curve") != VERSION:
        raise UsageError(f"{file} is no curve: its first line must say commrt_curve {VERSION}; use train --curve")
    losses, signal, noise = (_column(file, steps, name) for name in ("loss", "signal", "noise"))
    given: dict[str, Any] = {"losses": np.empty(0) if losses is None else losses, "signal": signal, "noise": noise}
    try:
        return Curve(**given, **{name: head[name] for name in HEAD})
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    except (KeyError, TypeError) as error:
        raise UsageError(f"{file}: its first line lacks something: {error!r:.200}") from error


def _parsed(file: str, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}, line {number} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file}, line {number}: give an object such as {{'step': 0, 'loss': 2.3}}")
    return found


def _column(file: str, steps: list[dict[str, Any]], name: str) -> Losses | None:
    """Return one number per step; None if the first step has none."""
    if not steps or name not in steps[0]:
        return None
    try:
        return np.array([float(step[name]) for step in steps], dtype=np.float64)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{file}: a step lacks a number for {name}: {error!r:.200}") from error
