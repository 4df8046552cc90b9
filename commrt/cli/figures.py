# SPDX-License-Identifier: Apache-2.0
"""Pictures as files; matplotlib is imported when one is made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from commrt.cli.outputs import require_writable, write
from commrt.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["inline", "new_figure", "require_format", "require_matplotlib", "save"]

DARK = 75
"""Of 255."""
FORMATS = (".svg", ".png", ".pdf")


def require_format(out: str) -> None:
    """Raise `UsageError` unless `out` can be made."""
    if Path(out).suffix not in FORMATS:
        raise UsageError(f"--out {out}: give a file that ends in {', '.join(FORMATS)}")
    require_writable("--out", out, "picture.svg")


def require_matplotlib(what: str) -> None:
    """Raise `UsageError` if there is none; takes no time."""
    if find_spec("matplotlib") is None:
        raise UsageError(f"{what} need matplotlib: pip install 'commrt[draw]'")


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


def inline(figure: Figure, prefix: str, colours: Mapping[str, str]) -> str:
    """The picture as an SVG element for a page: ids begin with `prefix`, `colours` are changed, text stays text."""
    from matplotlib import rc_context  # noqa: PLC0415

    out = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r" xmlns(:xlink)?=\"[^\"]*\"", "", svg).replace("xlink:href", "href")
    return re.sub(r"#[0-9a-f]{6}\b", lambda found: colours.get(found[0]) or _for_both(found[0]), svg)


def _for_both(colour: str) -> str:
    """`colour`, or where it is too dark for a dark page, also a lighter one.

    >>> _for_both("#9ecae1"), _for_both("#3d358b")
    ('#9ecae1', 'light-dark(#3d358b, #9e9ac5)')
    """
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    if 0.3 * red + 0.59 * green + 0.11 * blue > DARK:
        return colour
    lighter = "".join(f"{(part + 255) // 2:02x}" for part in (red, green, blue))
    return f"light-dark({colour}, #{lighter})"
