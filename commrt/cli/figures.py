# SPDX-License-Identifier: Apache-2.0
"""Pictures as files; matplotlib is imported when one is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from commrt.cli.outputs import require_writable, write
from commrt.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["new_figure", "require_format", "save"]

FORMATS = (".svg", ".png", ".pdf")


def require_format(out: str) -> None:
    """Raise `UsageError` unless `out` can be made."""
    if Path(out).suffix not in FORMATS:
        raise UsageError(f"--out {out}: give a file that ends in {', '.join(FORMATS)}")
    require_writable("--out", out, "picture.svg")


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """In inches; raises `UsageError` without matplotlib."""
    try:
        from matplotlib.figure import Figure as New  # noqa: PLC0415  # heavy, and an extra
    except ImportError as error:
        raise UsageError("pictures need matplotlib: pip install 'commrt[draw]'") from error
    figure = New(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def save(figure: Figure, out: str) -> None:
    """Write it; raises `CommrtError`."""
    write("--out", out, lambda: figure.savefig(out, dpi=150))
