# SPDX-License-Identifier: Apache-2.0
"""Run the `commrt` command, one of a study or of the demo, or a program of a rank, in this process."""

from __future__ import annotations

import json
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, StringIO, TextIOWrapper
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from commrt.errors import UsageError
from commrt.tools.commands.app import app, main


def invoke(*args, program=app):
    return CliRunner().invoke(program, [str(arg) for arg in args], env={"COLUMNS": "200"})


def told(*args, program=app):
    """Return what the command prints as JSON."""
    result = invoke(*args, "--json", program=program)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*args, program=app):
    """Return the message with which the command refuses bad input."""
    with pytest.raises(UsageError) as refusal:
        CliRunner().invoke(program, [str(arg) for arg in args], catch_exceptions=False)
    return str(refusal.value)


def ended(*args, program=app):
    """Return the exit code of `program` and what it writes on standard output and standard error."""
    out, err = (TextIOWrapper(BytesIO(), "utf-8", write_through=True) for _ in range(2))
    argv = patch.object(sys, "argv", ["commrt", *args])
    with argv, redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        main(program)
    return end.value.code, *(each.buffer.getvalue().decode() for each in (out, err))


def program(_, path, options):
    """Run the program at `path` in a rank of `commrt.testing.processes.run_processes`; return what it prints."""
    sys.argv = [str(path), *options]
    sys.path.insert(0, str(path.parent))  # as Python does
    with redirect_stdout(StringIO()) as said:
        runpy.run_path(str(path), run_name="__main__")
    return said.getvalue()
