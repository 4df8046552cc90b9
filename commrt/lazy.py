# SPDX-License-Identifier: Apache-2.0
"""Names of a package that are imported when they are first used, so that ``import commrt`` needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

__all__ = ["names_in"]


def names_in(package: str, modules: Mapping[str, Sequence[str]], rooms: Sequence[str] = ()) -> Callable[[str], object]:
    """Return a package's ``__getattr__``: `modules` says which module has which names; `rooms` are its own packages."""
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> object:
        if name in rooms:
            return import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name]), name)

    return get
