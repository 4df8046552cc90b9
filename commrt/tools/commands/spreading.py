# SPDX-License-Identifier: Apache-2.0
"""How typer reads a command that takes groups of options as one object.

Commands stay as they are: typer gets a wrapper, whose signature has the fields of the groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` as typer reads it: each field of a group, a named tuple, is an option."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {
        name: kind
        for name, kind in hints.items()
        if isinstance(kind, type) and issubclass(kind, tuple)
    }

    @wraps(command)
    def spread_out(**given: Any) -> None:
        whole = {
            name: kind(**{field: given.pop(field) for field in kind._fields})
            for name, kind in groups.items()
        }
        command(**given, **whole)

    options = list[Parameter]()
    for name, parameter in signature(command).parameters.items():
        options += (
            _fields(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])]
        )
    told: Any = spread_out
    told.__signature__ = Signature(
        [option.replace(kind=Parameter.KEYWORD_ONLY) for option in options]
    )
    told.__annotations__ = {option.name: option.annotation for option in options}
    return spread_out


def _fields(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    default = group._field_defaults
    return [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=default.get(name, Parameter.empty),
            annotation=hints[name],
        )
        for name in group._fields
    ]
