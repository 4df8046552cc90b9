# SPDX-License-Identifier: Apache-2.0
"""What modules of a model hold for commrt, and leave behind where they are copied or pickled.

It keeps objects alive and passes calls on; it changes nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ATTRIBUTE = "_commrt"
"""Where a module holds a `Keeper`."""


class ModuleHook:
    """A hook of a module, on the thread that calls the module or its ``state_dict()``.

    Does nothing on copies and pickles of the module, nor while torch compiles it.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Pass everything on; a compiled graph would break here."""
        if not (torch.compiler.is_compiling() or self._call is None):
            self._call(*args)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


class Keeper(list[object]):
    """Keeps its items alive as long as the module that holds it; copied or pickled it is None."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()
