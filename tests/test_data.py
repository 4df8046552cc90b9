# SPDX-License-Identifier: Apache-2.0
"""Samples passed round a ring: none lost, none twice, and all of them everywhere in the end."""

import io
import threading
from collections import Counter
from itertools import chain

import pytest
import torch
from cases import for_each, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import commrt
from commrt.errors import DisagreementError, UsageError
from commrt.testing.ranks import run_ranks

PATIENT_S = 20.0


def shard(rank, count):
    """Samples that know where they come from: a picture and a number."""
    numbers = torch.arange(rank * count, (rank + 1) * count)
    return numbers.view(-1, 1, 1).float().expand(-1, 2, 3).contiguous(), numbers


def ring_of(world, count=6, batch_size=2, **options):
    return commrt.RingShuffle(shard(world.rank, count), batch_size, world=world, **options)


def numbers_of(ring):
    """The samples that a rank holds, by their numbers."""
    return ring.state_dict()["samples"][1].tolist()


def one_pass(ring):
    return [numbers.tolist() for _, numbers in ring]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.integers(0, 20))
def test_no_sample_is_lost_or_doubled_and_shards_keep_their_size(ranks, count, batch_size, taken):
    def body(world):
        ring = ring_of(world, count, batch_size)
        left = taken
        while left:
            for pixels, numbers in ring:
                assert (pixels == numbers.view(-1, 1, 1)).all()
                pixels.zero_()  # the loop's own: changes no sample
                numbers.zero_()
                left -= 1
                if not left:
                    break
        ring.drain()
        return numbers_of(ring)

    shards = run_ranks(ranks, body)
    assert {len(numbers) for numbers in shards} == {count}
    assert Counter(number for numbers in shards for number in numbers) == Counter(range(ranks * count))


@for_each(("ranks", "count", "batch_size"), [(1, 6, 2), (2, 7, 3), (3, 4, 9), (5, 6, 2), (5, 7, 3)])
def test_after_as_many_passes_as_ranks_each_has_seen_every_sample_once(ranks, count, batch_size):
    def body(world):
        ring = ring_of(world, count, batch_size)
        assert len(ring) == -(-count // batch_size)
        for number in range(ranks):
            assert ring.passes == number
            home = (world.rank - number) % ranks
            assert sorted(chain(*one_pass(ring))) == [*range(home * count, (home + 1) * count)]

    run_ranks(ranks, body)


@on_ranks(2)
def test_order_follows_from_seed_rank_and_pass(world):
    first, again, other = (one_pass(ring_of(world, 20, 5, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other


def saved(ring):
    file = io.BytesIO()
    torch.save(ring.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()))


@for_each("at", [0, 1, 3, 4])
@for_each("in_loop", [True, False])
@on_ranks(3)
def test_a_run_that_goes_on_from_a_state_sees_what_the_unbroken_one_sees(world, at, in_loop):
    unbroken = ring_of(world)
    wanted = [numbers for _ in range(3) for numbers in one_pass(unbroken)]
    ring, seen = ring_of(world), []
    state = saved(ring)
    while ring.passes < 3:
        for _, numbers in ring:
            seen.append(numbers.tolist())
            if len(seen) == at:
                state = saved(ring)
            if len(seen) == 5:
                ring = ring if in_loop else ring_of(world)
                ring.load_state_dict(state)
                if not in_loop:
                    break
    assert seen[:5] == wanted[:5]
    assert seen[:at] + seen[5:] == wanted


def items(rank):
    """A map-style dataset of a tensor and a number each."""
    return [(torch.full((2,), float(i)), i * i + 100 * rank) for i in range(4)]


@for_each("source", [items, lambda rank: TensorDataset(*shard(rank, 4)), lambda rank: shard(rank, 4)])
def test_samples_come_from_datasets_and_tensors(source):
    def body(world):
        ring = commrt.RingShuffle(source(world.rank), 2, world=world)
        return [len(batch) for _ in range(2) for batch in one_pass(ring)], sorted(numbers_of(ring))

    (sizes, here), (_, there) = run_ranks(2, body)
    assert sizes == [2] * 4
    assert not set(here) & set(there)


def test_samples_leave_while_the_next_batch_is_in_use():
    """Rank 1 takes no second batch until rank 0 has its second."""
    ahead = threading.Event()

    def body(world):
        ring = ring_of(world)
        batches = iter(ring)
        next(batches)
        if world.rank == 1:
            assert ahead.wait(PATIENT_S)
        next(batches)
        ahead.set()
        next(batches)
        ring.drain()

    run_ranks(2, body)


@for_each(
    ("samples", "batch_size", "words"),
    [
        ([], 2, "has no samples"),
        (7, 2, "a int has no samples"),
        ((torch.zeros(3), torch.zeros(4)), 2, r"fields of \[3, 4\] samples"),
        ((torch.zeros(0), torch.zeros(0)), 2, "at least one"),
        (DataLoader(TensorDataset(torch.zeros(3))), 2, "a DataLoader has no samples: pass a dataset"),
        ((torch.zeros(3),), "x", "batch_size='x': give a whole number from 1 on"),
        ([("text", 1)], 1, "cannot be sent: make them tensors"),
    ],
)
@on_ranks(1)
def test_samples_that_cannot_travel_are_refused(world, samples, batch_size, words):
    with pytest.raises(UsageError, match=words):
        commrt.RingShuffle(samples, batch_size, world=world)


@on_ranks(2)
def test_ranks_with_shards_of_different_sizes_are_told_so(world):
    with pytest.raises(DisagreementError, match="samples"):
        ring_of(world, 6 + world.rank)


@on_ranks(1)
def test_a_state_of_other_samples_is_refused(world):
    with pytest.raises(UsageError, match="a state of other samples"):
        ring_of(world, 6).load_state_dict(ring_of(world, 4).state_dict())
