# SPDX-License-Identifier: Apache-2.0
"""Schedules as data: how they are combined, hashed, printed and cut per rank; what each algorithm is and costs."""

import re
from collections import Counter
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt.algorithms import catalogue, chain, direct, halving_doubling, ring, tree
from commrt.algorithms.catalogue import ALGORITHMS, COLLECTIVES, POLICIES, by_name, candidates
from commrt.algorithms.direct import Direct
from commrt.algorithms.double_tree import DoubleTree
from commrt.algorithms.parts import MAX_HELPERS, folded
from commrt.algorithms.ring import Ring, Rings
from commrt.algorithms.sliced import Sliced, in_slices
from commrt.algorithms.torus import Torus2D
from commrt.errors import ScheduleError, UsageError
from commrt.program import chunk_bounds, member_program, program
from commrt.proof import spec
from commrt.proof.replay import prove, traffic
from commrt.proof.summing import summing_steps
from commrt.schedule import ADD, COPY, MIX, Schedule, Step, beside, empty

RANKS = [*range(1, 10), 12, 13, 16, 17, 31, 32, 33, 64]
BUILDERS = {
    **{name: build().schedule for name, build in ALGORITHMS.items()},
    "both ways": Torus2D(both_ways=True).schedule,
}


def made_of(*steps, ranks=3, chunks=4, name="made"):
    return Schedule(name, ranks, chunks, lambda: iter(steps))


def lines(schedule):
    return [step.text(limit=99) for step in schedule.steps()]


PUSH = made_of(Step.of(0, 1, 0, 1, COPY), ranks=2, chunks=1, name="push")
PULL = made_of(Step.of(1, 0, 0, 1, ADD), ranks=2, chunks=1, name="pull")


@st.composite
def random_schedules(draw):
    ranks, chunks = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    bounds = st.tuples(st.integers(0, chunks), st.integers(0, chunks)).map(sorted)
    rows = st.tuples(st.permutations(range(ranks)), bounds, st.sampled_from([ADD, COPY, MIX]))
    drawn = draw(st.lists(st.lists(rows, min_size=1, max_size=8), max_size=4))
    steps = [zip(*((*who[:2], *range_, how) for who, range_, how in step), strict=True) for step in drawn]
    return made_of(*(Step.of(*columns) for columns in steps), ranks=ranks, chunks=chunks)


def test_columns_and_scalars_of_a_step_are_broadcast_against_each_other():
    step = Step.of(src=[0, 1, 2], dst=[1, 2, 0], lo=0, hi=2, combine=MIX)
    columns = [column.tolist() for column in step.columns]
    assert columns == [[0, 1, 2], [1, 2, 0], [0] * 3, [2] * 3, [MIX] * 3, [0.5] * 3]
    assert len(Step.of(0, 1, 0, 1, ADD)) == 1


CANONICAL = {
    "add  0->1 [1:2)  0->1 [3:4)  0->2 [0:1)  1->0 [0:1)": Step.of(
        [1, 0, 0, 0], [0, 2, 1, 1], [0, 0, 3, 1], [1, 1, 4, 2], ADD
    ),
    "copy  0->1 [0:3)": Step.of(0, 1, [2, 0, 1], [3, 1, 2], COPY),  # neighbours
    "copy  0->1 [0:1)  0->2 [1:2)": Step.of(0, [1, 2], [0, 1], [1, 2], COPY),
    "add  0->1 [0:1)  copy  0->1 [1:2)": Step.of(0, 1, [0, 1], [1, 2], [ADD, COPY]),
    "mix(0.5)  0->1 [0:1)  mix(0.25)  0->1 [1:2)": Step.of(0, 1, [0, 1], [1, 2], MIX, [0.5, 0.25]),
    "add  0->1 [0:1)": Step.of([0, 1], [1, 0], [0, 2], [1, 2], ADD),  # and nothing
}


@pytest.mark.parametrize("text", CANONICAL)
def test_a_canonical_step_is_sorted_and_merges_neighbours_that_are_alike(text):
    assert CANONICAL[text].canonical().text() == text


