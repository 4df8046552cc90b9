# SPDX-License-Identifier: Apache-2.0
"""Every algorithm gives the bits that it gave before."""

import json

import bits
import pytest


@pytest.mark.parametrize("case", bits.CASES)
def test_bits_are_those_of_the_file(case):
    """After a change that is meant to change them, ``python dev/bits.py`` writes the file."""
    assert bits.digest(case) == json.loads(bits.FILE.read_text())[case]
