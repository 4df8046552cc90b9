# SPDX-License-Identifier: Apache-2.0
"""One rank's transports as one; and work that is queued on a device, behind and before other work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases import for_each
from torch.distributed import HashStore

import commrt
from commrt.errors import DeadlineExceeded, TransportClosed, UsageError
from commrt.runtime import init
from commrt.runtime import world as world_module
from commrt.runtime.world import World
from commrt.testing import conformance
from commrt.testing.ranks import over_threads, run_ranks
from commrt.threads.comm_thread import CommThread
from commrt.threads.future import DONE
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag, TransportByDevice

META = torch.device("meta")
NOW = Tag(0, 0)


def by_device(ranks, timeout_s):
    return [TransportByDevice(transport) for transport in over_threads(HashStore(), ranks, timeout_s)]


@for_each("check", conformance.CHECKS)
def test_it_conforms(check):
    check(by_device)


class Elsewhere:
    """A transport for the meta device, where nothing happens."""

    kind = "elsewhere"
    timeout_s = 5.0

    def __init__(self):
        self.bound, self.ends = [], []

    def allocate(self, numel, dtype, device):
        return torch.zeros(numel, dtype=dtype, device=device)

    def bind(self, group):
        self.bound.append(group)
        return lambda tag: None

    def wait(self):
        self.ends.append("wait")

    def close(self):
        self.ends.append("close")

    def abort(self):
        self.ends.append("abort")


@pytest.fixture
def both():
    one, elsewhere = by_device(2, 5.0)[0], Elsewhere()
    one.add(META, elsewhere)
    yield one, elsewhere
    one.abort()


def test_a_group_is_carried_by_the_transport_of_its_device(both):
    one, elsewhere = both
    group = P2PGroup([P2PMessage(1, torch.ones(3, device=META))], [])
    one.bind(group)(NOW)
    assert elsewhere.bound == [group]
    assert one.allocate(3, torch.float32, META).device == META
    assert one.allocate(3, torch.float32).device.type == "cpu"
    assert one.kind == "elsewhere and local"


def test_a_group_on_two_devices_is_refused(both):
    with pytest.raises(UsageError, match=r"hop 2: its tensors lie on \['cpu', 'meta'\]"):
        both[0].bind(P2PGroup([P2PMessage(1, torch.ones(3, device=META))], [P2PMessage(1, torch.ones(3))], hop=2))


def test_a_gpu_that_is_not_connected_is_refused_with_the_call_that_connects_it():
    one = by_device(2, 5.0)[0]
    gpu = torch.device("cuda", 1)
    assert not one.reaches(gpu)
    with pytest.raises(UsageError, match=r"world\.connect\('cuda:1'\) on every rank first"):
        one.allocate(3, torch.float32, gpu)


def test_a_deadline_is_one_for_all(both):
    one, elsewhere = both
    one.timeout_s = 2.5
    assert (elsewhere.timeout_s, one.timeout_s) == (2.5, 2.5)


def test_all_transports_are_closed_though_one_raises(both):
    one, elsewhere = both
    exchange = one.bind(P2PGroup([], [P2PMessage(1, torch.ones(3))]))

    def close():
        raise TransportClosed("late")

    elsewhere.close = close
    with pytest.raises(TransportClosed, match="late"):
        one.close()
    with pytest.raises(TransportClosed, match="closed"):
        exchange(NOW)


def test_connecting_what_is_no_gpu_is_refused_and_the_world_goes_on():
    def body(world):
        with pytest.raises(UsageError, match="cpu is no NVIDIA GPU of this machine"):
            world.connect("cpu")
        world.agree("afterwards")

    run_ranks(2, body)


@pytest.fixture
def alone():
    """A world of one rank."""
    with World(over_threads(HashStore(), 1, 5.0)[0], HashStore()) as world:
        yield world


def test_one_rank_alone_reaches_every_device_and_needs_no_connection(alone):
    assert alone.transport.reaches(torch.device("cuda", 1))
    alone.connect("cuda")


class Recorded:
    """Streams that write down who waits for what."""

    def __init__(self):
        self.story = []

    def record_event(self):
        self.story.append("mark")
        return SimpleNamespace(query=lambda: True, number=len(self.story))

    def wait_event(self, mark):
        self.story.append("nothing" if mark is DONE else f"behind {mark.number}")


@pytest.mark.parametrize("fails", [False, True])
def test_a_task_is_queued_behind_its_caller_and_the_reader_of_its_result_behind_the_task(fails):
    """No stream waits for the work of a task that failed."""
    comm_thread = CommThread(lambda failure: None)
    comm_thread.streams = streams = Recorded()

    def task():
        streams.story.append("task")
        assert not fails

    answer = comm_thread.submit(task)
    if fails:
        with pytest.raises(AssertionError):
            answer.result()
    else:
        answer.result()
    comm_thread.close()
    assert streams.story == ["mark", "behind 1", "task", *([] if fails else ["mark", "behind 4"])]


LATE = DeadlineExceeded("no transfer with ranks [1] within 5 s")


def test_waiting_for_a_world_waits_for_what_its_gpu_has_queued(both, alone):
    elsewhere = both[1]
    alone.transport.add(META, elsewhere)
    alone.wait()
    assert elsewhere.ends == ["wait"]


def test_a_world_whose_gpu_failed_late_is_closed_and_reports_it(alone):
    alone._on_late_failure(LATE)
    assert alone.closed
    assert alone.unraised_failure is LATE
    assert b"no transfer with ranks [1]" in alone.store.get("report/0")
    alone.close()
    assert alone.unraised_failure is None


def test_a_process_that_ends_without_being_told_of_a_failure_warns(alone, monkeypatch):
    alone._on_late_failure(LATE)
    monkeypatch.setattr(init, "_current", alone)
    with pytest.warns(UserWarning, match="after a failure that no call has raised: no transfer with ranks"):
        init._at_exit()


def test_no_optimizer_steps_after_a_gpu_failed_late(alone):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    commrt.attach(model, optimizer, world=alone)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.tolist()
    alone._on_late_failure(LATE)
    with pytest.raises(DeadlineExceeded, match="no transfer with ranks"):
        optimizer.step()
    assert model.weight.tolist() == before


def test_connecting_a_gpu_adds_a_transport_and_streams_once(monkeypatch):
    class Entered(Recorded):
        def enter(self):
            self.story.append("enter")

    gpu, made = torch.device("cuda", 0), []
    monkeypatch.setattr(world_module, "require_gpu", lambda device: gpu)
    monkeypatch.setattr(world_module, "streams_of", lambda device: Entered())
    monkeypatch.setattr(world_module, "connect_gpu", lambda *given: made.append(given) or Elsewhere())

    def body(world):
        world.connect("cuda")
        streams = world.comm_thread.streams
        world.connect("cuda:0")
        assert world.comm_thread.streams is streams
        assert streams.story[0] == "enter"
        assert world.transport.kind == "elsewhere and local"
        with pytest.raises(UsageError, match="has one GPU"):
            world.transport.require_no_other(torch.device("cuda", 1))
        return world.rank

    assert run_ranks(2, body) == [0, 1]
    assert sorted((rank, members, device) for _, rank, members, _, device, _ in made) == [
        (0, (0, 1), gpu),
        (1, (0, 1), gpu),
    ]
