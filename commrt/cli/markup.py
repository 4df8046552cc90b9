# SPDX-License-Identifier: Apache-2.0
"""HTML and SVG out of nested calls; whatever is not markup already is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["Content", "Markup", "joined", "tag"]

VOID = {"meta", "br"}
"""Elements without an end."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | int | float | Iterable["Content"]
"""Markup stays, other text is escaped, of more than one all are taken in order."""


def tag(name: str, /, *content: Content, **attributes: object) -> Markup:
    r"""An element. Attributes that are None are left out; ``_`` in their names is a hyphen, at the end it is dropped.

    >>> tag("p", "1 < 2 ", tag("b", "so"), class_="a\"b", data_step=3)
    '<p class="a&quot;b" data-step="3">1 &lt; 2 <b>so</b></p>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>" if name in VOID else f"<{name}{given}>{joined(content)}</{name}>")


def joined(content: Content) -> Markup:
    """All of `content`, one after the other.

    >>> joined(["a & b", [tag("br"), 7]])
    'a &amp; b<br>7'
    """
    if isinstance(content, Markup):
        return content
    if isinstance(content, str | int | float):
        return Markup(escape(str(content)))
    return Markup("".join(map(joined, content)))
