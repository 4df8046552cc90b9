# SPDX-License-Identifier: Apache-2.0
"""Run the `commrt` command, one of a study or of the demo, or a program of a rank, in this process.

A command is given as one line, as words, or as a line and more words that may hold spaces.
"""

import json
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import BytesIO, StringIO, TextIOWrapper
from unittest.mock import patch

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from commrt.errors import UsageError
from commrt.tools.commands.app import app, main

WIDE = {"COLUMNS": "200"}


@cache
def built(program):
    """Return `program` as typer runs it: to build it takes most of the time of a short command."""
    return get_command(program)


class Runner(CliRunner):
    """Typer's, which builds each program once."""

    def invoke(self, program, words, **more):
        with patch("typer.testing._get_command", built):
            return super().invoke(program, words, **more)


def commands_of(group, *names):
    """Yield the names of each command of a group, and the command."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, *names, name)
        else:
            yield (*names, name), command


def words(line, *more):
    return [*str(line).split(), *map(str, more)]


def invoke(line, *more, program=app):
    return Runner().invoke(program, words(line, *more), env=WIDE)


def told(line, *more, program=app):
    """Return what the command prints as JSON."""
    result = invoke(line, *more, "--json", program=program)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(line, *more, program=app):
    """Return the message with which the command refuses bad input."""
    with pytest.raises(UsageError) as refusal:
        Runner().invoke(program, words(line, *more), catch_exceptions=False)
    return str(refusal.value)


def ended(line, *more, program=app):
    """Return the exit code of `program` and what it writes on standard output and standard error."""
    out, err = (TextIOWrapper(BytesIO(), "utf-8", write_through=True) for _ in range(2))
    argv = patch.object(sys, "argv", ["commrt", *words(line, *more)])
    with argv, redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        main(built(program))
    return end.value.code, *(each.buffer.getvalue().decode() for each in (out, err))


def program(_, path, options):
    """Run the program at `path` in a rank of `commrt.testing.processes.run_processes`; return what it prints."""
    sys.argv = [str(path), *options]
    sys.path.insert(0, str(path.parent))  # as Python does
    with redirect_stdout(StringIO()) as said:
        runpy.run_path(str(path), run_name="__main__")
    return said.getvalue()
