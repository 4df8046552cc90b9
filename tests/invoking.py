# SPDX-License-Identifier: Apache-2.0
"""The command as a user calls it, in this process."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from commrt.cli.app import app
from commrt.errors import UsageError


def invoke(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})


def told(*args):
    """Its JSON."""
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*args):
    """What it says of bad input."""
    with pytest.raises(UsageError) as refusal:
        CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    return str(refusal.value)
