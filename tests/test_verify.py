# SPDX-License-Identifier: Apache-2.0
"""The proof: each rule refuses a tiny wrong schedule in the expected words, and right ones pass."""

import numpy as np
import pytest

from commrt.algorithms import ring
from commrt.algorithms.torus import Torus2D
from commrt.errors import ScheduleError
from commrt.proof import spec
from commrt.proof.replay import NO_TRAFFIC, prove, traffic, verify
from commrt.proof.spec import all_gather, all_reduce, broadcast, doubly_stochastic, reduce_scatter
from commrt.schedule import ADD, COPY, MIX, Schedule, Step, empty

NO_CHUNKS = "carries chunks outside 0..2 or a range that ends before it starts"
OVERWRITES = "overwrites what it sends in the same step; the result depends on timing"
CROWDED = "receives this chunk twice in one step and not all of it adds; the result depends on timing"


def made_of(*steps, ranks=2, chunks=1):
    return Schedule("made", ranks, chunks, lambda: iter(steps))


def fitting(promise, *steps):
    """A schedule of the promise's shape."""
    return made_of(*steps, ranks=promise.goal.shape[0], chunks=promise.goal.shape[1])


def refutation(schedule, collective):
    return str(verify(schedule, collective).counterexample)


def hypercube(ranks, weight=0.5):
    rank = np.arange(ranks)
    rounds = [Step.of(rank, rank ^ (1 << k), 0, 1, MIX, weight) for k in range(ranks.bit_length() - 1)]
    return made_of(*rounds, ranks=ranks)


def round_of(ranks, distance, weight=0.5):
    rank = np.arange(ranks)
    return Step.of(rank, (rank + distance) % ranks, 0, 1, MIX, weight)


def ring_without_its_last_copy(ranks):
    *steps, last = ring.all_reduce(ranks).steps()
    return made_of(*steps, last.rows(last.dst != ranks - 1), ranks=ranks, chunks=ranks)