def moved(step):
    rows = zip(*(column.tolist() for column in step.columns), strict=True)
    return Counter((src, dst, chunk, *how) for src, dst, lo, hi, *how in rows for chunk in range(lo, hi))


@settings(max_examples=50)
@given(random_schedules())
def test_canonical_moves_the_same_chunks_and_is_its_own_canonical_form(schedule):
    for step in schedule.steps():
        short = step.canonical()
        assert moved(short) == moved(step)
        assert short.canonical().text(limit=99) == short.text(limit=99)


def test_text_of_a_step_says_how_many_transfers_it_left_out():
    assert Step.of(0, [1, 2, 3], 0, 1, COPY).text(limit=2) == "copy  0->1 [0:1)  0->2 [0:1)  ... 1 more"


def test_text_of_a_schedule_counts_in_good_english_and_numbers_its_steps():
    assert str(PUSH.then(PULL, "there and back")) == (
        "there and back: 2 ranks, 1 chunk\n  0  copy  0->1 [0:1)\n  1  add  1->0 [0:1)"
    )


COMBINED = {
    "then": (PUSH.then(PULL), "push then pull", ["copy  0->1 [0:1)", "add  1->0 [0:1)"]),
    "over other ranks": (PUSH.over([4, 2], world=5), "push", ["copy  4->2 [0:1)"]),
    "over copies, each on its own chunks": (
        PUSH.within(0, 2, 6).over([[0, 1], [3, 2], [4, 5]], world=6, shift=[0, 2, 4]),
        "push",
        ["copy  0->1 [0:2)  3->2 [2:4)  4->5 [4:6)"],
    ),
    "over copies, all shifted alike": (
        PUSH.within(0, 1, 2).over([[0, 1], [3, 2]], 4, shift=1),
        "push",
        ["copy  0->1 [1:2)  3->2 [1:2)"],
    ),
    "within a part of the chunks": (
        ring.reduce_scatter(2).within(2, 6, 7),
        "ring reduce-scatter",
        ["add  0->1 [4:6)  1->0 [2:4)"],
    ),
    "refined": (ring.reduce_scatter(2).refined(3), "ring reduce-scatter", ["add  0->1 [3:6)  1->0 [0:3)"]),
    "beside, the longer one on alone": (
        PUSH.then(PULL).over([0, 1], 4).beside(PUSH.over([2, 3], 4), "two"),
        "two",
        ["copy  0->1 [0:1)  2->3 [0:1)", "add  1->0 [0:1)"],
    ),
    "beside two others": (
        beside([PUSH, PULL, PUSH]),
        "push beside pull beside push",
        ["copy  0->1 [0:1)  add  1->0 [0:1)  copy  0->1 [0:1)"],
    ),
    "of no step": (empty(5, 3), "nothing", []),
}


@pytest.mark.parametrize("how", COMBINED)
def test_schedules_are_combined(how):
    schedule, name, steps = COMBINED[how]
    assert (schedule.name, lines(schedule)) == (name, steps)
    assert lines(schedule) == steps, "steps are yielded anew each time"


def test_a_combined_schedule_has_the_ranks_and_chunks_that_were_asked_for():
    shapes = [(each.ranks, each.chunks) for each, *_ in COMBINED.values()]
    assert shapes == [(2, 1), (5, 1), (6, 6), (4, 2), (2, 7), (2, 6), (4, 1), (2, 1), (5, 3)]


