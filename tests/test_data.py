# SPDX-License-Identifier: Apache-2.0
"""Samples passed round a ring: none lost, none twice, and all of them everywhere in the end."""

from __future__ import annotations

import io
import threading
from collections import Counter

import pytest
import torch
from cases import for_each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset

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
    return ring._fields[1].tolist()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.integers(0, 20))
def test_no_sample_is_lost_or_doubled_and_shards_keep_their_size(ranks, count, batch_size, taken):
    def body(world):
        ring = ring_of(world, count, batch_size)
        left = taken
        while left:
            for pixels, numbers in ring:
                assert (pixels == numbers.view(-1, 1, 1)).all()
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
        passes = [[number for _, numbers in ring for number in numbers.tolist()] for _ in range(ranks)]
        return world.rank, passes, ring.passes, len(ring)

    for rank, passes, done, batches in run_ranks(ranks, body):
        assert done == ranks
        assert batches == -(-count // batch_size)
        for number, seen in enumerate(passes):
            home = (rank - number) % ranks
            assert sorted(seen) == [*range(home * count, (home + 1) * count)]


def test_order_follows_from_seed_rank_and_pass():
    def body(world):
        rings = [ring_of(world, 20, 5, seed=seed) for seed in (0, 0, 1)]
        return [[numbers.tolist() for _, numbers in ring] for ring in rings]

    first, again, other = run_ranks(2, body)[0]
    assert first == again != other


@for_each("at", [0, 1, 3, 4])
def test_a_run_that_goes_on_from_a_checkpoint_sees_what_the_unbroken_one_sees(at):
    def body(world):
        unbroken, ring = ring_of(world), ring_of(world)
        wanted = [numbers.tolist() for _ in range(3) for _, numbers in unbroken]
        seen = []
        for _ in range(3):
            for _, numbers in ring:
                seen.append(numbers.tolist())
                if len(seen) == at:
                    ring = resumed(world, ring)
                    break
            else:
                continue
            break
        while ring.passes < 3:
            seen += [numbers.tolist() for _, numbers in ring]
        return wanted, seen

    for wanted, seen in run_ranks(3, body):
        assert seen == wanted


def resumed(world, ring):
    file = io.BytesIO()
    torch.save(ring.state_dict(), file)
    again = ring_of(world)
    again.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    return again


def test_a_pass_is_whole_once_its_last_batch_was_used():
    def body(world):
        ring = ring_of(world)
        return [ring.passes for _ in range(2) for _ in ring], ring.passes

    assert run_ranks(2, body) == [([0, 0, 0, 1, 1, 1], 2)] * 2


@for_each("at", [0, 1, 3, 4])
def test_a_loop_goes_on_where_the_state_was_saved_that_is_loaded_in_it(at):
    def body(world):
        ring, seen, state = ring_of(world), [], None
        while ring.passes < 3:
            for _, numbers in ring:
                seen.append(numbers.tolist())
                if len(seen) == at + 1:
                    state = ring.state_dict()
                if len(seen) == 5:
                    ring.load_state_dict(state)
        return seen[: at + 1] + seen[5:], seen[:5]

    def unbroken(world):
        ring = ring_of(world)
        return [numbers.tolist() for _ in range(3) for _, numbers in ring]

    wanted = run_ranks(3, unbroken)
    for (seen, before), all_batches in zip(run_ranks(3, body), wanted, strict=True):
        assert before == all_batches[:5]
        assert seen == all_batches


class Squares(Dataset):
    """Items of a tensor and a number."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.full((2,), float(i)), i * i + 100 * self.rank


SOURCES = {
    "a map-style dataset": Squares,
    "a TensorDataset": lambda rank: TensorDataset(*shard(rank, 4)),
    "a tuple of tensors": lambda rank: shard(rank, 4),
}


@for_each("name", SOURCES)
def test_samples_come_from_datasets_and_tensors(name):
    def body(world):
        ring = commrt.RingShuffle(SOURCES[name](world.rank), 2, world=world)
        return [len(numbers) for _ in range(2) for _, numbers in ring], sorted(numbers_of(ring))

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


def test_changing_what_a_batch_holds_changes_no_sample():
    def body(world):
        ring = ring_of(world)
        for pixels, numbers in ring:
            pixels.zero_()
            numbers.zero_()
        ring.drain()
        return numbers_of(ring)

    assert sorted(number for numbers in run_ranks(2, body) for number in numbers) == [*range(12)]


@for_each(
    ("samples", "batch_size", "words"),
    [
        ([], 2, "has no samples"),
        (7, 2, "a int has no samples"),
        ((torch.zeros(3), torch.zeros(4)), 2, r"fields of \[3, 4\] samples"),
        ((torch.zeros(0), torch.zeros(0)), 2, "at least one"),
        (DataLoader(TensorDataset(torch.zeros(3))), 2, "a DataLoader has no samples: pass a dataset"),
        ((torch.zeros(3),), 0, "say how many samples a batch has"),
        ([("text", 1)], 1, "cannot be sent: make them tensors"),
    ],
)
def test_samples_that_cannot_travel_are_refused(samples, batch_size, words):
    with pytest.raises(UsageError, match=words):
        run_ranks(1, lambda world: commrt.RingShuffle(samples, batch_size, world=world))


def test_ranks_with_shards_of_different_sizes_are_told_so():
    with pytest.raises(DisagreementError, match="samples"):
        run_ranks(2, lambda world: ring_of(world, 6 + world.rank))


def test_a_state_of_other_samples_is_refused():
    def body(world):
        state = ring_of(world, 4).state_dict()
        ring_of(world, 6).load_state_dict(state)

    with pytest.raises(UsageError, match="a state of other samples"):
        run_ranks(1, body)
