# SPDX-License-Identifier: Apache-2.0
"""A program, run by each rank of `commrt.testing.processes.run_processes`."""

from __future__ import annotations

import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO


def program(_, path, options):
    """What it prints."""
    sys.argv = [str(path), *options]
    with redirect_stdout(StringIO()) as said:
        runpy.run_path(str(path), run_name="__main__")
    return said.getvalue()
