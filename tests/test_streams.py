# SPDX-License-Identifier: Apache-2.0
"""What is asked of torch for a GPU's streams; torch's own part is a list of what it was asked."""

from __future__ import annotations

import gc
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from commrt.threads.future import DONE, CudaStreams, Streams, streams_of

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


def test_a_mark_is_an_event_of_the_current_stream_and_following_waits_for_it(asked, current):
    streams = CudaStreams(GPU)
    mark = streams.record_event()
    assert asked == [("record", current)]
    streams.wait_event(mark)
    assert asked[-1] == ("wait", mark)


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
def test_what_is_done_already_is_not_waited_for(asked):
    CudaStreams(GPU).wait_event(DONE)
    assert asked == []


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


def test_a_cpu_queues_nothing():
    streams = streams_of(torch.device("cpu"))
    assert isinstance(streams, Streams)
    assert (streams.queues, streams.current(), streams.record_event(), streams.capture(list)) == (False, 0, DONE, None)
    assert DONE.query()
    with streams.side_stream():
        streams.wait_event(DONE)


def test_a_gpu_queues():
    assert isinstance(streams_of(GPU), CudaStreams)
    assert streams_of(GPU).queues
