# SPDX-License-Identifier: Apache-2.0
"""Decorators of tests: one test for all cases of a rule, and one that runs as all ranks of a world; and the cases."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import combinations, cycle, islice, product
from typing import Any

import pytest

from commrt.testing.ranks import run_ranks

FAILURES = (Exception, pytest.fail.Exception, pytest.skip.Exception)
Test = Callable[..., None]


def for_each(
    names: str | tuple[str, ...], cases: Iterable[Any], ids: Iterable[str] | None = None
) -> Callable[..., Any]:
    """Run a test with each of `cases`, as `pytest.mark.parametrize` does, in one item.

    `ids` name the cases in the message of a failure; without them, their values do.
    """
    chosen = [*cases]
    rows = [dict(zip(names, case, strict=True)) if isinstance(names, tuple) else {names: case} for case in chosen]
    said = [*map(_named, rows)] if ids is None else [*ids]

    def decorate(test: Test) -> Test:
        @wraps(test)
        def all_cases(**fixtures: Any) -> None:
            errors = [
                error
                for name, row in zip(said, rows, strict=True)
                if (error := _failure(test, name, fixtures | row)) is not None
            ]
            skips = [error for error in errors if isinstance(error, pytest.skip.Exception)]
            if skips and len(skips) == len(errors):
                raise skips[0]
            if errors:
                named = "\n".join(error.__notes__[-1] for error in errors)
                raise BaseExceptionGroup(f"{len(errors)} of {len(rows)} cases failed:\n{named}", errors)

        return _without(all_cases, test, rows[0])

    return decorate


def on_ranks(ranks: int, **options: Any) -> Callable[[Test], Test]:
    """Run a test on `ranks` threads, each with its `world`; `options` are those of `run_ranks`."""

    def decorate(test: Test) -> Test:
        @wraps(test)
        def all_ranks(**fixtures: Any) -> None:
            run_ranks(ranks, lambda world: test(world=world, **fixtures), **options)

        return _without(all_ranks, test, ["world"])

    return decorate


def _without(wrapper: Test, test: Test, names: Iterable[str]) -> Test:
    """Let pytest ask `wrapper` for the arguments of `test`, except for `names`, which are no fixtures."""
    given = inspect.signature(test)
    left = [param for param in given.parameters.values() if param.name not in names]
    wrapper.__signature__ = given.replace(parameters=left)  # type: ignore[attr-defined]
    return wrapper


def _failure(test: Test, name: str, values: dict[str, Any]) -> BaseException | None:
    try:
        test(**values)
    except FAILURES as error:
        error.add_note(f"case {name}: {error!r:.300}")
        return error
    return None


def _named(row: dict[str, Any]) -> str:
    return ", ".join(f"{name}={getattr(value, '__name__', value)!s:.80}" for name, value in row.items())


def taking_turns(*options: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return rows of one value of each option, as many as the longest has; shorter ones begin again."""
    lists = [[*option] for option in options]
    most = max(map(len, lists))
    return [*zip(*(islice(cycle(values), most) for values in lists), strict=True)]


def pairwise(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return rows of one value of each option; any two values of two options meet in one row at least."""
    options = [[*choice] for choice in choices]
    rows = [*product(*(range(len(option)) for option in options))]
    left = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(left & _pairs(row)))
        left -= _pairs(best)
        chosen.append(tuple(option[place] for option, place in zip(options, best, strict=True)))
    return chosen


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return {*combinations(enumerate(row), 2)}
