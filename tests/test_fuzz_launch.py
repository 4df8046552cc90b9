# SPDX-License-Identifier: Apache-2.0
"""Whatever a launcher or a user left in the environment: a place in a world, or one sentence."""

from __future__ import annotations

from itertools import product

import pytest
from cases import for_each
from fuzzing import ODD_TEXTS, TEXTS, cases, met
from hypothesis import example, given
from hypothesis import strategies as st

from commrt.errors import UsageError
from commrt.store.launcher import LAUNCHERS, chosen_transport, default_timeout_s, first_host, launched

NAMES = sorted(
    {name for one in LAUNCHERS for name in (one.rank, one.size, one.local_rank, one.local_size, *one.job, one.sign)}
    | {
        "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "SLURM_STEP_ID",
        "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST",
    }
)  # fmt: skip
ENVIRONMENTS = st.dictionaries(st.sampled_from(NAMES), ODD_TEXTS | TEXTS, max_size=10)
RANKS = ODD_TEXTS | st.sampled_from(["0", "1", "3"])
WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "29500"}
WHOLE_STEP = {
    "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "gpu[003-007,9],login1",
}  # fmt: skip


def require_whole(env):
    launch = launched(env)
    if launch is not None:
        assert 0 <= launch.rank < launch.size
        assert 0 < launch.port < 65536
        assert launch.local_rank >= 0
        assert launch.local_size >= 0
        assert launch.attempt >= 0
        assert launch.address == launch.address.strip() != ""


@cases(100)
@given(ENVIRONMENTS)
def test_an_environment_is_a_launch_or_is_refused_in_words(env):
    met(require_whole, env)


@cases(100)
@given(st.sampled_from([WHOLE, WHOLE_STEP]), st.dictionaries(st.sampled_from(NAMES), RANKS, max_size=2))
@example(WHOLE, {"LOCAL_RANK": "-1"})
@example(WHOLE, {"LOCAL_WORLD_SIZE": "-4"})
@example(WHOLE, {"TORCHELASTIC_RESTART_COUNT": "-1"})
@example(WHOLE, {"MASTER_ADDR": " "})
@example(WHOLE, {"MASTER_ADDR": "a\nb"})
@example(WHOLE, {"RANK": "1_000"})
@example(WHOLE, {"RANK": "1e3"})
@example(WHOLE, {"RANK": "1.5"})
@example(WHOLE, {"WORLD_SIZE": "9" * 5000})
@example(WHOLE, {"MASTER_PORT": "29500x"})
@example(WHOLE, {"RANK": "\u0663"})
@example(WHOLE_STEP, {"SLURM_STEP_ID": "²"})
@example(WHOLE_STEP, {"SLURM_STEP_ID": "9" * 5000})
@example(WHOLE_STEP, {"SLURM_STEP_NODELIST": ""})
@example(WHOLE_STEP, {"SLURM_STEP_NODELIST": "["})
def test_a_launch_with_variables_that_someone_changed_is_one_or_is_refused_in_words(whole, changes):
    met(require_whole, whole | changes)


NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
NO_NUMBERS = ("", "two", "1_0", "1e0", "1.0", "0x1", "1 2", "1,2", "٣", "9" * 5000, "-1")


@for_each(("name", "text"), product(NUMBERS, NO_NUMBERS))
def test_a_number_is_a_number_or_its_variable_is_named(name, text):
    with pytest.raises(UsageError, match=name):
        launched(WHOLE | {name: text})


@for_each("text", ["4", "4(x2)", "4(x2),3", "4,3"])
def test_a_count_in_slurms_way_is_the_first_nodes(text):
    assert launched(WHOLE_STEP | {"SLURM_STEP_TASKS_PER_NODE": text}).local_size == 4


@for_each(
    ("nodes", "first"),
    [
        ("gpu[003-007,9],login1", "gpu003"),
        ("a1,a2", "a1"),
        ("a1", "a1"),
        ("r[1-2]n[3-4]", "r1n3"),
        ("r[1-2]n[03-04]-ib", "r1n03-ib"),
        ("r1n[07]", "r1n07"),
        ("host-1.domain,host-2.domain", "host-1.domain"),
        ("gpu[1,2]a", "gpu1a"),
    ],
)
def test_the_first_host_of_a_list_is_where_rank_0_is(nodes, first):
    assert first_host(nodes) == first


@cases(100)
@given(st.text(st.sampled_from("ab0129[]-,. x"), max_size=20) | TEXTS)
def test_a_node_list_of_any_text_has_a_first_host_or_is_refused(nodes):
    met(require_whole, WHOLE_STEP | {"SLURM_STEP_NODELIST": nodes})


@cases(100)
@given(TEXTS | st.floats().map(str))
def test_a_deadline_is_one_or_is_refused_in_words(text):
    limit_s = met(default_timeout_s, {"COMMRT_TIMEOUT_S": text})
    assert limit_s is None or 0 < limit_s <= 2e6
    met(chosen_transport, {"COMMRT_TRANSPORT": text})
