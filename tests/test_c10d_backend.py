# SPDX-License-Identifier: Apache-2.0
"""The backend without its group: what other versions of torch need, a GPU's sends and receives, explanations."""

from datetime import timedelta
from time import sleep
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import on_ranks
from peer_group import on_threads
from torch._C._distributed_c10d import Backend
from torch.distributed import AllreduceOptions, DistBackendError, HashStore, ReduceOp
from transports import over_nccl

from commrt.c10d import create, group, host_messages
from commrt.c10d.backend import CommrtBackend
from commrt.c10d.checked_calls import CheckedCalls
from commrt.c10d.device_messages import DeviceMessages
from commrt.c10d.host_messages import DroppedWorks, HostMessages
from commrt.c10d.short_forms import long_form
from commrt.errors import DeadlineExceeded, PeerLost, Place, TransportClosed, TransportError, UsageError
from commrt.runtime.world import World
from commrt.threads.deadline import LONGEST_TIMEOUT_S
from commrt.threads.future import Future


@pytest.fixture
def backend():
    """One without the half that torch writes in C++, which versions before 2.14 do not make."""
    backend = CommrtBackend.__new__(CommrtBackend)
    backend.group = SimpleNamespace(requests=CheckedCalls(0, 2), device_messages=SimpleNamespace(waiting=[]))
    return backend


def test_a_group_that_cannot_open_its_sockets_raises_torchs_error(monkeypatch):
    def fail(*_, **__):
        raise TransportError("not all ranks connected")

    monkeypatch.setattr(group, "GlooTransport", fail)
    place = {"group_rank": 0, "group_size": 1, "global_ranks_in_group": [], "group_id": "test"}
    with pytest.raises(DistBackendError, match="not all ranks connected"):
        create(SimpleNamespace(timeout=timedelta(seconds=9), store=HashStore(), **place))


@pytest.mark.parametrize(
    ("name", "given", "named", "match"),
    [
        ("allreduce", ([],), {"op": "sum"}, "got 'sum' as its op"),
        ("allreduce", ([], ReduceOp.SUM, None, 1), {}, "takes an options object"),
        ("allreduce", ([],), {"root": 1}, "takes an options object"),
        ("broadcast", ([],), {"tensors": []}, "no argument tensors, or got it twice"),
        ("broadcast", ([],), {"input_tensors": []}, "no argument input_tensors"),
        ("reduce_scatter", ([],), {}, "takes 2 arguments"),
        ("barrier", (7,), {}, "got 7 as its timeout"),
    ],
)
def test_arguments_of_no_form_are_refused(name, given, named, match):
    with pytest.raises(UsageError, match=match):
        long_form(name, given, named)


def test_each_property_that_torch_reads_stands_in_the_class_itself():
    asked = {name for name, value in vars(Backend).items() if isinstance(value, property) and "supports_" in name}
    assert asked
    assert {"options", *asked} <= vars(CommrtBackend).keys()
    assert CommrtBackend.supports_coalescing is False  # so torch begins sends and receives one by one


def test_a_group_is_closed_when_nobody_has_it_any_more():
    place = {"group_rank": 0, "group_size": 1, "global_ranks_in_group": [], "group_id": "test"}
    owner = create(SimpleNamespace(timeout=timedelta(seconds=9), store=HashStore(), **place))
    thread = owner.group.world.comm_thread
    del owner
    thread._ended.result(20)


def test_a_timeout_that_means_for_ever_is_the_longest_that_a_wait_can_have():
    """Lightning gives its barrier around `prepare_data` 10,000 days, and Gloo takes them."""
    days, place = timedelta(days=10_000), {"group_rank": 0, "group_size": 1, "global_ranks_in_group": []}
    made = create(SimpleNamespace(timeout=days, store=HashStore(), group_id="test", **place))
    options = AllreduceOptions()
    options.timeout = days
    made.allreduce([torch.ones(1)], options).wait(days)
    made.set_timeout(days)
    assert made.group.world.timeout_s == made.group.engine.timeout_s == LONGEST_TIMEOUT_S
    made.shutdown()


@pytest.fixture
def stand_in(monkeypatch):
    """CPU tensors that travel over the stand-in for NCCL, to which all ranks are connected already."""
    monkeypatch.setattr(World, "connect", lambda world, device: None)


@on_ranks(2, connect=over_nccl)
def test_sends_and_receives_of_a_gpu_travel_in_one_batch_when_somebody_waits(world, stand_in):
    messages, peer, targets = DeviceMessages(world), 1 - world.rank, [torch.zeros(3), torch.zeros(5)]
    works = [messages.post(torch.full((size,), float(world.rank)), peer, is_send=True) for size in (3, 5)]
    works += [messages.post(target, peer, is_send=False) for target in targets]
    works[0].wait()
    assert [work.is_completed() for work in works] == [True] * 4
    assert [target.tolist() for target in targets] == [[peer] * 3, [peer] * 5]


