# SPDX-License-Identifier: Apache-2.0
"""world.all_reduce() and world.run() of single tensors, and the Work that they return."""

import gc
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import transports
from cases import for_each, on_ranks
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreter import interpreted_gpu

import commrt
from commrt.algorithms.catalogue import ALGORITHMS
from commrt.algorithms.ring import all_gather
from commrt.errors import DeadlineExceeded, DisagreementError, TransportClosed, TransportError, UsageError
from commrt.runtime import sliced_sum
from commrt.testing.faults import drop_at, with_faults
from commrt.testing.ranks import run_ranks
from commrt.threads.recording import Timeline


@dataclass
class Unhashable:
    """As whoever writes an algorithm may leave it."""

    name: str = "ours"

    def schedule(self, step, ranks):
        return commrt.Ring().schedule(step, ranks)


def summed(world, tensor, **kwargs):
    world.all_reduce(tensor, **kwargs)
    return tensor


@given(
    make=st.sampled_from([*ALGORITHMS.values()]),
    size=st.sampled_from([1, 2, 3, 4, 5, 7]),
    shape=st.lists(st.integers(0, 5), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64]),
)
@example(make=commrt.Ring, size=2, shape=[2, 0, 1], dtype=torch.float32)  # torch gives it a stride of 0
@settings(max_examples=50)
def test_the_sum_of_any_tensor_is_the_sum(make, size, shape, dtype):
    def body(world):
        return summed(world, values.to(dtype) + world.rank, op="sum", algorithm=make())

    values = torch.arange(torch.Size(shape).numel()).view(shape) % 32  # bf16 has all whole numbers up to 256
    base = values * size + size * (size - 1) // 2
    for result in run_ranks(size, body):
        assert result.dtype == dtype
        assert torch.equal(result, base.to(dtype))


@given(
    make=st.sampled_from([*ALGORITHMS.values()]),
    size=st.sampled_from([2, 3, 4, 5]),
    numel=st.integers(1501, 5000),
    wire=st.sampled_from([None, torch.bfloat16]),
)
@settings(max_examples=20)
def test_a_sum_in_slices_has_the_bits_of_a_sum_at_once(make, size, numel, wire):
    def body(world):
        some = torch.randn(numel, 3, generator=torch.Generator().manual_seed(world.rank)).t()
        return summed(world, some, algorithm=make(), wire=wire)

    at_once = run_ranks(size, body)
    with mock.patch.object(sliced_sum, "SLICE_NUMEL", 1500):
        assert all(map(torch.equal, run_ranks(size, body), at_once))


@on_ranks(4)
def test_the_mean_is_what_attach_makes_of_a_gradient(world):
    model = torch.nn.Linear(3, 5, bias=False)
    replica = commrt.attach(model, world=world, wire=torch.bfloat16)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(world.rank))
    model(x).sum().backward()
    replica.detach()
    averaged, model.weight.grad = model.weight.grad, None
    model(x).sum().backward()
    assert torch.equal(averaged, summed(world, model.weight.grad, algorithm=commrt.Torus2D(), wire=torch.bfloat16))


@for_each(
    "view",
    [
        lambda t: t,
        lambda t: t[::2],
        lambda t: t.t(),
        lambda t: t[1:, 2:3],
        lambda t: t[0, 0],
        lambda t: t.view(1, 6, 8, 1).contiguous(memory_format=torch.channels_last),
    ],
    ids=["whole", "every other row", "transposed", "a column", "one number", "channels last"],
)
@on_ranks(3)
def test_only_the_elements_of_a_view_are_written(world, view):
    whole = torch.full((6, 8), float(world.rank))
    chosen, expected = view(whole), whole.clone()
    world.all_reduce(chosen)
    assert torch.equal(chosen, torch.ones_like(chosen))
    if chosen.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
        view(expected).fill_(1.0)
    assert torch.equal(whole, expected)


@on_ranks(3)
def test_a_view_that_torch_negates_when_it_is_read_is_summed_as_it_reads(world):
    whole = torch.tensor([1 + 2j, 3 + 4j]) * (world.rank + 1)
    world.all_reduce(whole.conj().imag, "sum")
    assert whole.tolist() == [(world.rank + 1) + 12j, 3 * (world.rank + 1) + 24j]


