# SPDX-License-Identifier: Apache-2.0
"""The programs that people start from."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.processes
def test_the_gossip_example_learns_under_torchrun():
    torchrun = Path(sys.executable).with_name("torchrun")
    launch = [torchrun, "--standalone", "--nproc-per-node", "2", "--local-addr", "127.0.0.1", EXAMPLES / "gossip.py"]
    done = subprocess.run([*launch, "--passes", "2"], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    accuracy = re.match(r"2 ranks: ([0-9.]+)% of 1,000 test images, replicas were apart by ", done.stdout)
    assert float(accuracy[1]) > 75
