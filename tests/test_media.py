# SPDX-License-Identifier: Apache-2.0
"""One rank's transports as one; and work that is queued on a device, as it is asked of torch."""

import gc
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from cases import on_ranks
from torch.distributed import HashStore
from transports import local

import commrt
from commrt.errors import DeadlineExceeded, TransportClosed, UsageError
from commrt.runtime import gpu_connection, init
from commrt.runtime.world import World
from commrt.testing.ranks import run_ranks
from commrt.threads.comm_thread import CommThread
from commrt.threads.streams import DONE, CudaStreams, Streams, streams_of
from commrt.transport.by_device import TransportByDevice
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag

META = torch.device("meta")
NOW = Tag(0, 0)


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
    one, elsewhere = TransportByDevice(local(2, 5.0)[0]), Elsewhere()
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
    one = TransportByDevice(local(2, 5.0)[0])
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


@on_ranks(2)
def test_connecting_what_is_no_gpu_is_refused_and_the_world_goes_on(world):
    with pytest.raises(UsageError, match="cpu is no NVIDIA GPU of this machine"):
        world.connect("cpu")
    world.agree("afterwards")


@pytest.fixture
def alone():
    with World(local(1, 5.0)[0], HashStore()) as world:
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


def test_a_world_whose_gpu_failed_late_is_closed_and_reports_it_and_its_process_warns_as_it_ends(alone, monkeypatch):
    alone.ending.on_late_failure(LATE)
    assert alone.closed
    assert alone.ending.unraised_failure is LATE
    assert b"no transfer with ranks [1]" in alone.store.get("report/0")
    monkeypatch.setattr(init, "_current", alone)
    with pytest.warns(UserWarning, match="after a failure that no call has raised: no transfer with ranks"):
        init._at_exit()
    assert alone.ending.unraised_failure is None


def test_no_optimizer_steps_after_a_gpu_failed_late(alone):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    commrt.attach(model, optimizer, world=alone)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.tolist()
    alone.ending.on_late_failure(LATE)
    with pytest.raises(DeadlineExceeded, match="no transfer with ranks"):
        optimizer.step()
    assert model.weight.tolist() == before


def test_connecting_a_gpu_adds_a_transport_and_streams_once(monkeypatch):
    class Entered(Recorded):
        def enter(self):
            self.story.append("enter")

    gpu, made = torch.device("cuda", 0), []
    monkeypatch.setattr(gpu_connection, "require_gpu", lambda device: gpu)
    monkeypatch.setattr(gpu_connection, "streams_of", lambda device: Entered())
    monkeypatch.setattr(gpu_connection, "connect_gpu", lambda *given: made.append(given) or Elsewhere())

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
    both = [(rank, (0, 1), gpu) for rank in range(2)]
    assert sorted((rank, members, device) for _, rank, members, _, device, _ in made) == both


GPU = torch.device("cuda", 3)
POOL, MODE = (7, 8), ("capture_error_mode", "thread_local")


class Asked(list):
    """What ``torch.cuda`` was asked; `note` makes a stand-in for one of its functions."""

    def note(self, name, answer=None):
        return lambda *args, **kwargs: self.append((name, *args, *kwargs.items())) or answer


@pytest.fixture
def asked():
    return Asked()


@pytest.fixture
def graph(asked):
    note = asked.note
    return SimpleNamespace(capture_begin=note("begin"), capture_end=note("end"))


@pytest.fixture
def current(asked, graph, monkeypatch):
    """The current stream of a device whose functions are noted."""
    note, stream, numbers = asked.note, SimpleNamespace(wait_event=asked.note("wait")), count()
    cuda = {
        "set_device": note("device"),
        "set_stream": note("stream"),
        "Stream": lambda device, priority: f"{device}, priority {priority}, number {next(numbers)}",
        "stream": note("aside", "context"),
        "current_stream": lambda device: stream,
        "Event": lambda: SimpleNamespace(record=note("record")),
        "CUDAGraph": lambda: graph,
        "graph_pool_handle": lambda: POOL,
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 17, raising=False)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, note(name))
    return stream


@pytest.mark.usefixtures("current")
def test_entering_takes_the_device_and_a_stream_of_its_own_and_keeps_a_second_one(asked):
    streams = CudaStreams(GPU)
    streams.use()
    assert asked == [("device", GPU)]
    streams.enter()
    streams.main_stream()
    streams.side_stream()
    first, second = (f"cuda:3, priority -1, number {number}" for number in range(2))
    assert asked[1:] == [("device", GPU), ("stream", first), ("aside", first), ("aside", second)]


def test_a_mark_is_an_event_of_the_current_stream_and_following_waits_for_it_unless_it_is_done(asked, current):
    streams = CudaStreams(GPU)
    mark = streams.record_event()
    assert asked == [("record", current)]
    streams.wait_event(mark)
    assert asked[-1] == ("wait", mark)
    streams.wait_event(DONE)  # which has happened already
    assert len(asked) == 2


def test_each_stream_is_asked_for_its_own_events_and_made_an_object_of_once(asked, current, monkeypatch):
    other, made = SimpleNamespace(wait_event=lambda event: asked.append(("other", event))), []
    handles = iter([17, 17, 18, 17])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: next(handles))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: made.append(device) or (current, other)[len(made) - 1]
    )
    streams = CudaStreams(GPU)
    for _ in range(4):
        streams.wait_event("mark")
    assert asked == [("wait", "mark"), ("wait", "mark"), ("other", "mark"), ("wait", "mark")]
    assert made == [GPU] * 2


@pytest.mark.usefixtures("current")
def test_a_graph_is_captured_while_others_may_allocate_and_nothing_is_collected(asked, graph):
    collecting = []
    assert CudaStreams(GPU).capture(lambda: collecting.append(gc.isenabled())) is graph
    assert asked == [("begin", POOL, MODE), ("end",)]
    assert collecting == [False]
    assert gc.isenabled()


@pytest.mark.usefixtures("current")
def test_a_capture_that_fails_is_ended_and_things_are_collected_again(asked):
    with pytest.raises(IndexError):
        CudaStreams(GPU).capture([].pop)
    assert asked[-1] == ("end",)
    assert gc.isenabled()


@pytest.mark.usefixtures("current")
@pytest.mark.parametrize("raises", [True, False], ids=["the work failed too", "only the end"])
def test_where_cuda_has_ended_a_capture_torch_leaves_it_too_and_the_first_error_is_raised(asked, graph, raises):
    ends = [RuntimeError("invalidated"), None]

    def end():
        asked.append(("end",))
        if (error := ends.pop(0)) is not None:
            raise error

    graph.capture_end = end
    with pytest.raises(IndexError if raises else RuntimeError):
        CudaStreams(GPU).capture([].pop if raises else list)
    left = [("_cuda_endAllocateToPool", 3, POOL), ("_cuda_releasePool", 3, POOL)]
    assert asked == [("begin", POOL, MODE), ("end",), *left, ("begin", MODE), ("end",)]


def test_a_cpu_queues_nothing_and_a_gpu_queues():
    streams = streams_of(torch.device("cpu"))
    assert isinstance(streams, Streams)
    assert (streams.queues, streams.current(), streams.record_event(), streams.capture(list)) == (False, 0, DONE, None)
    assert DONE.query()
    with streams.side_stream():
        streams.wait_event(DONE)
    assert isinstance(streams_of(GPU), CudaStreams)
    assert streams_of(GPU).queues
