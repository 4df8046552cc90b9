# SPDX-License-Identifier: Apache-2.0
"""Docstrings for the reference: doctests become blocks of code, which Markdown would take for
quotations.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"(?:^>>> .*(?:\n(?!\n).*)*\n?)+", re.MULTILINE)
LITERAL = re.compile(r"::\n\n((?:    .*\n?|\n)+)")


class Doctests(Extension):
    """Fences around what is code."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:  # noqa: D102  # griffe's
        if obj.docstring is not None:
            fenced = DOCTEST.sub(
                lambda code: f"```pycon\n{code[0].rstrip()}\n```\n", obj.docstring.value
            )
            obj.docstring.value = LITERAL.sub(
                lambda code: f":\n\n```text\n{_dedented(code[1])}\n```\n", fenced
            )


def _dedented(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.rstrip().split("\n"))
