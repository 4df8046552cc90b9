# SPDX-License-Identifier: Apache-2.0
"""The proof: each rule refuses a tiny wrong schedule in the expected words, and right ones pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairing import check_pairing

import commrt
from commrt.algorithms import ring
from commrt.algorithms.catalogue import ALGORITHMS
from commrt.algorithms.torus import Torus2D
from commrt.errors import ScheduleError
from commrt.program import Hop, program
from commrt.proof.replay import NO_TRAFFIC, prove, traffic, verify
from commrt.proof.spec import all_gather, all_reduce, broadcast, doubly_stochastic, reduce_scatter
from commrt.schedule import ADD, COPY, MIX, Schedule, Step, empty

BOTH_WAYS = Torus2D(both_ways=True)
ALL = {**{name: build() for name, build in ALGORITHMS.items()}, "both ways": BOTH_WAYS}
OVERWRITES = "overwrites what it sends in the same step; the result depends on timing"
CROWDED = "receives this chunk twice in one step and not all of it adds; the result depends on timing"


def made_of(*steps, ranks=2, chunks=1):
    return Schedule("made", ranks, chunks, lambda: iter(steps))


def refutation(schedule, collective):
    return str(verify(schedule, collective).counterexample)


def hypercube(ranks, weight=0.5):
    rank = np.arange(ranks)
    rounds = [Step.of(rank, rank ^ (1 << k), 0, 1, MIX, weight) for k in range(ranks.bit_length() - 1)]
    return made_of(*rounds, ranks=ranks)


def dissemination(ranks, distance, weight=0.5):
    rank = np.arange(ranks)
    return made_of(Step.of(rank, (rank + distance) % ranks, 0, 1, MIX, weight), ranks=ranks)


@pytest.mark.parametrize(
    ("transfer", "words"),
    [
        (Step.of(0, 2, 0, 1, ADD), "step 0: the transfer add  0->2 [0:1) names a rank outside 0..1"),
        (Step.of(-1, 0, 0, 1, ADD), "step 0: the transfer add  -1->0 [0:1) names a rank outside 0..1"),
        (
            Step.of([0, 0], 1, [0, 1], [1, 4], COPY),
            "step 0: the transfer copy  0->1 [1:4) carries chunks outside 0..2 or a range that ends before it starts",
        ),
        (
            Step.of(0, 1, -1, 1, COPY),
            "step 0: the transfer copy  0->1 [-1:1) carries chunks outside 0..2 or a range that ends before it starts",
        ),
        (
            Step.of(0, 1, 2, 1, COPY),
            "step 0: the transfer copy  0->1 [2:1) carries chunks outside 0..2 or a range that ends before it starts",
        ),
        (
            Step.of(1, 1, 0, 1, ADD),
            "step 0: the transfer add  1->1 [0:1) is from a rank to itself; leave it out",
        ),
    ],
    ids=["rank too high", "rank below 0", "chunk too high", "chunk below 0", "backwards", "to itself"],
)
def test_a_malformed_transfer_is_named(transfer, words):
    assert refutation(made_of(transfer, chunks=3), all_reduce(2, 3)) == words


def test_a_malformed_transfer_is_found_in_a_later_step():
    schedule = made_of(Step.of(0, 1, 0, 1, ADD), Step.of(1, 0, 0, 1, COPY), Step.of(0, 3, 0, 1, ADD))
    assert refutation(schedule, all_reduce(2, 1)).startswith("step 2: the transfer add  0->3")


def test_an_unknown_way_to_combine_is_a_counterexample_and_not_a_crash():
    assert "has an unknown way to combine" in refutation(made_of(Step.of(0, 1, 0, 1, 7)), all_reduce(2, 1))


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_a_counterexample_and_not_a_crash(weight):
    assert verify(hypercube(2, weight), doubly_stochastic(2, 1)).counterexample is not None


def test_a_schedule_for_another_shape_is_refused():
    assert refutation(ring.all_reduce(3), all_reduce(4, 4)) == "has 3 ranks x 3 chunks, not (4, 4)"


def test_a_malformed_schedule_and_one_of_another_shape_cost_nothing():
    malformed = made_of(Step.of(0, 1, 0, 1, ADD), Step.of(0, 9, 0, 1, ADD))
    assert (NO_TRAFFIC.steps, NO_TRAFFIC.transfers, NO_TRAFFIC.bytes_per_rank, NO_TRAFFIC.max_peers) == (0, 0, 0, 0)
    assert verify(malformed, all_reduce(2, 1)).traffic == NO_TRAFFIC
    assert verify(ring.all_reduce(3), all_reduce(4, 4)).traffic == NO_TRAFFIC


def test_overwriting_what_is_sent_in_the_same_step_is_refused():
    swap = made_of(Step.of([0, 1], [1, 0], 0, 1, COPY))
    assert refutation(swap, all_reduce(2, 1)) == f"step 0, rank 1, chunk 0: {OVERWRITES}"


def test_overwriting_is_found_where_ranges_only_overlap():
    chain = made_of(Step.of([0, 1], [1, 2], [0, 2], [3, 4], COPY), ranks=3, chunks=4)
    assert refutation(chain, all_reduce(3, 4)) == f"step 0, rank 1, chunk 2: {OVERWRITES}"


def test_sending_and_overwriting_different_chunks_in_one_step_is_allowed():
    gather = made_of(Step.of([0, 1], [1, 0], [0, 1], [1, 2], COPY), chunks=2)
    assert verify(gather, all_gather(2, 2)).ok


def test_sending_a_chunk_and_adding_to_it_in_one_step_is_allowed():
    assert verify(made_of(Step.of([0, 1], [1, 0], 0, 1, ADD)), all_reduce(2, 1)).ok


def test_a_hazard_of_one_step_does_not_haunt_the_next():
    relay = made_of(Step.of(0, 1, 0, 1, COPY), Step.of(1, 2, 0, 1, COPY), ranks=3)
    assert verify(relay, broadcast(3, 1)).ok


@pytest.mark.parametrize("combine", [[COPY, ADD], [ADD, COPY], [COPY, COPY], [MIX, ADD], [MIX, MIX]], ids=str)
def test_two_receives_of_one_chunk_that_do_not_both_add_are_refused(combine):
    schedule = made_of(Step.of([0, 2], 1, 0, 1, combine), ranks=3)
    assert refutation(schedule, all_reduce(3, 1)) == f"step 0, rank 1, chunk 0: {CROWDED}"


def test_several_additions_to_one_chunk_in_one_step_are_allowed():
    star = made_of(Step.of([1, 2, 3], 0, 0, 1, ADD), Step.of(0, [1, 2, 3], 0, 1, COPY), ranks=4)
    assert verify(star, all_reduce(4, 1)).ok


def test_sending_a_chunk_before_it_holds_a_value_is_refused():
    early = made_of(Step.of(0, 2, 1, 2, COPY), ranks=4, chunks=4)
    words = "step 0, rank 0, chunk 1: sends this chunk before it holds a value"
    assert refutation(early, all_gather(4, 4)) == words


def test_adding_to_a_chunk_before_it_holds_a_value_is_refused():
    words = "step 0, rank 1, chunk 0: adds to this chunk before it holds a value"
    assert refutation(made_of(Step.of(0, 1, 0, 1, ADD), chunks=2), all_gather(2, 2)) == words


def test_mixing_before_a_value_is_held_is_refused_at_either_end():
    sends, mixes = Step.of(0, 1, 1, 2, MIX), Step.of(0, 1, 0, 1, MIX)
    assert refutation(made_of(sends, chunks=2), all_gather(2, 2)).endswith("sends this chunk before it holds a value")
    assert refutation(made_of(mixes, chunks=2), all_gather(2, 2)).endswith(
        "combines into this chunk before it holds a value"
    )


def test_a_contribution_added_twice_is_named():
    twice = made_of(Step.of([0, 1], [1, 2], 0, 1, ADD), Step.of(1, 2, 0, 1, ADD), ranks=3)
    words = "step 1, rank 2, chunk 0: receives the contribution of ranks {1} a second time"
    assert refutation(twice, all_reduce(3, 1)) == words


def test_a_contribution_added_twice_within_one_step_is_named():
    words = "step 0, rank 1, chunk 0: receives the contribution of ranks {0} a second time"
    assert refutation(made_of(Step.of([0, 0], 1, 0, 1, ADD)), all_reduce(2, 1)) == words


def test_a_contribution_beyond_the_64th_rank_is_counted_too():
    twice = made_of(Step.of(70, 3, 0, 1, ADD), Step.of(70, 3, 0, 1, ADD), ranks=130)
    words = "step 1, rank 3, chunk 0: receives the contribution of ranks {70} a second time"
    assert refutation(twice, all_reduce(130, 1)) == words


def test_a_missing_contribution_is_named_with_the_promise():
    schedule = made_of(Step.of(0, 1, 0, 1, ADD), Step.of(1, 0, 0, 1, COPY), ranks=3)
    words = "rank 0, chunk 0: ends with the sum over ranks {0, 1}; expected: the sum over ranks {0, 1, 2}"
    assert refutation(schedule, all_reduce(3, 1)) == words


def test_a_long_promise_is_cut_short():
    assert refutation(empty(40), all_reduce(40, 1)).endswith(
        "the sum over ranks {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...}"
    )


def ring_without_its_last_copy(ranks):
    *steps, last = ring.all_reduce(ranks).steps()
    return made_of(*steps, last.rows(last.dst != ranks - 1), ranks=ranks, chunks=ranks)


def test_a_copy_missing_in_the_last_step_is_found_where_it_is_missing():
    found = verify(ring_without_its_last_copy(4), all_reduce(4, 4)).counterexample
    assert (found.step, found.rank, found.chunk) == (None, 3, 0)


def test_ranks_outside_the_members_are_not_looked_at():
    schedule = made_of(Step.of([0, 2], [2, 0], 0, 1, ADD), ranks=3)
    assert verify(schedule, all_reduce(3, 1, members=[0, 2])).ok
    assert not verify(schedule, all_reduce(3, 1, members=[0, 1])).ok


def test_a_contribution_from_outside_the_members_is_refused():
    schedule = made_of(Step.of([1, 0], [0, 1], 0, 1, ADD), ranks=2)
    words = "rank 0, chunk 0: ends with the sum over ranks {0, 1}; expected: the sum over ranks {0}"
    assert refutation(schedule, all_reduce(2, 1, members=[0])) == words


@pytest.mark.parametrize("promise", [all_reduce(4, 4), all_gather(4, 4), broadcast(4, 4)], ids=lambda c: c.name)
def test_a_reduce_scatter_keeps_no_other_promise(promise):
    assert not verify(ring.reduce_scatter(4), promise).ok
    assert verify(ring.reduce_scatter(4), reduce_scatter(4, 4)).ok


def test_a_proof_carries_names_shape_and_cost():
    proof = prove(ring.all_reduce(3), all_reduce(3, 3))
    assert (proof.schedule, proof.collective, proof.ranks, proof.chunks, proof.ok) == ("ring", "all_reduce", 3, 3, True)
    assert proof.traffic == traffic(ring.all_reduce(3))


def test_prove_raises_the_sentence():
    words = r"^made is not a correct all_reduce: step 0, rank 1, chunk 0: overwrites what it sends in the same step; "
    with pytest.raises(ScheduleError, match=words):
        prove(made_of(Step.of([0, 1], [1, 0], 0, 1, COPY)), all_reduce(2, 1))


def test_the_package_offers_verify_as_a_function_also_once_its_module_is_loaded():
    assert commrt.proof.verify is verify


def test_a_mix_is_no_sum():
    words = "rank 0, chunk 0: ends with weights {0: 3/4, 1: 1/4}; expected: the sum over ranks {0, 1}"
    assert refutation(hypercube(2, 0.25), all_reduce(2, 1)) == words


def test_one_dissemination_round_is_doubly_stochastic():
    for ranks, distance, weight in ((2, 1, 0.25), (3, 1, 0.5), (3, 2, 1.0), (5, 3, 0.25), (8, 4, 0.5), (2, 1, 1.0)):
        assert verify(dissemination(ranks, distance, weight), doubly_stochastic(ranks, 1)).ok, (ranks, weight)


def test_a_negative_weight_is_not_stochastic():
    words = "rank 0, chunk 0: ends with weights {0: 3/2, 2: -1/2}; expected: doubly stochastic"
    assert refutation(dissemination(3, 1, -0.5), doubly_stochastic(3, 1)) == words


def test_additions_are_not_stochastic():
    words = "rank 0, chunk 0: ends with weights {0: 1, 1: 1}; expected: doubly stochastic"
    assert refutation(made_of(Step.of([0, 1], [1, 0], 0, 1, ADD)), doubly_stochastic(2, 1)) == words


def test_a_one_sided_mix_does_not_keep_the_mean():
    assert not verify(made_of(Step.of(0, 1, 0, 1, MIX)), doubly_stochastic(2, 1)).ok


def test_a_mean_that_is_not_kept_is_told_by_the_share_of_the_origin_and_not_by_an_innocent_row():
    schedule = made_of(Step.of(2, 1, 1, 2, MIX, 0.25), ranks=3, chunks=2)
    words = "rank 1, chunk 1: ends with 3/4 of this rank's value over all ranks together; expected: doubly stochastic"
    assert refutation(schedule, doubly_stochastic(3, 2)) == words


def test_sums_can_be_proven_beside_mixing():
    schedule = made_of(Step.of([0, 1], [1, 0], 0, 1, ADD), Step.of([0, 1], [1, 0], 0, 1, MIX))
    assert verify(schedule, all_reduce(2, 1)).ok


WRONG = [
    (ring_without_its_last_copy(5), all_reduce(5, 5)),
    (made_of(Step.of([0, 1], [1, 0], 0, 7, COPY), chunks=7), all_reduce(2, 7)),
    (made_of(Step.of([0, 1], [1, 0], 0, 7, ADD), Step.of(0, 1, 5, 6, ADD), chunks=7), all_reduce(2, 7)),
    (made_of(Step.of(0, 1, 0, 5, MIX), chunks=5), doubly_stochastic(2, 5)),
]
RIGHT = [
    (Torus2D().schedule(0, 12), all_reduce(12, 12)),
    (BOTH_WAYS.schedule(0, 13), all_reduce(13, 24)),
    (ring.all_gather(6), all_gather(6, 6)),
    (ring.reduce_scatter(6).refined(3), reduce_scatter(6, 18)),
    (hypercube(8).refined(5), doubly_stochastic(8, 5)),
    (dissemination(5, 2).refined(3), doubly_stochastic(5, 3)),
]


@pytest.mark.parametrize("block_bytes", [1, 400, 1000])
def test_replaying_in_small_blocks_finds_the_same(block_bytes, monkeypatch):
    whole = [verify(*case) for case in RIGHT + WRONG]
    assert [each.ok for each in whole] == [True] * len(RIGHT) + [False] * len(WRONG)
    monkeypatch.setattr("commrt.proof.replay.BLOCK_BYTES", block_bytes)
    assert [verify(*case) for case in RIGHT + WRONG] == whole


def programs_of(schedule):
    return [program(schedule, rank) for rank in range(schedule.ranks)]


def with_hop(programs, rank, number, hop):
    hops = programs[rank].hops
    changed = replace(programs[rank], hops=(*hops[:number], hop, *hops[number + 1 :]))
    return [*programs[:rank], changed, *programs[rank + 1 :]]


def test_programs_of_one_schedule_pair():
    cases = [(name, ranks) for name in ALL for ranks in (*range(1, 10), 13)]
    assert [case for case in cases if check_pairing(programs_of(ALL[case[0]].schedule(0, case[1])))] == []


def test_programs_of_two_algorithms_do_not_pair():
    mixed = [program(ALL["torus2d" if rank else "ring"].schedule(0, 4), rank) for rank in range(4)]
    assert check_pairing(mixed) is not None


def test_a_send_that_one_rank_leaves_out_is_found():
    programs = programs_of(ring.all_reduce(4))
    found = check_pairing(with_hop(programs, 2, 1, Hop((), programs[2].hops[1].recvs)))
    assert str(found) == "step 1, rank 2: sends chunks [] to rank 3, which expects [(0, 1)]"


def test_a_receive_that_one_rank_leaves_out_is_found():
    programs = programs_of(ring.all_reduce(4))
    found = check_pairing(with_hop(programs, 2, 0, Hop(programs[2].hops[0].sends, ())))
    assert str(found) == "step 0, rank 1: sends chunks [(0, 1)] to rank 2, which expects []"


def test_two_sends_to_one_peer_in_the_wrong_order_are_found():
    programs = programs_of(made_of(Step.of(0, 1, [0, 2], [1, 4], COPY), chunks=4))
    found = check_pairing(with_hop(programs, 0, 0, Hop(programs[0].hops[0].sends[::-1], ())))
    assert str(found) == "step 0, rank 0: sends chunks [(2, 4), (0, 1)] to rank 1, which expects [(0, 1), (2, 4)]"


def test_sends_to_different_peers_may_be_issued_in_any_order():
    programs = programs_of(made_of(Step.of(0, [1, 2], 0, 1, COPY), ranks=3))
    assert check_pairing(with_hop(programs, 0, 0, Hop(programs[0].hops[0].sends[::-1], ()))) is None


def test_a_changed_size_is_found():
    programs = programs_of(ring.all_reduce(4))
    (leg,) = programs[0].hops[0].sends
    found = check_pairing(with_hop(programs, 0, 0, Hop((replace(leg, hi=leg.hi + 1),), programs[0].hops[0].recvs)))
    assert str(found) == "step 0, rank 0: sends chunks [(3, 5)] to rank 1, which expects [(3, 4)]"


def test_a_missing_hop_is_found():
    programs = programs_of(ring.all_reduce(4))
    for number in (0, 3, 5):
        hops = programs[1].hops[:number] + programs[1].hops[number + 1 :]
        found = check_pairing([programs[0], replace(programs[1], hops=hops), *programs[2:]])
        assert str(found) == "ranks disagree about the number of steps: [5, 6]"


def test_hops_in_another_order_are_found():
    programs = programs_of(ring.all_reduce(4))
    programs[1] = replace(programs[1], hops=programs[1].hops[::-1])
    assert check_pairing(programs) is not None


def test_a_missing_program_is_found():
    assert check_pairing(programs_of(ring.all_reduce(4))[:-1]) is not None


@settings(deadline=None, max_examples=40)
@given(data=st.data(), name=st.sampled_from(sorted(ALL)), ranks=st.integers(2, 12))
def test_any_leg_left_out_by_one_rank_is_found(data, name, ranks):
    programs = programs_of(ALL[name].schedule(0, ranks))
    places = [(r, n) for r, mine in enumerate(programs) for n, hop in enumerate(mine.hops) if hop.sends]
    rank, number = data.draw(st.sampled_from(places))
    hop = programs[rank].hops[number]
    gone = data.draw(st.integers(0, len(hop.sends) - 1))
    left = Hop(hop.sends[:gone] + hop.sends[gone + 1 :], hop.recvs)
    found = check_pairing(with_hop(programs, rank, number, left))
    assert (found.step, found.rank) == (number, rank)
