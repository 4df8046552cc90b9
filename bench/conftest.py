# SPDX-License-Identifier: Apache-2.0
"""Makes this folder importable, here and in worker processes, which inherit ``sys.path``; records as they are made."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

Keep = Callable[[dict[str, Any]], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--records FILE``: a line of JSON for each measurement, there also if the run is cut short."""
    parser.addoption("--records", type=Path)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch uses no other thread: two of them on a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Keep:
    """Append a record to the file, if there is one."""

    def append(record: dict[str, Any]) -> None:
        if path := request.config.getoption("--records"):
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    return append
