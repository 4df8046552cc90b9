# SPDX-License-Identifier: Apache-2.0
"""The headers of buckets survive being summed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commrt.buckets.gradient_bucket import EXPLANATIONS, WIDTHS, Header, encode, explain_mismatch
from commrt.kernels.plain_torch import bits
from commrt.runtime.wire import WIRES

CLAIMS = st.builds(Header, *(st.integers(0, (1 << width) - 1) for width in WIDTHS))


@given(CLAIMS, st.integers(1, 64), st.sampled_from(WIRES))
def test_equal_claims_of_any_number_of_ranks_show_the_own_header(claim, ranks, dtype):
    total = torch.zeros(64, dtype=dtype)
    for _ in range(ranks):
        total += bits(encode(claim))
    assert torch.equal(total != 0, bits(encode(claim)))


@given(CLAIMS, st.sampled_from(Header._fields), st.data())
def test_a_claim_that_differs_in_one_thing_is_explained_by_that(claim, name, data):
    other = data.draw(st.integers(0, (1 << getattr(WIDTHS, name)) - 1).filter(lambda v: v != getattr(claim, name)))
    total = bits(encode(claim)).float() + bits(encode(claim._replace(**{name: other}))).float()
    assert not torch.equal(total != 0, bits(encode(claim)))
    assert explain_mismatch(total) == EXPLANATIONS[name]


def test_numbers_beyond_the_width_count_on_from_zero():
    assert encode(Header(0, 65, 32, 64, 64, 256)) == encode(Header(0, 1, 0, 0, 0, 0))


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_what_is_no_sum_of_headers_is_called_that_or_a_difference(value):
    nothing = "it is no sum of headers: the ranks run different programs, or models in different orders"
    assert explain_mismatch(torch.full((64,), value)) in {nothing, *EXPLANATIONS.values()}
