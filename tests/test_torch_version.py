# SPDX-License-Identifier: Apache-2.0
"""What is said of versions of torch that commrt was not tested with."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from commrt.errors import UsageError
from commrt.runtime.torch_version import NEWEST, OLDEST, check_torch_version

HOUSE = Path(__file__).parents[1]


def test_a_torch_that_is_too_old_is_refused_with_the_version_to_install():
    with pytest.raises(UsageError, match=f"torch 2.6.0 is too old for commrt: install torch {OLDEST} or later"):
        check_torch_version("2.6.0")


def test_a_torch_that_is_newer_than_the_tested_ones_is_named_once(caplog):
    for _ in range(2):
        check_torch_version("2.99.0.dev20270101+cu130")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "torch 2.99.0.dev20270101+cu130 is newer than" in line


@pytest.mark.parametrize("version", [f"{OLDEST}.0", f"{NEWEST}.9+cpu", "2.10.0a0"])
def test_nothing_is_said_of_a_tested_torch(caplog, version):
    check_torch_version(version)
    assert not caplog.records


def test_the_oldest_torch_is_that_of_pyproject_and_of_the_readme():
    needs = tomllib.loads((HOUSE / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    assert f"torch>={OLDEST}" in needs
    assert f"torch {OLDEST} or later" in (HOUSE / "README.md").read_text("utf-8")
