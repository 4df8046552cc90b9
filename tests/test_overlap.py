# SPDX-License-Identifier: Apache-2.0
"""Communication hides behind the backward pass, and buckets leave in one order on all ranks."""

import time

import torch
from cases import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import commrt
from commrt.buckets.plan import plan_buckets
from commrt.buckets.ready_order import ReadyOrder
from commrt.testing.faults import delay_at, with_faults

LAYERS = 8
WIRE_S = 0.020
COMPUTE_S = 0.025


class SlowBackward(torch.autograd.Function):
    """Stands for a layer whose backward pass takes a while, without needing the processor."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(COMPUTE_S)
        return gradient


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(SlowBackward.apply(x)))
        return x


@on_ranks(2, wrap=with_faults(delay_at(seconds=WIRE_S)))
def test_a_slow_wire_hides_behind_the_backward_pass(world):
    model = Deep()
    replica = commrt.attach(model, world=world, bucket_cap_mb=16 * 17 * 4 / 2**20)
    for _ in range(3):
        model(torch.randn(4, 16)).sum().backward()
    stats = replica.stats()
    assert len(replica.last.spans) == LAYERS
    assert stats.comm_s >= 3 * LAYERS * WIRE_S
    assert stats.exposed_s < stats.comm_s / 2


buckets_of_names = st.lists(st.integers(1, 4), min_size=1, max_size=6).map(
    lambda sizes: [tuple(f"{b}.{i}" for i in range(size)) for b, size in enumerate(sizes)]
)


@given(buckets_of_names, st.randoms(use_true_random=False), st.integers(0, 24))
def test_buckets_leave_once_and_in_order_whatever_becomes_ready_first(buckets, random, ready):
    order = ReadyOrder(buckets)
    names = [(b, name) for b, members in enumerate(buckets) for name in members]
    random.shuffle(names)
    for _ in range(2):
        order.arm()
        left = []
        for _, name in names[:ready]:
            left += order.mark(name)
            assert all(set(buckets[i]) <= {n for _, n in names[:ready]} for i in left)
        assert [*left, *order.rest()] == list(range(len(buckets)))


nbytes = st.integers(1, 50).map((1 << 16).__mul__)  # up to some 3 MB: the first bucket closes at 1 MB
sizes = st.lists(st.tuples(nbytes, st.sampled_from([torch.float32, torch.bfloat16])))


@given(sizes, nbytes)
def test_a_plan_has_every_parameter_once_in_buckets_of_one_dtype_that_close_at_the_cap(some, cap):
    plan = plan_buckets(some, cap)
    assert sorted(i for members in plan for i in members) == list(range(len(some)))
    assert plan == sorted(plan, key=lambda members: members[-1])
    for members in plan:
        assert len({some[i][1] for i in members}) == 1
        assert sum(some[i][0] for i in members[:-1]) < cap


def test_a_hundred_thousand_tiny_parameters_are_planned_in_one_pass():
    plan = plan_buckets([(12, torch.float32)] * 100_000, 25 << 20)
    assert [len(members) for members in plan] == [-(-(1 << 20) // 12), 100_000 - -(-(1 << 20) // 12)]
