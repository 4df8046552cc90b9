# SPDX-License-Identifier: Apache-2.0
"""A bucket's step remembered by its device: the same bits as call by call, whatever changes between steps.

A tape stands for the CUDA graph: while it records, launches of kernels and calls of NCCL are noted instead of made, and
host code runs once. Replaying makes the noted calls again, with their arguments as they were.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from interpreter import interpreted_gpu
from torch import nn
from torch.distributed import PrefixStore

import commrt
from commrt.buckets import build_buckets
from commrt.kernels.device import combine, packing
from commrt.kernels.layout import layout_of
from commrt.kernels.packing import bits
from commrt.repeating import FIRST, KEPT, NOT_HERE, NOTHING_QUEUED, Repetition
from commrt.stamp import Claim, stamp
from commrt.streams import DONE
from commrt.testing import nccl as stand_in
from commrt.testing.ranks import run_ranks
from commrt.transport import nccl as transport_module
from commrt.transport.nccl import NcclTransport
from commrt.transport.protocol import CPU, Moment


class Tape(threading.local):
    """What the calling thread's device remembers."""

    notes = None
    replays = 0

    def make(self, call):
        """Make `call`, or note it."""
        if self.notes is None:
            call()
        else:
            self.notes.append(call)

    def record(self, work):
        """What `work` asks the device to do, to be done by calling this."""
        self.notes = notes = []
        try:
            work()
        finally:
            self.notes = None

        def replay():
            self.replays += 1
            for call in notes:
                call()

        return replay


tape = Tape()


class Streams:
    """Those of a device that can remember."""

    def use(self):
        pass

    enter = use

    def current(self):
        return 0

    def mark(self):
        assert tape.notes is None  # or nobody could ask whether it was reached
        return DONE

    def follow(self, mark):
        pass

    def capture(self, work):
        return tape.record(work)


class TapedCommunicator:
    def __init__(self, *arguments):
        self._inner = stand_in.NcclCommunicator(*arguments)
        self.abort, self.destroy = self._inner.abort, self._inner.destroy
        self.check_async_error = self._inner.check_async_error

    def send(self, *arguments):
        tape.make(partial(self._inner.send, *arguments))

    def recv(self, *arguments):
        tape.make(partial(self._inner.recv, *arguments))


TAPED = SimpleNamespace(
    **{
        **vars(stand_in),
        "NcclCommunicator": TapedCommunicator,
        "groupStart": lambda: tape.make(stand_in.groupStart),
        "groupEnd": lambda: tape.make(stand_in.groupEnd),
    }
)


def over_taped_nccl(store, ranks, timeout_s):
    shelf = PrefixStore("nccl", store)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: NcclTransport(shelf, rank, ranks, timeout_s, CPU, TAPED), range(ranks)))


@pytest.fixture
def gpu(monkeypatch):
    """CPU tensors count as a GPU's, which remembers what it is told to."""
    monkeypatch.setattr(transport_module, "streams_of", lambda device: Streams())
    with interpreted_gpu() as launches:
        for module in (packing, combine):
            monkeypatch.setattr(module, "launch_of", partial(taped_launch, launches))
        yield launches


def taped_launch(launches, variant, device):
    launch = launches.launch_of(variant, device)
    return lambda *arguments: tape.make(partial(launch, *arguments))


UNTRAINED = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
STEPS = 6


def trained(world, graphs, wire=None, steps=STEPS):
    model = deepcopy(UNTRAINED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = commrt.attach(model, optimizer, commrt.Ring(), world=world, wire=wire, bucket_cap_mb=1e-5, graphs=graphs)
    reasons, kept = [], []
    for step in range(steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + world.rank))
        kept.append([param.grad for param in model.parameters()])  # so that the next ones lie elsewhere
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        reasons.append(set(replica.why_not_graphs().values()))
    replays = world.lane.submit(lambda: tape.replays).result()
    return [param.tolist() for param in model.parameters()], reasons, replays, len(replica.buckets)


@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_training_by_graphs_gives_the_bits_of_training_call_by_call(gpu, wire):
    by_graphs = run_ranks(2, lambda world: trained(world, True, wire), connect=over_taped_nccl)
    by_calls = run_ranks(2, lambda world: trained(world, False, wire), connect=over_taped_nccl)
    assert [params for params, *_ in by_graphs] == [params for params, *_ in by_calls]
    for _, reasons, replays, buckets in by_graphs:
        assert reasons == [{FIRST}, *[set()] * (STEPS - 1)]
        assert replays == (STEPS - 1) * buckets > STEPS
    assert [replays for _, _, replays, _ in by_calls] == [0, 0]


