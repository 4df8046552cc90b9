# SPDX-License-Identifier: Apache-2.0
"""What others have left on the store, read with care: whoever reaches its port can write there."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from commrt.errors import DisagreementError

__all__ = ["GARBLED", "listed", "mapped", "not_understood", "number", "require", "understood", "where"]

GARBLED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, struct.error)
"""What taking apart something else than was expected raises."""
BELL = re.compile(r"[0-9]{1,9} [0-9A-Za-z.:%_-]{1,255} [0-9]{1,5}")

T = TypeVar("T")


def understood(what: str, said: bytes | str, read: Callable[[bytes], T]) -> T:
    """What `read` makes of `said`; raises `DisagreementError` if that is not what a rank says under `what`.

    >>> understood("its step", b"3", int)
    3
    """
    try:
        return read(said.encode() if isinstance(said, str) else said)
    except GARBLED as error:
        raise not_understood(what, said) from error


def not_understood(what: str, said: bytes | str) -> DisagreementError:
    """What to raise for that."""
    return DisagreementError(
        f"what the store holds as {what} cannot be understood: {said[:60]!r}. Another version of commrt or another "
        "program writes to it: start all ranks with one version, with a MASTER_PORT of their own"
    )


def require(is_as_expected: object) -> None:
    """Raise `ValueError` unless; for use under `understood`."""
    if not is_as_expected:
        raise ValueError("not as expected")


def number(value: object, least: int = 0) -> int:
    """A whole number, of at least `least` and below 2^63; raises `ValueError`."""
    require(isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 63)
    return int(value)  # type: ignore[call-overload, no-any-return]  # it is one


def listed(said: bytes, length: int | None = None) -> list[Any]:
    """A JSON list of `length`; raises `ValueError`."""
    found = json.loads(said)
    require(isinstance(found, list) and length in (None, len(found)))
    return list(found)


def mapped(said: bytes) -> Mapping[str, Any]:
    """A JSON object; raises `ValueError`."""
    found = json.loads(said)
    require(isinstance(found, dict))
    return dict(found)


def where(said: bytes) -> str:
    """The birth of a process and the address of its doorbell, as one text; raises `ValueError`."""
    bell = said.decode()
    require(BELL.fullmatch(bell) and int(bell.split()[2]) < 65536)
    return bell
