# SPDX-License-Identifier: Apache-2.0
"""Whatever is given to `attach` and `init`: it is used, or refused in words before anything was sent."""

import pytest
import torch
from fuzzing import NUMBERS, VALUES, cases, met
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import commrt
from commrt.testing.ranks import local_worlds

THINGS = (
    VALUES
    | NUMBERS
    | st.sampled_from([object(), nn.Linear, nn.Linear(1, 1), commrt.Ring, commrt.Ring(), torch.ones(1), len])
)
OPTIONS = {
    **dict.fromkeys(["optimizer", "world", "bucket_cap_mb", "also", "broadcast_buffers", "graphs"], THINGS),
    "algorithm": THINGS | st.just(commrt.BackupWorkers(0)),
    "wire": THINGS | st.sampled_from([torch.float16, torch.int8]),
}


@pytest.fixture(scope="module")
def world():
    (only,) = local_worlds(1)
    with only:
        yield only


@cases(60)
@given(given=st.fixed_dictionaries({}, optional=OPTIONS))
@example(given={"bucket_cap_mb": True})
@example(given={"bucket_cap_mb": 10**400})
@example(given={"bucket_cap_mb": 5e-324})
@example(given={"wire": "fp16"})
@example(given={"broadcast_buffers": "no"})
@example(given={"graphs": "no"})
@example(given={"also": 3})
@example(given={"optimizer": "sgd"})
def test_attach_takes_what_it_can_use_and_refuses_the_rest(world, given):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def attach():
        replica = commrt.attach(model, **{"world": world} | given)
        model(torch.ones(2, 2)).sum().backward()
        replica.detach()

    met(attach)


@cases(50)
@given(model=THINGS)
def test_attach_takes_a_model_and_nothing_else(world, model):
    if not isinstance(model, nn.Module):
        assert met(commrt.attach, model, world=world) is None


@cases(50)
@given(timeout_s=VALUES | NUMBERS, start_timeout_s=VALUES | NUMBERS)
@example(timeout_s="3", start_timeout_s=None)
@example(timeout_s=True, start_timeout_s=None)
@example(timeout_s=[], start_timeout_s=None)
def test_init_takes_deadlines_and_refuses_the_rest(monkeypatch, timeout_s, start_timeout_s):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    world = met(commrt.init, timeout_s, start_timeout_s=start_timeout_s)
    if world is not None:
        world.close()
