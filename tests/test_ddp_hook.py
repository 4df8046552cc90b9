# SPDX-License-Identifier: Apache-2.0
"""The communication hook for DistributedDataParallel, and the same bits as attach() and all_reduce()."""

import re

import hooked_ranks
import numpy as np
import pytest
import torch
from rank_pool import Pool

import commrt
from commrt.errors import UsageError

ALIKE = {2: commrt.Torus2D(), 4: commrt.HalvingDoubling()}
"""On 2 and on 4 ranks these add in one order, wherever a value lies on the wire."""
TO_DDP = 1e-6


@pytest.fixture(scope="module")
def pool():
    with Pool(4) as pool:
        yield pool


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "real"),
    [(2, False), pytest.param(2, True, marks=pytest.mark.slow), pytest.param(4, True, marks=pytest.mark.slow)],
)
def test_one_network_trained_in_three_ways_ends_with_the_same_bits(pool, size, real):
    by_rank = pool.values(hooked_ranks.three_ways, ALIKE[size], real, size=size)
    for alone, *ways in by_rank:
        assert all(np.array_equal(params, by_rank[0][1]) for params in ways)
        assert np.abs(ways[0] - alone).max() <= TO_DDP


@pytest.mark.processes
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ddp_with_the_hook_trains_as_ddp_alone_whatever_its_settings(pool, real):
    for found in pool.values(hooked_ranks.settings_of_ddp, real, size=3):
        assert [np.abs(ours - alone).max() <= TO_DDP for alone, ours in found] == [True] * 3


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"algorithm": commrt.Gossip()}, "is no all-reduce"),
        ({"algorithm": commrt.BackupWorkers()}, "is no all-reduce"),
        ({"world": 3}, "world=3 is no world"),
        ({"wire": torch.int8}, r"wire=torch\.int8 cannot travel"),
    ],
    ids=str,
)
def test_a_hook_s_state_is_looked_at_when_it_is_made(given, what):
    with pytest.raises(UsageError, match=what):
        commrt.DDPState(**given)


def test_a_hook_without_a_state_is_refused():
    with pytest.raises(UsageError, match=r"the hook's state is None: call model\.register_comm_hook"):
        commrt.ddp_hook(None, None)


@pytest.mark.slow
@pytest.mark.processes
def test_a_hook_refuses_to_average_over_other_ranks_than_ddp_does(pool):
    for error in pool.values(hooked_ranks.over_two_groups):
        assert re.search(r"DDP has rank [01] of 2, and commrt's world rank \d of 4: call", error)


@pytest.mark.processes
def test_a_hook_refuses_a_second_model_with_the_state_of_the_first_which_can_be_copied(pool):
    ((error, *copied),) = pool.values(hooked_ranks.one_state_for_two_models, size=1)
    assert error == "UsageError: two models were given one DDPState: register each with a state of its own"
    assert copied == [True, True]


@pytest.mark.processes
def test_a_rank_that_fails_is_our_error_and_a_state_begins_anew_in_the_next_world_and_where_it_is_loaded(pool):
    ((error,), *first), ((_,), *second) = pool.values(hooked_ranks.one_state_after_a_failure, size=2)
    assert re.match(r"(PeerLost|TransportClosed): .*step 2, bucket 0 of DDP model 1", error)
    assert first == second == [[2], -1]


@pytest.mark.processes
def test_a_model_that_outlives_its_group_says_so(pool):
    (error,) = pool.values(hooked_ranks.after_its_group, size=1)
    assert error.startswith("UsageError: DDP's process group was destroyed: make a new DDP model")


@pytest.mark.slow
def test_two_models_whose_gradients_ranks_send_in_different_orders_are_told_apart(pool):
    for error in pool.values(hooked_ranks.two_models_in_two_orders, size=2):
        assert error.startswith("DisagreementError: ")
