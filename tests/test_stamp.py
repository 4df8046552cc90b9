# SPDX-License-Identifier: Apache-2.0
"""What ranks claim about a bucket survives being summed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commrt.kernels.packing import bits
from commrt.wire.stamp import EXPLANATIONS, WIDTHS, Claim, complaint, stamp

CLAIMS = st.builds(Claim, *(st.integers(0, (1 << width) - 1) for width in WIDTHS))


@given(CLAIMS, st.integers(1, 64), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_equal_claims_of_any_number_of_ranks_show_the_own_stamp(claim, ranks, dtype):
    total = torch.zeros(64, dtype=dtype)
    for _ in range(ranks):
        total += bits(stamp(claim))
    assert torch.equal(total != 0, bits(stamp(claim)))


@given(CLAIMS, st.sampled_from(Claim._fields), st.data())
def test_a_claim_that_differs_in_one_thing_is_explained_by_that(claim, name, data):
    other = data.draw(st.integers(0, (1 << getattr(WIDTHS, name)) - 1).filter(lambda v: v != getattr(claim, name)))
    total = bits(stamp(claim)).float() + bits(stamp(claim._replace(**{name: other}))).float()
    assert not torch.equal(total != 0, bits(stamp(claim)))
    assert complaint(total) == EXPLANATIONS[name]


def test_numbers_beyond_the_width_count_on_from_zero():
    assert stamp(Claim(0, 65, 32, 64, 64, 256)) == stamp(Claim(0, 1, 0, 0, 0, 0))


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_what_is_no_sum_of_stamps_is_called_that_or_a_difference(value):
    total = torch.full((64,), value)
    assert complaint(total) in {"it is no sum of stamps: the ranks run different programs", *EXPLANATIONS.values()}
