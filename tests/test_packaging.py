# SPDX-License-Identifier: Apache-2.0
"""What is shipped works outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of what git knows, so that a build leaves nothing in the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    subprocess.run(["tar", "--null", "-T", "-", "-cf", source / "tree.tar"], cwd=ROOT, input=tracked.stdout, check=True)
    subprocess.run(["tar", "-xf", "tree.tar"], cwd=source, check=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source],
        capture_output=True,
        check=True,
    )
    return next(out.glob("*.whl"))


def test_the_wheel_has_one_top_level_package_with_all_rooms(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"commrt"}
    assert {"commrt/kernels/pack.py", "commrt/algorithms/torus.py", "commrt/py.typed"} <= set(names)


def test_the_wheel_works_from_elsewhere(wheel, tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel],
        capture_output=True,
        check=True,
    )
    call = "import commrt; from commrt.cli.app import app; print(commrt.__file__); app(['verify', 'torus2d', '--json'])"
    result = subprocess.run(
        [sys.executable, "-c", call],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    where, record = result.stdout.splitlines()
    assert where.startswith(str(tmp_path))
    assert json.loads(record)["ok"]


def test_importing_commrt_is_light():
    call = "import sys, commrt; print(sorted({'torch', 'triton', 'cupy', 'numpy', 'typer'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
