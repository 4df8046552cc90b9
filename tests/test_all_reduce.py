# SPDX-License-Identifier: Apache-2.0
"""world.all_reduce() and world.run() of single tensors, and the Work that they return."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta

import averaging_ranks
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreter import interpreted_gpu

import commrt
from commrt.algorithms.catalogue import ALGORITHMS
from commrt.errors import DeadlineExceeded, DisagreementError, TransportClosed, UsageError
from commrt.store.launcher import TRANSPORTS
from commrt.testing.faults import delay_at, drop_at, with_faults
from commrt.testing.processes import run_processes
from commrt.testing.ranks import run_ranks


class Odd(torch.Tensor):
    """A subclass."""


class OfTwo:
    """An algorithm that knows two ranks only."""

    def schedule(self, step, ranks):
        return commrt.Ring().schedule(step, 2)


def summed(world, tensor, **kwargs):
    world.all_reduce(tensor, **kwargs)
    return tensor


@pytest.mark.parametrize("algorithm", [make() for make in ALGORITHMS.values()], ids=ALGORITHMS)
@given(
    size=st.sampled_from([1, 2, 3, 4, 5, 7]),
    shape=st.lists(st.integers(0, 5), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64]),
)
@example(size=2, shape=[2, 0, 1], dtype=torch.float32)  # torch gives it a stride of 0
@settings(max_examples=15)
def test_the_sum_of_any_tensor_is_the_sum(algorithm, size, shape, dtype):
    def body(world):
        return summed(world, values.to(dtype) + world.rank, op="sum", algorithm=algorithm)

    values = torch.arange(torch.Size(shape).numel()).view(shape) % 32  # bf16 has all whole numbers up to 256
    base = values * size + size * (size - 1) // 2
    for result in run_ranks(size, body):
        assert result.dtype == dtype
        assert torch.equal(result, base.to(dtype))


def test_the_mean_is_what_attach_makes_of_a_gradient():
    def body(world):
        model = torch.nn.Linear(3, 5, bias=False)
        torch.nn.init.ones_(model.weight)
        replica = commrt.attach(model, world=world, wire=torch.bfloat16)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(world.rank))
        model(x).sum().backward()
        replica.detach()
        averaged, model.weight.grad = model.weight.grad, None
        model(x).sum().backward()
        return torch.equal(averaged, summed(world, model.weight.grad, wire=torch.bfloat16))

    assert run_ranks(4, body) == [True] * 4


@pytest.mark.parametrize(
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
def test_only_the_elements_of_a_view_are_written(view):
    def body(world):
        whole = torch.full((6, 8), float(world.rank))
        chosen = view(whole)
        world.all_reduce(chosen)
        return whole, chosen

    for rank, (whole, chosen) in enumerate(run_ranks(3, body)):
        assert torch.equal(chosen, torch.ones_like(chosen))
        expected = torch.full((6, 8), float(rank))
        if chosen.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            view(expected).fill_(1.0)
        assert torch.equal(whole, expected)


def test_a_view_that_torch_negates_when_it_is_read_is_summed_as_it_reads():
    def body(world):
        whole = torch.tensor([1 + 2j, 3 + 4j]) * (world.rank + 1)
        world.all_reduce(whole.conj().imag, "sum")
        return whole.tolist()

    assert run_ranks(3, body) == [[(rank + 1) + 12j, 3 * (rank + 1) + 24j] for rank in range(3)]


def test_one_buffer_serves_tensors_of_all_sizes():
    def body(world):
        results = [summed(world, torch.full((n,), float(world.rank)), op="sum") for n in (10, 1000, 0, 17, 1000, 10)]
        wires = sum(use == "wire" for use, *_ in world._sums._memory)
        summed(world, torch.ones(2000))  # nothing is left of the smaller wire
        return [result.unique().tolist() for result in results], wires, len(world._sums._prepared._bound)

    assert run_ranks(3, body) == [([[3.0], [3.0], [], [3.0], [3.0], [3.0]], 1, 1)] * 3


def test_the_kernels_are_given_dense_tensors():
    def body(world):
        whole = torch.full((6, 8), float(world.rank))
        world.all_reduce(whole[::2])
        return whole[:, 0].tolist()

    with interpreted_gpu():
        results = run_ranks(2, body)
    assert results == [[0.5, rank, 0.5, rank, 0.5, rank] for rank in range(2)]


def test_works_begun_together_end_in_order_and_may_be_waited_for_in_any():
    def body(world):
        tensors = [torch.full((50 * n + 1,), float(world.rank + n)) for n in range(6)]
        works = [world.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in reversed(works):
            work.wait(timeout=timedelta(seconds=10))
        assert all(work.is_completed() for work in works)
        return [tensor.unique().tolist() for tensor in tensors]

    assert run_ranks(3, body) == [[[1.0 + n] for n in range(6)]] * 3


def test_a_schedule_runs_asynchronously_and_its_future_has_the_tensor():
    def body(world):
        buffer = torch.full((9,), float(world.rank))
        work = world.run(commrt.Ring().schedule(0, world.size), buffer, async_op=True)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        return doubled.wait().tolist(), work.get_future().wait()[0] is buffer, work.is_completed()

    assert run_ranks(3, body) == [([6.0] * 9, True, True)] * 3


def test_a_future_that_somebody_else_completes_harms_nobody():
    def body(world):
        tensor = torch.ones(4)
        world.all_reduce(tensor)
        work = world.all_reduce(tensor, "sum", async_op=True, tag=commrt.Tag(1, "x"))
        work.get_future().set_result([tensor])
        work.wait()
        return summed(world, tensor).tolist()

    assert run_ranks(2, body, wrap=with_faults(delay_at(step=1, seconds=0.3))) == [[2.0] * 4] * 2


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


def test_the_error_of_a_wait_names_the_transfer_that_failed():
    def body(world):
        tensor = torch.ones(4)
        world.all_reduce(tensor)
        work = world.all_reduce(tensor, async_op=True, tag=commrt.Tag(7, "norm"))
        with pytest.raises(commrt.TransportError, match=r"step 7, bucket norm"):
            work.wait()
        with pytest.raises(commrt.TransportError):
            work.get_future().wait()
        with pytest.raises(TransportClosed, match="an earlier transfer failed"):
            world.all_reduce(tensor)
        return work.is_completed(), tensor.tolist()

    wrap = with_faults(drop_at(step=7, rank=0))
    assert run_ranks(2, body, timeout_s=1.0, wrap=wrap) == [(True, [1.0] * 4)] * 2


@pytest.mark.parametrize("is_dropped_early", [True, False])
def test_the_error_of_a_transfer_for_which_nobody_waits_is_logged(caplog, is_dropped_early):
    def body(world):
        world.all_reduce(tensor := torch.ones(4))
        work = world.all_reduce(tensor, async_op=True, tag=commrt.Tag(7, "norm"))
        if not is_dropped_early:
            with suppress(commrt.TransportError):
                world.wait()
        del work

    wrap = with_faults(drop_at(step=7, rank=0))
    run_ranks(2, body, timeout_s=1.0, wrap=wrap)
    told = [record.getMessage() for record in caplog.records if "nobody waited" in record.getMessage()]
    assert sorted(line.split(":")[1] for line in told) == [" rank 0", " rank 1"]
    assert all("step 7, bucket norm" in line for line in told)


def test_an_error_that_was_raised_is_not_logged_as_well(caplog):
    def body(world):
        world.all_reduce(tensor := torch.ones(4))
        with pytest.raises(commrt.TransportError):
            world.all_reduce(tensor, async_op=True, tag=commrt.Tag(7, "norm")).wait()

    run_ranks(2, body, timeout_s=1.0, wrap=with_faults(drop_at(step=7, rank=0)))
    assert "nobody waited" not in caplog.text


@pytest.mark.parametrize(
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
def test_ranks_that_mean_different_sums_are_told(change, what):
    def body(world):
        call = {"tensor": torch.ones(2, 3)} | change(world.rank % 2)
        with pytest.raises(DisagreementError, match=what):
            world.all_reduce(**call)
        return call["tensor"].unique().tolist()

    assert run_ranks(4, body) == [[1.0]] * 4


REFUSED = [
    ({"tensor": [1.0]}, "takes a tensor, not a list"),
    ({"op": "max"}, "op='max': use"),
    ({"tensor": torch.ones(3).to_sparse()}, r"which is torch\.sparse_coo, or nested"),
    ({"tensor": torch.ones(3, device="meta")}, "meta device"),
    ({"tensor": torch.ones(1).expand(3)}, "several elements share one place"),
    ({"tensor": torch.ones(3, requires_grad=True).sum().detach().as_subclass(Odd)}, "is a Odd: use a plain tensor"),
    ({"tag": 7}, r"tag=7: give a commrt\.Tag"),
    ({"algorithm": commrt.Ring}, "makes no schedules: pass an object"),
    ({"algorithm": OfTwo()}, "made .* for 3 ranks, which is no schedule of them"),
    ({"tensor": torch.ones(3, dtype=torch.int64)}, 'use op="sum"'),
    ({"tensor": torch.ones(3, dtype=torch.bool), "op": "sum"}, r"of torch\.bool: convert it"),
    ({"wire": torch.int8}, r"wire=torch\.int8 cannot travel"),
    ({"algorithm": commrt.Gossip()}, "is no all-reduce"),
    ({"algorithm": commrt.BackupWorkers()}, "is no all-reduce"),
    ({"algorithm": "ring"}, "makes no schedules"),
]


def test_what_cannot_be_summed_is_refused_before_anything_is_sent():
    def body(world):
        for call, what in REFUSED:
            with pytest.raises(UsageError, match=what):
                world.all_reduce(**{"tensor": torch.ones(3)} | call)
        return summed(world, torch.ones(3)).tolist()

    assert run_ranks(3, body) == [[1.0] * 3] * 3


@pytest.mark.processes
def test_collectives_work_in_inference_mode():
    algorithms = [commrt.Torus2D(), commrt.Gossip(), commrt.BackupWorkers()]
    for outcome in run_processes(3, averaging_ranks.in_inference_mode, algorithms, limit_s=60):
        assert outcome.error is None
        assert outcome.value == [([3.0] * 4, True, 0.0)] * 3


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "numel", "wire", "transport"),
    [
        pytest.param(2, 40, torch.float16, "gloo", marks=pytest.mark.slow),
        pytest.param(4, 40, None, "gloo", marks=pytest.mark.slow),
        (4, 170, torch.bfloat16, "shared"),
    ],
    ids=["2 of fp16", "4 of fp32", "4 of bf16"],
)
def test_a_sum_is_never_taken_for_the_comparison_that_another_rank_makes(size, numel, wire, transport, monkeypatch):
    monkeypatch.setenv("COMMRT_TRANSPORT", transport)
    new_to = range(size // 2, size)
    for outcome in run_processes(size, averaging_ranks.a_known_sum_meets_a_new_one, numel, wire, new_to, limit_s=60):
        assert outcome.error is None
        kind, values = outcome.value
        assert kind in {"SizeMismatch", "PeerLost", "DeadlineExceeded", "TransportClosed"}
        assert values == [1.0]


@pytest.mark.processes
@pytest.mark.parametrize("algorithm", [commrt.Gossip(), commrt.BackupWorkers()], ids=repr)
def test_a_schedule_that_names_a_lost_rank_is_refused_and_the_world_goes_on(algorithm):
    outcomes = run_processes(4, averaging_ranks.runs_without_rank_3, algorithm, limit_s=60)
    for outcome in outcomes[:3]:
        assert outcome.error is None
        lost, unequal, *sums = outcome.value
        assert "names ranks [3], which are lost" in lost
        assert "8 elements do not divide into 3 equal chunks, which ring all-gather needs: pad the" in unequal
        assert sums == [[3.0], 3.0]


def test_a_wait_without_end_or_of_something_else_is_refused():
    def body(world):
        for timeout in ("1", True, float("nan"), [1]):
            with pytest.raises(UsageError, match="give seconds, a timedelta, or nothing"):
                world.all_reduce(torch.ones(1), async_op=True).wait(timeout)

    run_ranks(2, body)


def test_a_wait_may_be_of_any_length():
    def body(world):
        work = world.all_reduce(torch.ones(1), async_op=True)
        work.wait()
        for timeout in (10**400, float("inf"), timedelta.max, -1.0):
            work.wait(timeout)

    run_ranks(2, body)


@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_send_different_dtypes_of_one_size_are_told(transport, monkeypatch):
    monkeypatch.setenv("COMMRT_TRANSPORT", transport)
    for outcome in run_processes(2, averaging_ranks.two_wires, limit_s=60):
        assert outcome.value == "DisagreementError", outcome.error


def test_a_slow_rank_is_waited_for():
    def body(world):
        return summed(world, torch.full((3,), float(world.rank)), tag=commrt.Tag(1, "x")).tolist()

    assert run_ranks(3, body, wrap=with_faults(delay_at(step=1, rank=2, seconds=0.2))) == [[1.0] * 3] * 3
