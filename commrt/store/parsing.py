# SPDX-License-Identifier: Apache-2.0
"""Parsers of what ranks write on the store; an error that names a malformed value ends the run.

Pure functions, which take what was read. States of a sampler or replica are checked by them too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import UnionType
from typing import Any, TypeVar

from commrt.errors import DisagreementError

MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
    OverflowError,
    struct.error,
)
"""What a parser raises for bytes that nobody of this version has written."""
T = TypeVar("T")


def parse(what: str, text: bytes | str, read: Callable[[bytes], T]) -> T:
    """Return ``read(text)``; raise `DisagreementError`, naming `what`, if it is malformed.

    >>> parse("its step", b"3", int)
    3
    """
    try:
        return read(text.encode() if isinstance(text, str) else text)
    except MALFORMED as error:
        raise malformed(what, text) from error


def malformed(what: str, text: bytes | str) -> DisagreementError:
    """Return the error for a value that cannot be parsed."""
    return DisagreementError(
        f"what the store holds as {what} cannot be parsed: {text[:60]!r}. Another version of commrt"
        " or another program writes to it: start all ranks with one version, with a MASTER_PORT of"
        " their own"
    )


def require(is_as_expected: object) -> None:
    """Raise `ValueError` unless the condition holds; for use in functions that `parse` calls."""
    if not is_as_expected:
        raise ValueError("not as expected")


def parse_int(value: object, least: int = 0) -> int:
    """Return `value` as a whole number of at least `least` and below 2^63; raise `ValueError`."""
    require(isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 63)
    return int(value)  # type: ignore[call-overload, no-any-return]  # it is one


def typed(values: Any, *kinds: type | UnionType) -> list[Any]:
    """Return `values` if a list of these kinds, integers from 0 on; else raise `ValueError`."""
    require(isinstance(values, list))
    for value, kind in zip(values, kinds, strict=True):
        if type(value) is int:
            parse_int(value)
        require(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)))
    return list(values)