BASE = {"src": [0, 1], "dst": [1, 2], "lo": 0, "hi": 2, "combine": MIX, "weight": 0.5}
MOVED = Step.of(**BASE)
IDLE = Step.of([], [], [], [], ADD)
ALIKE = {
    "name": [PUSH, PUSH.named("shove")],
    "row order and cut of ranges": [
        made_of(Step.of([0, 1], [1, 2], 0, [2, 1], ADD)),
        made_of(Step.of([1, 0, 0], [2, 1, 1], [0, 0, 1], [1, 1, 2], ADD)),
    ],
    "weight where it adds": [made_of(Step.of(0, 1, 0, 1, ADD, weight)) for weight in (0.5, 0.25)],
    "width of columns": [
        made_of(Step(*(column.astype(np.int32) for column in MOVED.columns[:5]), MOVED.weight)),
        made_of(MOVED),
    ],
}
CHANGES = [{"src": [0, 0]}, {"dst": [1, 0]}, {"lo": [0, 1]}, {"hi": [1, 2]}, {"combine": ADD}, {"weight": 0.25}]
DIFFERENT = [
    *(made_of(Step.of(**BASE | change)) for change in ({}, *CHANGES)),
    made_of(MOVED, MOVED),
    made_of(MOVED.rows(np.array([0])), MOVED.rows(np.array([1]))),
    made_of(MOVED, ranks=4),
    made_of(MOVED, chunks=5),
    made_of(),
    made_of(MOVED, IDLE),
    made_of(IDLE, MOVED),
]


@pytest.mark.parametrize("what", ALIKE)
def test_the_digest_does_not_depend_on_what_moves_nothing(what):
    one, other = ALIKE[what]
    assert one.digest() == other.digest()


def test_the_digest_changes_with_all_that_moves_its_cut_into_steps_and_the_shape():
    assert len({schedule.digest() for schedule in DIFFERENT}) == len(DIFFERENT)


CATALOGUE = st.builds(lambda build, ranks: build(0, ranks), st.sampled_from([*BUILDERS.values()]), st.integers(1, 13))


@settings(max_examples=60)
@given(random_schedules() | CATALOGUE)
def test_programs_of_all_ranks_hold_every_transfer_once_on_each_end(schedule):
    programs = [program(schedule, rank) for rank in range(schedule.ranks)]
    for number, step in enumerate(map(Step.canonical, schedule.steps())):
        rows = sorted(zip(*(column.tolist() for column in step.columns), strict=True))
        ends = [(mine.rank, mine.hops[number]) for mine in programs]
        sends = [(r, leg.peer, leg.lo, leg.hi, leg.combine, leg.weight) for r, hop in ends for leg in hop.sends]
        recvs = [(leg.peer, r, leg.lo, leg.hi, leg.combine, leg.weight) for r, hop in ends for leg in hop.recvs]
        assert sorted(sends) == sorted(recvs) == rows
        for legs in (legs for _, hop in ends for legs in (hop.sends, hop.recvs)):
            assert [*legs] == sorted(legs, key=lambda leg: (leg.peer, leg.lo)), "so both ends meet in one order"


@settings(max_examples=50)
@given(schedule=random_schedules(), data=st.data())
def test_members_play_what_their_places_do(schedule, data):
    ranks = schedule.ranks + data.draw(st.integers(0, 3))
    members = data.draw(st.permutations(range(ranks)))[: schedule.ranks]
    for rank in members:
        kept, made = member_program(schedule, members, rank, ranks), program(schedule.over(members, world=ranks), rank)
        assert repr(kept) == repr(made), "but for NCCL groups, which it leaves out"