@on_ranks(2)
def test_memory_that_a_larger_sum_replaces_is_let_go_of(world):
    allocated = []

    def noted(numel, dtype, device):
        memory = np.zeros(numel * dtype.itemsize, np.uint8)
        allocated.append(weakref.ref(memory))
        return torch.from_numpy(memory).view(dtype)

    with mock.patch.object(world.transport, "allocate", noted):
        for numel in (*range(1000, 200_000, 10_000), 0, 17, 1000):
            assert summed(world, torch.ones(numel), op="sum", algorithm=Unhashable()).sum() == 2 * numel
            for _ in range(2):
                assert summed(world, torch.ones(numel), op="sum").sum() == 2 * numel
    gc.collect()
    assert len(allocated) > 20
    assert sum(row() is not None for row in allocated) < 5


def test_the_kernels_are_given_dense_tensors():
    def body(world):
        whole = torch.full((6, 8), float(world.rank))
        world.all_reduce(whole[::2])
        return whole[:, 0].tolist()

    with interpreted_gpu():
        results = run_ranks(2, body)
    assert results == [[0.5, rank, 0.5, rank, 0.5, rank] for rank in range(2)]


@on_ranks(3)
def test_works_begun_together_end_in_order_and_may_be_waited_for_in_any(world):
    tensors = [torch.full((50 * n + 1,), float(world.rank + n)) for n in range(6)]
    works = [world.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait(timeout=timedelta(seconds=10))
    assert all(work.is_completed() for work in works)
    assert [tensor.unique().tolist() for tensor in tensors] == [[1.0 + n] for n in range(6)]


@on_ranks(3)
def test_a_schedule_runs_asynchronously_and_its_future_has_the_tensor(world):
    buffer = torch.full((9,), float(world.rank))
    work = world.run(commrt.Ring().schedule(0, world.size), buffer, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait().tolist() == [6.0] * 9
    assert work.get_future().wait()[0] is buffer
    assert work.is_completed()


def test_a_wait_that_ends_early_leaves_the_transfer_under_way():
    gate = threading.Event()

    def body(world):
        tensor = torch.ones(4)
        world.all_reduce(tensor)  # the first of its kind compares
        if world.rank == 1:
            gate.wait(10)
        work = world.all_reduce(tensor, "sum", async_op=True)
        if world.rank == 0:
            assert not work.is_completed()
            with pytest.raises(DeadlineExceeded, match=r"still in flight after 0\.01 s: wait\(\) again"):
                work.wait(0.01)
            gate.set()
        work.wait()
        return tensor.tolist()

    assert run_ranks(2, body) == [[2.0] * 4] * 2


LOST = with_faults(drop_at(step=7, rank=0))


def begin_lost(world):
    """A sum of ones of which a message is lost."""
    tensor = torch.ones(4)
    ring = commrt.Ring()  # in which each rank waits for another one
    world.all_reduce(tensor, algorithm=ring)
    return tensor, world.all_reduce(tensor, algorithm=ring, async_op=True, tag=commrt.Tag(7, "norm"))


@on_ranks(2, timeout_s=1.0, wrap=LOST)
def test_the_error_of_a_wait_names_the_transfer_that_failed(world):
    tensor, work = begin_lost(world)
    with pytest.raises(TransportError, match=r"step 7, bucket norm"):
        work.wait()
    with pytest.raises(TransportError):
        work.get_future().wait()
    with pytest.raises(TransportClosed, match="an earlier transfer failed"):
        world.all_reduce(tensor)
    assert work.is_completed()
    assert tensor.tolist() == [1.0] * 4


@pytest.mark.parametrize("ends", ["dropped early", "failed", "waited for"])
def test_the_error_of_a_transfer_is_logged_if_nobody_waits_for_it(caplog, ends):
    def body(world):
        _, work = begin_lost(world)
        if ends != "dropped early":
            with suppress(TransportError):
                work.wait() if ends == "waited for" else world.wait()
        del work

    run_ranks(2, body, timeout_s=1.0, wrap=LOST)
    logged = [record.getMessage() for record in caplog.records if "nobody waited" in record.getMessage()]
    expected = [] if ends == "waited for" else [" rank 0", " rank 1"]
    assert sorted(line.split(":")[1] for line in logged) == expected
    assert all("step 7, bucket norm" in line for line in logged)


@for_each(
    ("change", "what"),
    [
        (lambda rank: {"op": ("mean", "sum")[rank]}, "another op, shape, layout in memory"),
        (lambda rank: {"tensor": torch.ones(((2, 3), (3, 2))[rank])}, "another op, shape, layout in memory"),
        (lambda rank: {"tensor": torch.ones(2 + 100 * rank)}, "disagrees with rank 0 about numel"),
        (lambda rank: {"wire": (None, torch.bfloat16)[rank]}, "disagrees with rank 0 about dtype"),
        (lambda rank: {"algorithm": (commrt.Ring(), commrt.HalvingDoubling())[rank]}, "about schedule"),
    ],
    ids=["op", "shape", "numel", "wire", "algorithm"],
)
@on_ranks(4)
def test_ranks_that_mean_different_sums_are_told(world, change, what):
    call = {"tensor": torch.ones(2, 3)} | change(world.rank % 2)
    with pytest.raises(DisagreementError, match=what):
        world.all_reduce(**call)
    assert call["tensor"].unique().tolist() == [1.0]


class Odd(torch.Tensor):
    """A subclass."""


REFUSED = [
    ({"tensor": [1.0]}, "takes a tensor, not a list"),
    ({"op": "max"}, "op='max': use"),
    ({"tensor": torch.ones(3).to_sparse()}, r"which is torch\.sparse_coo, or nested"),
    ({"tensor": torch.ones(3, device="meta")}, "meta device"),
    ({"tensor": torch.ones(1).expand(3)}, "several elements share one place"),
    ({"tensor": torch.ones(3, requires_grad=True).sum().detach().as_subclass(Odd)}, "is a Odd: use a plain tensor"),
    ({"tag": 7}, r"tag=7: give a commrt\.Tag"),
    ({"algorithm": commrt.Ring}, "makes no schedules: pass an object"),
    (
        {"algorithm": SimpleNamespace(schedule=lambda *_: all_gather(2))},
        "of 2 ranks for a world of 3: raise UsageError",
    ),
    ({"algorithm": SimpleNamespace(schedule=lambda step, ranks: None)}, r"schedule\(0, 3\) returned None: return"),
    ({"algorithm": SimpleNamespace(schedule=lambda ranks: None)}, r"has schedule\(ranks\): give it the signature"),
    ({"algorithm": commrt.Ring().schedule(0, 3)}, "=the schedule ring: wrap it in an object"),
    ({"tensor": torch.ones(3, dtype=torch.int64)}, 'use op="sum"'),
    ({"tensor": torch.ones(3, dtype=torch.bool), "op": "sum"}, r"of torch\.bool: convert it"),
    ({"wire": torch.int8}, r"wire=torch\.int8 cannot travel"),
    ({"algorithm": commrt.Gossip()}, "is no all-reduce"),
]


@on_ranks(3)
def test_what_cannot_be_summed_is_refused_before_anything_is_sent(world):
    for call, what in REFUSED:
        with pytest.raises(UsageError, match=what):
            world.all_reduce(**{"tensor": torch.ones(3)} | call)
    assert summed(world, torch.ones(3)).tolist() == [1.0] * 3


@for_each("algorithm", [commrt.Torus2D(), commrt.Gossip(), commrt.BackupWorkers()])
@on_ranks(3)
def test_collectives_work_in_inference_mode(world, algorithm):
    """In it torch makes tensors that other threads cannot write to."""
    model = torch.nn.Linear(3, 1)
    replica = commrt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm, world=world)
    tensor = torch.ones(4)
    with torch.inference_mode():
        world.all_reduce(tensor, "sum")
        replica.consolidate()
        assert (tensor.tolist(), replica.replicas_equal(), replica.disagreement()) == ([3.0] * 4, True, 0.0)


def over(connect):
    return lambda store, ranks, timeout_s: connect(ranks, timeout_s)


CONNECTIONS = {"gloo": over(transports.gloo), "shared": over(transports.shared)}


@for_each(
    ("size", "numel", "wire", "connect"),
    [(2, 40, torch.float16, "gloo"), (4, 40, None, "gloo"), (4, 170, torch.bfloat16, "shared")],
)
def test_a_sum_is_never_taken_for_the_comparison_that_another_rank_makes(size, numel, wire, connect):
    def body(world):
        world.all_reduce(torch.ones(numel), wire=wire)
        tensor = torch.ones(1000 if world.rank >= size // 2 else numel)
        with pytest.raises(TransportError):
            world.all_reduce(tensor, "sum", wire=wire)
        return tensor.unique().tolist()

    assert run_ranks(size, body, timeout_s=3.0, connect=CONNECTIONS[connect]) == [[1.0]] * size


@for_each("connect", CONNECTIONS)
def test_ranks_that_send_different_dtypes_of_one_size_are_told(connect):
    def body(world):
        wires = torch.bfloat16, torch.float16
        tensor = torch.ones(8)
        for wire in wires:
            world.all_reduce(tensor, wire=wire)
        with pytest.raises(DisagreementError):
            world.all_reduce(tensor, wire=wires[world.rank])

    run_ranks(2, body, connect=CONNECTIONS[connect])


@for_each("algorithm", [commrt.Gossip(), commrt.BackupWorkers()])
@on_ranks(4)
def test_a_schedule_that_names_a_lost_rank_is_refused_and_the_world_goes_on(world, algorithm):
    model = torch.nn.Linear(3, 1)
    commrt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm, world=world)
    model(torch.ones(2, 3)).sum().backward()
    if world.rank == 3:
        return
    assert summed(world, torch.ones(1), op="sum").item() == 3.0
    with pytest.raises(UsageError, match=r"names ranks \[3\], which are lost"):
        world.run(commrt.Ring().schedule(0, 4), torch.ones(8))
    with pytest.raises(
        UsageError, match=r"8 elements do not divide into 3 equal chunks, .* ring all-gather needs: pad"
    ):
        world.run(all_gather(3).over(world.members, world=4), torch.ones(8))
    world.run(commrt.Ring().schedule(0, 3).over(world.members, world=4), three := torch.ones(8))
    assert three.unique().tolist() == [3.0]
    assert summed(world, torch.ones(1), op="sum").item() == 3.0


@on_ranks(2)
def test_a_wait_may_be_of_any_length_but_not_of_something_else(world):
    work = world.all_reduce(torch.ones(1), async_op=True)
    for timeout in ("1", True, float("nan"), [1]):
        with pytest.raises(UsageError, match="give seconds, a timedelta, or nothing"):
            work.wait(timeout)
    work.wait()
    for timeout in (10**400, float("inf"), timedelta.max, -1.0):
        work.wait(timeout)


BF16_RING = {"wire": torch.bfloat16, "algorithm": commrt.Ring()}
INT8 = {"wire": commrt.Int8(), "algorithm": commrt.Direct(within=2)}


@for_each(("nbytes", "options"), [(400, {}), (400, BF16_RING), (40_000, {}), (40_000, INT8)])
def test_a_call_runs_the_schedule_steps_and_slices_that_explain_names(nbytes, options):
    def body(world):
        world.recorder = Timeline(world.rank)
        world.all_reduce(torch.ones(nbytes // 4), **options)
        said = world.explain(nbytes, **options)
        (ran,) = (each["args"]["algorithm"] for each in world.recorder.events if each["name"] == "sum")
        hops = sum(each["name"] == "hop" for each in world.recorder.events)
        assert (ran, hops) == (said.schedule, said.steps * said.slices)

    with mock.patch.object(sliced_sum, "SLICE_NUMEL", 1500):
        run_ranks(4, body)


def test_explain_prices_for_the_cluster_that_the_environment_names_or_says_that_it_names_none(monkeypatch):
    (default,) = run_ranks(2, lambda world: world.explain(1 << 20))[:1]
    monkeypatch.setenv("COMMRT_CLUSTER", "ethernet-10g")
    (given,) = run_ranks(2, lambda world: world.explain(1 << 20))[:1]
    assert ("COMMRT_CLUSTER" in str(default), default.cluster) == (True, "host")
    assert ("COMMRT_CLUSTER" in str(given), given.cluster) == (False, "ethernet-10g")
    assert given.seconds > default.seconds