def test_where_transfers_are_waited_for_the_reason_is_said():
    (_, reasons, *_), _ = run_ranks(2, lambda world: trained(world, True))
    assert reasons == [{FIRST}, *[{NOT_HERE}] * (STEPS - 1)]


class Counted:
    """A transport that remembers, and counts how often it is asked to."""

    def __init__(self, refusal=None):
        self.captures, self._refusal = 0, refusal

    def capture(self, work, group):
        self.captures += 1
        if self._refusal is not None:
            raise self._refusal
        replay = tape.record(work)
        return lambda moment: replay()


class Program:
    """What runs between packing and unpacking: nothing."""

    group = None

    def run(self, moment):
        pass


@pytest.fixture
def bucket(gpu):
    params = [(name, nn.Parameter(torch.randn(count))) for name, count in (("a", 40), ("b", 33))]
    (only,) = build_buckets(params, None, 1 << 20)
    return only


def take(bucket, step, skew=0):
    for _, param in bucket.params:
        param.grad = torch.randn(param.numel() + skew)[skew:]
    claim = Claim(0, 1, 0, step, 0, 0)
    bucket.take(claim, lambda name: True)
    return stamp(claim)


def test_what_is_repeated_has_the_step_s_own_stamp_scale_and_gradients(bucket):
    repetition = Repetition(bucket, Counted())
    program, layout = Program(), layout_of([40, 33])
    for step, scale in enumerate([0.5, 0.5, 0.25, 2.0]):
        word = take(bucket, step)
        expected = [param.grad * scale for _, param in bucket.params]
        versions = [param.grad._version for _, param in bucket.params]
        if not repetition.carry(program, scale, Moment(step, 0)):
            bucket.pack(scale)
            bucket.unpack()
        bucket.settle()
        assert [param.grad._version for _, param in bucket.params] == [version + 1 for version in versions]
        assert torch.equal(layout.stamp(bucket.wire) != 0, bits(word))
        assert all(torch.equal(param.grad, want) for (_, param), want in zip(bucket.params, expected, strict=True))
    assert repetition.reason is None


def carried(repetition, bucket, program, step, skew=0):
    take(bucket, step, skew)
    done = repetition.carry(program, 1.0, Moment(step, 0))
    if not done:
        bucket.pack(1.0)
        bucket.unpack()
    bucket.settle()
    return done


def test_gradients_that_lie_less_aligned_are_remembered_anew(bucket):
    transport = Counted()
    repetition, program = Repetition(bucket, transport), Program()
    done = [carried(repetition, bucket, program, step, skew) for step, skew in enumerate([0, 0, 1, 1, 0])]
    assert done == [False, True, True, True, True]
    assert transport.captures == 3


def test_each_program_is_first_carried_call_by_call_and_the_oldest_is_forgotten(bucket):
    transport = Counted()
    repetition, programs = Repetition(bucket, transport), [Program() for _ in range(KEPT + 1)]
    for step, program in enumerate(programs):
        assert not carried(repetition, bucket, program, step)
    assert carried(repetition, bucket, programs[-1], 100)
    assert not carried(repetition, bucket, programs[0], 101)
    assert repetition.reason == FIRST


def test_a_missing_gradient_is_carried_call_by_call_and_the_next_step_repeats(bucket):
    repetition, program = Repetition(bucket, Counted()), Program()
    assert [carried(repetition, bucket, program, step) for step in range(2)] == [False, True]
    bucket.params[0][1].grad = None
    bucket.take(Claim(0, 1, 0, 2, 0, 0), lambda name: False)
    assert not repetition.carry(program, 1.0, Moment(2, 0))
    assert repetition.reason == NOT_HERE
    assert carried(repetition, bucket, program, 3)


def test_a_device_that_refuses_is_asked_once_and_its_reason_is_kept(bucket):
    transport = Counted(RuntimeError("operation not permitted when stream is capturing"))
    repetition, program = Repetition(bucket, transport), Program()
    assert not any(carried(repetition, bucket, program, step) for step in range(4))
    assert transport.captures == 1
    assert repetition.reason == "the device refused: operation not permitted when stream is capturing"


def test_a_transport_that_queues_nothing_is_asked_once(bucket):
    transport = SimpleNamespace(capture=lambda work, group: None)
    repetition, program = Repetition(bucket, transport), Program()
    assert not any(carried(repetition, bucket, program, step) for step in range(3))
    assert repetition.reason == NOTHING_QUEUED