@on_ranks(2, connect=over_nccl)
def test_a_batch_leaves_when_a_collective_begins_and_the_next_message_is_in_another(world, stand_in):
    messages, peer, target = DeviceMessages(world), 1 - world.rank, torch.zeros(3)
    works = [messages.post(torch.ones(3), peer, is_send=True), messages.post(target, peer, is_send=False)]
    messages.flush()
    world.comm_thread.submit(lambda: None).result()
    arrived = [work.is_completed() for work in works], target.tolist()
    messages.flush()  # nothing is left to leave
    again = messages.post(torch.zeros(3), peer, is_send=True), messages.post(target, peer, is_send=False)
    again[1].wait()
    assert (*arrived, target.tolist()) == ([True, True], [1.0] * 3, [0.0] * 3)


@on_ranks(2, connect=over_nccl)
def test_each_wait_for_a_batch_that_cannot_leave_raises(world, stand_in):
    messages = DeviceMessages(world)
    works = [messages.post(torch.zeros(3), 1 - world.rank, is_send=True) for _ in range(2)]
    world.comm_thread.close()
    for work in [*works, *works]:
        with pytest.raises(TransportClosed, match="closed"):
            work.wait()
        assert work.is_completed()
        assert isinstance(work.exception(), DistBackendError)


@on_ranks(2, connect=over_nccl)
def test_a_signal_handler_in_a_call_can_neither_send_nor_close_and_the_batch_leaves_later(world, stand_in):
    messages, peer, target = DeviceMessages(world), 1 - world.rank, torch.zeros(3)
    works = [messages.post(torch.ones(3), peer, is_send=True), messages.post(target, peer, is_send=False)]

    def handler():
        with pytest.raises(UsageError, match="a signal handler"):
            works[0].wait()
        with pytest.raises(UsageError, match="a signal handler"):
            world.comm_thread.close(1.0)

    world.comm_thread.run(handler).result()
    works[1].wait()
    assert target.tolist() == [1.0] * 3


@on_ranks(2, connect=over_nccl)
def test_messages_that_cannot_work_are_refused_with_what_to_do(world, backend):
    with pytest.raises(DistBackendError, match="not possible with this version of torch: name src"):
        backend.recv_anysource([], 0)
    with pytest.raises(UsageError, match="name the source"):
        DeviceMessages(world).post(torch.zeros(3), None, is_send=False)
    with pytest.raises(UsageError, match="take a smaller one"):  # if nobody received it, close() would end the process
        HostMessages(None, world).post(torch.zeros(3), 1, 2**31 - 1, is_send=True)
    with pytest.raises(UsageError, match="no connection to itself: copy"):
        HostMessages(None, world).post(torch.zeros(3), world.rank, 0, is_send=False)


def test_calls_for_several_devices_and_all_but_sums_of_sparse_tensors_are_refused(backend):
    largest = dist.AllreduceOptions()
    largest.reduceOp = ReduceOp.MAX
    with pytest.raises(UsageError, match=r"^2 lists of tensors in one call: give one"):
        backend.allgather([[torch.zeros(3)] * 2] * 2, [torch.zeros(3)])
    with pytest.raises(UsageError, match=r"^0 outputs of all_gather beside float32"):
        backend.allgather([], [torch.zeros(3)])
    with pytest.raises(UsageError, match=r"^MAX of sparse tensors"):
        backend.allreduce([torch.eye(3).to_sparse()], largest)


def test_two_threads_that_post_at_once_start_one_wait_for_what_was_dropped(monkeypatch):
    works, started = DroppedWorks(), []
    works.keep(None, None, 1.0)
    monkeypatch.setattr(host_messages, "start_call", lambda call: started.append(call) or sleep(0.1) or Future())
    on_threads(2, lambda _: works.start_waiting())
    assert len(started) == 1


def test_a_timeout_of_gloo_says_whether_the_peer_is_late_or_gone():
    thread = SimpleNamespace(failure=PeerLost("gone", Place(0, 1)))
    messages = HostMessages(None, SimpleNamespace(timeout_s=9, comm_thread=thread))

    def meaning(text, peer):
        return type(messages.explained(RuntimeError(text), Place(0, peer), 9.0))

    assert meaning("Timed out waiting for a receive", 2) is DeadlineExceeded
    assert meaning("Timed out waiting for a receive", None) is DeadlineExceeded
    assert meaning("Timed out waiting for a receive", 1) is PeerLost
    assert meaning("connect timeout: Connection refused", 2) is PeerLost
    assert meaning("Connection closed by peer", 2) is PeerLost
