# SPDX-License-Identifier: Apache-2.0
"""Run each test that torch runs with Gloo, also where a decorator names Gloo instead of a feature.

torch's decorators mark a test as skipped; they do not change it. To learn what torch would run with another backend,
this module loads torch's file once more under that backend's name and reads the marks. A test that Gloo runs but that
is marked for us gets a wrapper without the mark. The test and its other decorators stay as they are.

Tests that torch skips for all backends, for an open issue or for lack of a GPU, stay skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import wraps
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

from torch_conformance.suite import BACKEND, SOURCE, TESTS, Conformance

_MARKS = ("__unittest_skip__", "__unittest_skip_why__")


def allow(backends: Iterable[str]) -> dict[str, str]:
    """Let the tests run that torch runs with any of `backends`. Return whose rules let each test run."""
    rules = dict.fromkeys(not_skipped(Conformance), BACKEND)
    for backend in backends:
        for test in not_skipped(tests_for(backend)):
            if test not in rules:
                rules[test] = backend
                setattr(Conformance, test, without_mark(getattr(Conformance, test)))
    return rules


def not_skipped(tests: type) -> list[str]:
    """Return the tests that no decorator skips for good."""
    return [name for name in TESTS if not getattr(getattr(tests, name), "__unittest_skip__", False)]


def tests_for(backend: str) -> type:
    """Return torch's tests as they are when BACKEND is `backend`."""
    spec: Any = spec_from_file_location(f"distributed_test_for_{backend}", SOURCE)
    module: Any = module_from_spec(spec)
    os.environ["BACKEND"] = backend
    try:
        spec.loader.exec_module(module)
    finally:
        os.environ["BACKEND"] = BACKEND
    return module.DistributedTest._DistTestBase


def without_mark(test: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the same test without the mark that skips it."""

    @wraps(test)
    def unmarked(self: Any) -> None:
        test(self)

    for mark in _MARKS:
        vars(unmarked).pop(mark, None)
    return unmarked
