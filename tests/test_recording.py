# SPDX-License-Identifier: Apache-2.0
"""What happened when: ranges lie inside each other, say what they cover, and cost nothing that nobody asked for."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

import commrt
from commrt.errors import TransportError
from commrt.testing.faults import fail_at, with_faults
from commrt.testing.ranks import local_worlds, run_ranks
from commrt.threads import recording
from commrt.threads.chrome_trace import chrome_trace, write_rank
from commrt.threads.comm_thread import CommThread
from commrt.threads.recording import NOTHING, Nvtx, Timeline, within_range

STEPS = 3


def trained(world):
    world.recorder = timeline = Timeline(world.rank)
    model = nn.Linear(64, 8)
    replica = commrt.attach(model, algorithm=commrt.Ring(), world=world, bucket_cap_mb=1e-5)
    reports = []
    for _ in range(STEPS):
        model(torch.ones(2, 64)).sum().backward()
        reports.append(replica.last)
    return timeline.events, reports


@pytest.fixture(scope="module")
def recorded():
    return run_ranks(3, trained)


def named(events, name):
    return [event for event in events if event["name"] == name]


def inside(inner, outer):
    end, last = (each["ts"] + each["dur"] for each in (inner, outer))
    return inner["tid"] == outer["tid"] and outer["ts"] <= inner["ts"] and end <= last + 0.01


def test_each_bucket_is_packed_sent_in_hops_and_unpacked_in_this_order(recorded):
    for events, reports in recorded:
        buckets = named(events, "bucket")
        assert len(buckets) == sum(len(report.spans) for report in reports) > STEPS
        for bucket in buckets:
            within = [event["name"] for event in events if event is not bucket and inside(event, bucket)]
            assert within == ["pack", "hop", "combine", "hop", "combine", "hop", "hop", "unpack"]


def test_ranges_say_algorithm_step_bucket_hop_peers_and_bytes(recorded):
    for rank, (events, reports) in enumerate(recorded):
        first = named(events, "bucket")[0]
        assert first["args"] == {"number": 0, "step": 0, "algorithm": "ring"}
        hops = [event["args"] for event in named(events, "hop") if inside(event, first)]
        assert [hop["number"] for hop in hops] == [0, 1, 2, 3]
        assert {(hop["to"], hop["from"]) for hop in hops} == {(str((rank + 1) % 3), str((rank - 1) % 3))}
        assert sum(hop["nbytes"] for hop in hops) == reports[0].spans[0].nbytes_sent


def test_the_training_thread_waits_in_a_range_of_its_own_while_others_than_the_last_bucket_are_carried(recorded):
    for events, _ in recorded:
        waits = named(events, "wait")
        assert [wait["args"]["step"] for wait in waits] == list(range(STEPS))
        first = [bucket["tid"] for bucket in named(events, "bucket") if bucket["args"]["number"] == 0]
        assert {wait["tid"] for wait in waits}.isdisjoint(first)


def test_a_trace_is_what_a_browser_opens(recorded):
    trace = json.loads(json.dumps(chrome_trace(event for events, _ in recorded for event in events)))
    rows = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in rows} == {0, 1, 2}
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in rows)
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}


def test_a_range_ends_though_its_body_fails():
    def body(world):
        try:
            trained(world)
        finally:
            ended.append([event["name"] for event in world.recorder.events if event["name"] != "submit"][-3:])

    ended = []
    with pytest.raises(TransportError):
        run_ranks(2, body, wrap=with_faults(fail_at(rank=0, step=2)))
    assert ended == [["hop", "bucket", "wait"]] * 2


def test_what_is_too_much_is_counted(monkeypatch):
    monkeypatch.setattr(recording, "EVENTS_KEPT", 2)
    timeline = Timeline(0)
    for _ in range(5):
        with within_range(timeline, "something"):
            pass
    assert (len(timeline.events), timeline.left_out) == (2, 3)


def test_nsight_gets_the_same_ranges_in_one_domain(monkeypatch):
    said = []
    domain = SimpleNamespace(
        get_event_attributes=lambda **attributes: attributes,
        push_range=said.append,
        pop_range=lambda: said.append("end"),
    )
    fake = SimpleNamespace(get_domain=lambda name: said.append(name) or domain)
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    recorder = Nvtx()
    with within_range(recorder, "hop", number=3, to="1", nbytes=512), within_range(recorder, "combine"):
        pass
    hop = {"message": "hop: number 3, to 1, nbytes 512", "category": "hop", "payload": 512}
    assert said == ["commrt", hop, {"message": "combine", "category": "combine", "payload": 0}, "end", "end"]


def test_nvtx_takes_them_and_they_are_switched_on_by_the_environment(monkeypatch):
    monkeypatch.setenv("COMMRT_NVTX", "1")
    with commrt.init() as world, within_range(world.recorder, "hop", number=3, nbytes=512):
        assert isinstance(world.recorder, Nvtx)


def attached(world):
    model = nn.Linear(64, 8)
    commrt.attach(model, algorithm=commrt.Ring(), world=world, bucket_cap_mb=1e-5)
    return model


def step(model, world):
    model(torch.ones(2, 64)).sum().backward()
    world.agree("stepped", ended="both")


def test_torch_s_profiler_shows_what_each_thread_does():
    config = _ExperimentalConfig(profile_all_threads=True)
    first, second = local_worlds(2)  # rank 0 runs on this thread, as torch's profiler wants it
    with ThreadPoolExecutor(1) as pool, first, second:
        other = pool.submit(lambda: step(attached(second), second))
        model = attached(first)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
            with record_function("here"):
                pass
            step(model, first)
        other.result()
    (training,) = {event.thread for event in profiler.events() if event.name == "here"}
    shown = [(event.name, event.thread == training) for event in profiler.events() if "commrt::" in event.name]
    submits = {f"commrt::submit: number {number}" for number in (0, 1)}
    assert {name for name, is_training in shown if is_training} >= submits | {"commrt::wait"}
    hops = {f"commrt::hop: number {number}, to 1, from 1" for number in (0, 1)}  # rank 1's name rank 0
    within = {"commrt::bucket: number 0, algorithm ring", "commrt::pack", "commrt::combine", "commrt::unpack"}
    assert {name.partition(", nbytes")[0] for name, is_training in shown if not is_training} >= within | hops


@pytest.fixture
def comm_thread():
    thread = CommThread(lambda failure: None)
    yield thread
    thread.close()


def test_a_range_that_a_profiler_of_torch_saw_begin_may_end_after_it(comm_thread):
    with profile(activities=[ProfilerActivity.CPU]):
        begun = comm_thread.within_range("bucket")
        begun.__enter__()
    begun.__exit__(None, None, None)
    assert comm_thread.within_range("bucket") is NOTHING


def test_the_timelines_of_all_ranks_become_one_on_the_clock_of_the_first(tmp_path):
    for rank, (host, clock_s) in enumerate([("a", 100.0), ("a", 100.1), ("b", 103.0)]):
        trace = {"traceEvents": [{"ph": "X", "ts": 5.0, "pid": rank}], "otherData": {"host": host, "clock_s": clock_s}}
        write_rank(tmp_path, trace, rank)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(event["pid"], event["ts"]) for event in events] == [(0, 5.0), (1, 5.0), (2, 3e6 + 5.0)]
