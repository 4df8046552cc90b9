# SPDX-License-Identifier: Apache-2.0
"""Names of a package that are imported when they are first used, so that ``import commrt`` needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

__all__ = ["names_in"]


def names_in(package: str, homes: Mapping[str, Sequence[str]], rooms: Sequence[str] = ()) -> Callable[[str], object]:
    """Return a package's ``__getattr__``: `homes` says which module has which names; `rooms` are its own packages."""
    home = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> object:
        if name in rooms:
            return import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home[name]), name)

    return get
