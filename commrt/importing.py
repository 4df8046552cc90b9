# SPDX-License-Identifier: Apache-2.0
"""Names of a package that are imported when they are first used: ``import commrt`` needs no torch.

The package's ``__init__.pyi`` is the one list of them, for type checkers and at run time: each line
imports names from the modules that define them. It is read once, when a name is first used, on any
thread; nothing else is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module

from commrt.other_names import IN_COMMRT


def names_of(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of `package`, whose names are those of its
    ``__init__.pyi``.
    """

    def get(name: str) -> object:
        if name == "__all__":
            return sorted(name for name, home in homes(package).items() if home != package)
        if name.startswith("__") or name not in homes(package):
            hint = _hint(package, name)
            says = f"module {package!r} has no attribute {name!r}{hint}"
            if hint:
                raise AttributeError(says)
            # Python adds a similar name
            raise AttributeError(says, name=name, obj=sys.modules[package])
        home = homes(package)[name]
        return (
            import_module(f"{home}.{name}")
            if home == package
            else getattr(import_module(home), name)
        )

    return get, lambda: sorted({*vars(sys.modules[package]), *homes(package)})


def _hint(package: str, name: str) -> str:
    """Return where a class called `name` is, or what `package` has in other letters, or what others
    call so, if any.
    """
    if package == "commrt" and name in IN_COMMRT:
        return f": use {IN_COMMRT[name]}"
    if not name[0].isalpha():
        return ""
    found = [f"{package}.{each}" for each in homes(package) if each.lower() == name.lower()]
    if name[0].isupper():
        inside = [f"{home}.{each}" for each, home in homes(package).items() if home == package]
        found += [f"{each}.{name}" for each in inside if name in homes(each)]
    return f": did you mean {' or '.join(found)}?" if found else ""


@cache
def homes(package: str) -> dict[str, str]:
    """Return by name the module that defines it; for a package inside `package`,
    that is `package`.
    """
    import ast  # noqa: PLC0415  # takes as long as the rest of ``import commrt``
    from pkgutil import get_data  # noqa: PLC0415  # reads from archives too

    stub = ast.parse(get_data(package, "__init__.pyi") or b"")
    imports = [each for each in stub.body if isinstance(each, ast.ImportFrom)]
    return {alias.name: str(each.module) for each in imports for alias in each.names}
