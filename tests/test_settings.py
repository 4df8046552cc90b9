# SPDX-License-Identifier: Apache-2.0
"""Settings of optimizers become the same bits in every process, and differences that last are found."""

import pytest
import torch
from commands import program

from commrt.testing.processes import run_processes
from commrt.training.hooks import settings_digest

PROGRAM = """
import torch
from commrt.training.hooks import settings_digest
print(settings_digest([torch.optim.AdamW([torch.ones(1)], lr=0.25)], step=7))
"""


def adamw(lr):
    return [torch.optim.AdamW([torch.ones(1)], lr=lr)]


@pytest.mark.processes
def test_another_process_finds_the_same_bits(tmp_path):
    tmp_path.joinpath("digest.py").write_text(PROGRAM)
    (found,) = run_processes(1, program, tmp_path / "digest.py", [])
    assert (found.error, int(found.value)) == (None, settings_digest(adamw(0.25), step=7))


def test_settings_that_are_alike_by_chance_differ_in_other_steps():
    rates = [0.1 + i / 1000 for i in range(1, 1000)]
    alike = next(lr for lr in rates if settings_digest(adamw(lr), 0) == settings_digest(adamw(0.1), 0))
    assert sum(settings_digest(adamw(alike), step) == settings_digest(adamw(0.1), step) for step in range(64)) < 8


def test_what_is_no_number_that_can_be_read_is_left_out():
    optimizers = adamw(0.1)
    before = settings_digest(optimizers, 0)
    for other in ("adaptive", None, torch.ones(3), torch.ones((), device="meta"), 1j, print):
        optimizers[0].param_groups[0]["other"] = other
        assert settings_digest(optimizers, 0) == before, other