SUM = Step.of([0, 1], [1, 0], 0, 1, ADD)
PUSH = Step.of(0, 1, 0, 1, ADD)
REFUSED = {
    "step 0: the transfer add  0->2 [0:1) names a rank outside 0..1": (all_reduce(2, 1), Step.of(0, 2, 0, 1, ADD)),
    "step 0: the transfer add  -1->0 [0:1) names a rank outside 0..1": (all_reduce(2, 1), Step.of(-1, 0, 0, 1, ADD)),
    f"step 0: the transfer copy  0->1 [1:4) {NO_CHUNKS}": (all_reduce(2, 3), Step.of([0, 0], 1, [0, 1], [1, 4], COPY)),
    f"step 0: the transfer copy  0->1 [-1:1) {NO_CHUNKS}": (all_reduce(2, 3), Step.of(0, 1, -1, 1, COPY)),
    f"step 0: the transfer copy  0->1 [2:1) {NO_CHUNKS}": (all_reduce(2, 3), Step.of(0, 1, 2, 1, COPY)),
    "step 1: the transfer add  1->1 [0:1) is from a rank to itself; leave it out": (
        all_reduce(2, 1),
        SUM,
        Step.of(1, 1, 0, 1, ADD),
    ),
    f"step 0, rank 1, chunk 0: {OVERWRITES}": (all_reduce(2, 1), Step.of([0, 1], [1, 0], 0, 1, COPY)),
    f"step 0, rank 1, chunk 2: {OVERWRITES}": (all_reduce(3, 4), Step.of([0, 1], [1, 2], [0, 2], [3, 4], COPY)),
    "step 0, rank 0, chunk 1: sends this chunk before it holds a value": (all_gather(4, 4), Step.of(0, 2, 1, 2, COPY)),
    "step 0, rank 0, chunk 2: sends this chunk before it holds a value": (all_gather(3, 3), Step.of(0, 1, 2, 3, MIX)),
    "step 0, rank 1, chunk 0: adds to this chunk before it holds a value": (all_gather(2, 2), PUSH),
    "step 0, rank 1, chunk 0: combines into this chunk before it holds a value": (
        all_gather(2, 2),
        Step.of(0, 1, 0, 1, MIX),
    ),
    "step 1, rank 2, chunk 0: receives the contribution of ranks {1} a second time": (
        all_reduce(3, 1),
        Step.of([0, 1], [1, 2], 0, 1, ADD),
        Step.of(1, 2, 0, 1, ADD),
    ),
    "step 0, rank 1, chunk 0: receives the contribution of ranks {0} a second time": (
        all_reduce(2, 1),
        Step.of([0, 0], 1, 0, 1, ADD),
    ),
    "step 1, rank 3, chunk 0: receives the contribution of ranks {70} a second time": (
        all_reduce(130, 1),
        *[Step.of(70, 3, 0, 1, ADD)] * 2,
    ),
    "rank 0, chunk 0: ends with the sum over ranks {0, 1}; expected: the sum over ranks {0, 1, 2}": (
        all_reduce(3, 1),
        PUSH,
        Step.of(1, 0, 0, 1, COPY),
    ),
    "rank 0, chunk 0: ends with the sum over ranks {0, 1}; expected: the sum over ranks {0}": (
        all_reduce(2, 1, members=[0]),
        SUM,
    ),
    "rank 0, chunk 0: ends with weights {0: 3/4, 1: 1/4}; expected: the sum over ranks {0, 1}": (
        all_reduce(2, 1),
        round_of(2, 1, 0.25),
    ),
    "rank 0, chunk 0: ends with weights {0: 3/2, 2: -1/2}; expected: doubly stochastic": (
        doubly_stochastic(3, 1),
        round_of(3, 1, -0.5),
    ),
    "rank 0, chunk 0: ends with weights {0: 1, 1: 1}; expected: doubly stochastic": (doubly_stochastic(2, 1), SUM),
    "rank 1, chunk 1: ends with 3/4 of this rank's value over all ranks together; expected: doubly stochastic": (
        doubly_stochastic(3, 2),  # told of the origin, and not of an innocent row
        Step.of(2, 1, 1, 2, MIX, 0.25),
    ),
    "step 0, rank 1, chunk 0: sends this chunk before it holds a value": (spec.gather(2, 2), Step.of(1, 0, 0, 1, COPY)),
    "step 0, rank 0, chunk 0: sends this chunk before it holds a value": (
        spec.scatter(2, 2, root=1),
        Step.of(0, 1, 0, 1, COPY),
    ),
    "step 0, rank 1, chunk 1: sends this chunk before it holds a value": (
        spec.all_to_all(2, 4),
        Step.of(1, 0, 1, 2, COPY),
    ),
    "rank 0, chunk 2: ends with the sum over ranks {}; expected: the sum over ranks {2}": (
        spec.gather(3, 3),
        Step.of(1, 0, 1, 2, COPY),
    ),
    "rank 1, chunk 1: ends with the sum over ranks {}; expected: the sum over ranks {0}": (
        spec.scatter(2, 2),
        Step.of(0, 1, 0, 1, COPY),
    ),
    "rank 0, chunk 2: ends with the sum over ranks {}; expected: the sum over ranks {1}": (
        spec.all_to_all(2, 4),
        Step.of(0, 1, 1, 2, COPY),
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_schedule_is_refused_with_what_is_wrong_and_where(words):
    promise, *steps = REFUSED[words]
    assert refutation(fitting(promise, *steps), promise) == words


@pytest.mark.parametrize("combine", [[COPY, ADD], [ADD, COPY], [COPY, COPY], [MIX, ADD], [MIX, MIX]], ids=str)
def test_two_receives_of_one_chunk_that_do_not_both_add_are_refused(combine):
    crowded = made_of(Step.of([0, 2], 1, 0, 1, combine), ranks=3)
    assert refutation(crowded, all_reduce(3, 1)) == f"step 0, rank 1, chunk 0: {CROWDED}"


def test_what_is_no_way_to_combine_or_no_number_is_a_counterexample_and_not_a_crash():
    assert "has an unknown way to combine" in refutation(made_of(Step.of(0, 1, 0, 1, 7)), all_reduce(2, 1))
    for weight in (float("nan"), float("inf")):
        assert verify(hypercube(2, weight), doubly_stochastic(2, 1)).counterexample is not None


def test_a_malformed_schedule_and_one_of_another_shape_cost_nothing():
    assert (NO_TRAFFIC.steps, NO_TRAFFIC.transfers, NO_TRAFFIC.bytes_per_rank, NO_TRAFFIC.max_peers) == (0, 0, 0, 0)
    assert verify(made_of(SUM, Step.of(0, 9, 0, 1, ADD)), all_reduce(2, 1)).traffic == NO_TRAFFIC
    proof = verify(ring.all_reduce(3), all_reduce(4, 4))
    assert (str(proof.counterexample), proof.traffic) == ("has 3 ranks x 3 chunks, not (4, 4)", NO_TRAFFIC)


def test_a_long_promise_is_cut_short():
    words = "the sum over ranks {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...}"
    assert refutation(empty(40), all_reduce(40, 1)).endswith(words)


ALLOWED = {
    "different chunks are sent and overwritten": (all_gather(2, 2), Step.of([0, 1], [1, 0], [0, 1], [1, 2], COPY)),
    "a chunk is sent and added to": (all_reduce(2, 1), SUM),
    "what the step before overwrote is sent": (broadcast(3, 1), Step.of(0, 1, 0, 1, COPY), Step.of(1, 2, 0, 1, COPY)),
    "all add to one chunk": (all_reduce(3, 1), Step.of([1, 2], 0, 0, 1, ADD), Step.of(0, [1, 2], 0, 1, COPY)),
    "others than the root of a gather hold anything": (
        spec.gather(3, 3),
        Step.of(1, [0, 2], 1, 2, COPY),
        Step.of(2, 0, 2, 3, COPY),
    ),
    "members alone sum": (all_reduce(3, 1, members=[0, 2]), Step.of([0, 2], [2, 0], 0, 1, ADD)),
    "equal sums are mixed": (all_reduce(2, 1), SUM, Step.of([0, 1], [1, 0], 0, 1, MIX)),
    **{
        f"a round of gossip, {row}": (doubly_stochastic(row[0], 1), round_of(*row))
        for row in ((2, 1, 0.25), (3, 1, 0.5), (3, 2, 1.0), (5, 3, 0.25), (8, 4, 0.5), (2, 1, 1.0))
    },
}


@pytest.mark.parametrize("what", ALLOWED)
def test_a_right_schedule_is_proven(what):
    promise, *steps = ALLOWED[what]
    assert verify(fitting(promise, *steps), promise).ok


def test_a_proof_carries_names_shape_cost_and_place():
    proof = prove(ring.all_reduce(3), all_reduce(3, 3))
    assert (proof.schedule, proof.collective, proof.ranks, proof.chunks, proof.ok) == ("ring", "all_reduce", 3, 3, True)
    assert proof.traffic == traffic(ring.all_reduce(3))
    found = verify(ring_without_its_last_copy(4), all_reduce(4, 4)).counterexample
    assert (found.step, found.rank, found.chunk) == (None, 3, 0)


def test_prove_raises_the_sentence():
    words = r"^made is not a correct all_reduce: step 0, rank 1, chunk 0: overwrites what it sends in the same step; "
    with pytest.raises(ScheduleError, match=words):
        prove(made_of(Step.of([0, 1], [1, 0], 0, 1, COPY)), all_reduce(2, 1))


WRONG = [
    (ring_without_its_last_copy(5), all_reduce(5, 5)),
    (made_of(Step.of([0, 1], [1, 0], 0, 7, COPY), chunks=7), all_reduce(2, 7)),
    (made_of(Step.of([0, 1], [1, 0], 0, 7, ADD), Step.of(0, 1, 5, 6, ADD), chunks=7), all_reduce(2, 7)),
    (made_of(Step.of(0, 1, 0, 5, MIX), chunks=5), doubly_stochastic(2, 5)),
]
RIGHT = [
    (Torus2D().schedule(0, 12), all_reduce(12, 12)),
    (Torus2D(both_ways=True).schedule(0, 13), all_reduce(13, 24)),
    (ring.all_gather(6), all_gather(6, 6)),
    (ring.reduce_scatter(6).refined(3), reduce_scatter(6, 18)),
    (hypercube(8).refined(5), doubly_stochastic(8, 5)),
    (made_of(round_of(5, 2), ranks=5).refined(3), doubly_stochastic(5, 3)),
]


@pytest.mark.parametrize("block_bytes", [1, 400, 1000])
def test_replaying_in_small_blocks_finds_the_same(block_bytes, monkeypatch):
    whole = [verify(*case) for case in RIGHT + WRONG]
    assert [each.ok for each in whole] == [True] * len(RIGHT) + [False] * len(WRONG)
    monkeypatch.setattr("commrt.proof.replay.BLOCK_BYTES", block_bytes)
    assert [verify(*case) for case in RIGHT + WRONG] == whole
