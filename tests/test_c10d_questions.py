# SPDX-License-Identifier: Apache-2.0
"""What torch asks of a process group is answered as Gloo does, and what torch builds on the answers works."""

from __future__ import annotations

import c10d_questions
import c10d_ranks
import pytest
from rank_pool import Pool

pytestmark = pytest.mark.processes

ANSWERS = [c10d_questions.of_the_group, c10d_questions.of_the_backend]
USES = [
    c10d_questions.model_from_rank_0,
    c10d_questions.meta_model_from_rank_0,
    c10d_questions.optimizer_from_rank_0,
    c10d_questions.saved_and_loaded,
    c10d_questions.saved_meanwhile,
    c10d_questions.meshes,
    c10d_questions.subgroups,
    c10d_questions.objects,
]
FSDP1 = [c10d_questions.fsdp1_full, c10d_questions.fsdp1_sharded, c10d_questions.fsdp1_local]


@pytest.fixture(scope="module")
def found():
    ours = [*ANSWERS, *USES, *FSDP1, c10d_questions.coalesced]
    with Pool(2) as pool:
        over_gloo = c10d_ranks.answers(pool, *ANSWERS, *USES, backend="gloo")
        return {"gloo": over_gloo, "commrt": c10d_ranks.answers(pool, *ours)}


@pytest.mark.parametrize("body", ANSWERS, ids=lambda body: body.__name__)
def test_a_group_answers_torch_as_one_of_gloo_does(found, body):
    for over_commrt, over_gloo in zip(found["commrt"][body.__name__], found["gloo"][body.__name__], strict=True):
        c10d_ranks.require_like(over_commrt, over_gloo)


@pytest.mark.parametrize("body", USES, ids=lambda body: body.__name__)
def test_what_torch_builds_on_a_group_works_as_over_gloo(found, body):
    over_gloo, over_commrt = found["gloo"][body.__name__], found["commrt"][body.__name__]
    assert not any(isinstance(each, str) for each in over_gloo)  # an error
    assert over_commrt == over_gloo


def test_rank_0_hands_its_model_to_the_others(found):
    assert found["commrt"]["model_from_rank_0"] == [pytest.approx(25.37531967367977)] * 2


@pytest.mark.parametrize("body", FSDP1, ids=lambda body: body.__name__)
def test_a_state_dict_of_fsdp1_holds_the_weights(found, body):
    for names, weights in found["commrt"][body.__name__]:  # over Gloo, FSDP1 reads memory that is not filled yet
        assert weights == pytest.approx(c10d_questions.alone(), rel=1e-6)
        assert len(names) == (1 if body is c10d_questions.fsdp1_local else 4)


def test_collectives_of_a_coalescing_manager_are_waited_for_as_one(found):
    assert found["commrt"]["coalesced"] == [[[3.0] * 2] * 3] * 2