@given(numel=st.integers(0, 5000), chunks=st.integers(1, 70), granule=st.integers(1, 64))
def test_spans_cover_exactly_in_even_chunks_that_start_at_granules(numel, chunks, granule):
    bounds = chunk_bounds(numel, chunks, granule)
    sizes = [hi - lo for lo, hi in pairwise(bounds)]
    grains = [-(-size // granule) for size in sizes]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, numel, chunks)
    assert min(sizes) >= 0
    assert all(lo % granule == 0 for lo, size in zip(bounds, sizes, strict=False) if size)
    assert max(grains) - min(grains) <= 1


def test_folding_serves_a_few_helpers_and_takes_under_three_buffers():
    folds = [traffic(halving_doubling.all_reduce(p)) for p in (*RANKS, 97) if p & (p - 1)]
    folds += [traffic(BUILDERS[name](0, p)) for name in ("torus2d", "both ways") for p in (5, 7, 13, 17, 31, 97)]
    assert max(cost.bytes_per_rank for cost in folds) < 3
    assert max(cost.max_peers for cost in folds) <= MAX_HELPERS


@pytest.mark.parametrize("grid", [(3, 5), (12, 0), (-3, -4), (1, 1)], ids=str)
def test_a_grid_that_does_not_fit_is_refused_naming_one_that_does(grid):
    with pytest.raises(UsageError, match=rf"{grid[0]} x {grid[1]} does not fit 12 ranks.* multiply to 12") as caught:
        Torus2D(grid).schedule(0, 12)
    named = re.search(r"such as (\d+) x (\d+)", str(caught.value))
    assert Torus2D(tuple(map(int, named.groups()))).schedule(0, 12).ranks == 12


@pytest.mark.parametrize(("nodes", "per_node", "count"), [(1, 4, 4), (2, 4, 2), (3, 5, 5), (4, 8, 8), (5, 3, 2)])
def test_each_ring_leaves_a_node_by_another_rank(nodes, per_node, count):
    schedule = Rings(count, per_node).schedule(0, nodes * per_node)
    step = next(schedule.steps())
    leaving = step.src[step.src // per_node != step.dst // per_node]
    assert len(leaving) == len(set(leaving.tolist())) == (count * nodes if nodes > 1 else 0)


def test_schedules_that_sum_over_many_steps_are_known():
    hosts = direct.all_reduce_within(2, direct.all_reduce(4))
    schedules = (ring.all_reduce(8), halving_doubling.all_reduce(8), direct.all_reduce(8), hosts)
    assert [summing_steps(each) for each in schedules] == [7, 3, 1, 2]


def test_equal_arguments_give_the_same_object_which_is_proven_once():
    for collective in COLLECTIVES:
        one, again = candidates(collective, 8), candidates(collective, 8)
        assert [name for name in one if one[name] is not again[name]] == [], collective
    for algorithm in (*(make() for make in ALGORITHMS.values()), Torus2D(both_ways=True), Sliced()):
        assert algorithm.schedule(0, 12) is algorithm.schedule(7, 12), algorithm


def test_the_candidates_are_those_that_take_the_rank_count():
    names = {"tree", "scatter_gather", "chain", "pairwise", "ring", "doubling", "halving", "bruck", "direct"}
    assert names & {*candidates("all_gather", 8)} == {"ring", "doubling", "bruck", "direct"}
    assert names & {*candidates("reduce_scatter", 6)} == {"ring", "bruck", "direct"}
    assert names & {*candidates("all_gather", 1025)} == {"ring", "bruck"}
    assert names & {*candidates("all_to_all", 1025)} == {"pairwise"}
    assert names & {*candidates("broadcast", 1025)} == {"tree", "scatter_gather", "direct", "chain"}


def test_a_name_that_two_modules_register_is_refused(monkeypatch):
    monkeypatch.setattr(catalogue, "MODULES", (ring, SimpleNamespace(__name__="mine", REGISTERED=ring.REGISTERED[:1])))
    with pytest.raises(
        ValueError, match=r"mine registers 'ring' of all_gather, a name that commrt\.algorithms\.ring has"
    ):
        catalogue.registered()


RING = ring.all_reduce(3)
NAMES = "all_gather, all_reduce, all_to_all, barrier, broadcast, gather, reduce, reduce_scatter, scatter"
LARGE = (spec.gather, spec.scatter, spec.all_to_all, spec.all_gather, spec.reduce_scatter)
NO_PLACES = "cannot be laid on chunks .* must lie inside and be a multiple of 3 long"
NOT_THREE = ([0, 1], [0, 1, 2, 3], [0, 1, 1], [[0, 1, 2], [2, 3, 4]])
EVERY, NO_CALLS = [*ALGORITHMS, *POLICIES], [(-1, 4), (0, 0), (0, "4")]
REFUSED = [
    (r"push \(2 ranks, 1 chunk\) and ring \(3 ranks, 3 chunks\) do not fit", lambda: PUSH.then(RING)),
    (r"push \(2 ranks, 1 chunk\) and ring \(3 ranks, 3 chunks\) do not fit", lambda: PUSH.beside(RING)),
    ("of no schedules: use empty", lambda: beside([])),
    (r"not ring alone: write beside\(\[a, b\]\)", lambda: beside(RING, RING)),
    *((r"ring needs 3 different ranks, got \[\[", partial(RING.over, ranks, world=9)) for ranks in NOT_THREE),
    *((r"ranks must lie in 0\.\.4", partial(RING.over, ranks, world=5)) for ranks in ([0, 1, 5], [-1, 0, 1])),
    *((NO_PLACES, partial(RING.within, *place)) for place in ((0, 4, 6), (3, 6, 5), (-3, 0, 6), (3, 3, 6))),
    *((r"fold onto 3\.\.6 ranks", partial(folded, RING, ranks)) for ranks in (2, 7)),
    *((r"be different ranks out of 0\.\.3", partial(spec.all_reduce, 4, 4, of)) for of in ((), (4,), (-1,), (1, 1))),
    ("count=0: give a whole number", lambda: Rings(0)),
    ("4 rings need as many ranks in a node", lambda: Rings(4, 2)),
    ("6 ranks do not fill nodes of 4", lambda: Rings(2, 4).schedule(0, 6)),
    ("slices=0: give a whole number", lambda: DoubleTree(slices=0)),
    ("8 ranks do not fill nodes of within=3", lambda: DoubleTree(3).schedule(0, 8)),
    (r"slices=0: a buffer is cut into 1, 2, \.\.\. slices", lambda: chain.reduce(4, slices=0)),
    (r"take 1, 2, 4, 8, \.\.\. ranks, not 6", lambda: halving_doubling.reduce_scatter(6)),
    ("takes up to 1,024 ranks", lambda: direct.all_gather(1025)),
    (f"no collective is called 'alltoall': choose one of {NAMES}", lambda: candidates("alltoall", 4)),
    (f"no collective is called 'alltoall': choose one of {NAMES}", lambda: spec.collective_of("alltoall", 4, 4)),
    ("rank 4 cannot be the root of a broadcast over 4 ranks", lambda: candidates("broadcast", 4, 4)),
    ("rank -1 cannot be the root of a all_gather over 4 ranks", lambda: candidates("all_gather", 4, -1)),
    (r"choose one of 0\.\.2", lambda: tree.broadcast(3, root=5)),
    *((r"members \[4\] must be", partial(each, 4, 4, root=4)) for each in (spec.gather, spec.scatter, spec.broadcast)),
    *(("too large for a proof", partial(promise, 4096, 1 << 24)) for promise in LARGE),
    ("6 ranks do not fill hosts of within=4: use Direct", lambda: Direct(within=4).schedule(0, 6)),
    ("without within=: give the number of ranks of a host too", lambda: Direct(between=Ring())),
    ("makes no schedules: pass an object", lambda: Direct(within=2, between=Ring)),
    ("'ring' is no schedule", lambda: prove("ring", None)),
    ("'sum' is no collective", lambda: prove(RING, "sum")),
    ("ranks='x': give a whole number", lambda: spec.gather("x", 1)),
    ("None is no schedule", lambda: beside([RING, None])),
    ("ranks are no whole numbers", lambda: RING.over("x")),
    *(("slices", partial(Sliced, slices=count)) for count in (0, 1.5)),
    ("cannot be cut in", lambda: in_slices(RING, 0)),
    *(("give a whole number", partial(by_name(name).schedule, *call)) for name, call in product(EVERY, NO_CALLS)),
    ("'tours2d': choose one of .*direct, .*gossip", lambda: by_name("tours2d")),
]


@pytest.mark.parametrize(("why", "make"), REFUSED)
def test_what_makes_no_schedule_is_refused(why, make):
    with pytest.raises((ScheduleError, UsageError), match=why):
        make()
