# SPDX-License-Identifier: Apache-2.0
"""Things that live as long as a module does.

A hook on a parameter is held by C++, where the garbage collector does not look: whatever it refers to stays for ever
if it refers back. So hooks refer weakly, and what they need hangs on the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["Anchor", "Hook", "drop", "hold"]

PLACE = "_commrt"


class Anchor:
    """Keeps `kept` alive; a copy or a pickle of the module has None in its place."""

    def __init__(self, kept: object) -> None:
        self.kept = kept

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """See the class."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Hook:
    """A hook of a module that does nothing on a copy of the module, nor after a pickle."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """As given; not where torch compiles, which would break its graph here."""
        if not torch.compiler.is_compiling():
            self._call(*args)

    def __deepcopy__(self, memo: dict[int, object]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _silent, ()


def _silent() -> Callable[..., None]:
    return _nothing


def _nothing(*args: Any) -> None:
    """What a hook does on a copy."""


def hold(kept: object, modules: Iterable[nn.Module]) -> None:
    """Keep `kept` alive until the last of `modules` is gone, or `drop`."""
    for module in modules:
        module.__dict__[PLACE] = Anchor(kept)


def drop(modules: Iterable[nn.Module]) -> None:
    """Take back what `hold` did."""
    for module in modules:
        module.__dict__.pop(PLACE, None)
