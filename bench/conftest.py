# SPDX-License-Identifier: Apache-2.0
"""Make this folder importable, also in worker processes, which inherit ``sys.path``; write records at once."""

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from records import Record, append  # of this folder

Keep = Callable[[Sequence[Record]], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for files with a JSON line per measurement and per test, complete even if the run is cut short.

    A third one is for the profile of a step.
    """
    parser.addoption("--records", type=Path)
    parser.addoption("--outcomes", type=Path)
    parser.addoption("--step-profile", type=Path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record how a test ended."""
    report = yield
    path = item.config.getoption("--outcomes")
    if path and (report.when == "call" or report.outcome != "passed"):
        why = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longreprtext
        figures: dict[str, list[object]] = {}
        for name, value in report.user_properties:
            figures.setdefault(name, []).append(value)
        append(path, [{"test": item.name, "outcome": report.outcome, "why": why, "figures": figures}])
    return report


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: on a busy machine, two wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Keep:
    """Return a function that appends records to the file, if there is one."""
    return partial(append, request.config.getoption("--records"))
