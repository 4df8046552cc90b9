# SPDX-License-Identifier: Apache-2.0
"""A device graph carries a bucket's step: the same bits as call by call, whatever changes between steps.

`nccl_stand_in.record` stands for CUDA graphs: while a thread records, launches of kernels and calls of NCCL are
noted instead of made, and host code runs once. Replaying makes the noted calls again, with the same arguments.
"""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import nccl_stand_in as nccl
import pytest
import torch
from interpreter import interpreted_gpu
from torch import nn
from torch.distributed import HashStore
from transports import over_nccl, over_peers

import commrt
from commrt.algorithms.catalogue import ALGORITHMS
from commrt.buckets.header import Header, encode
from commrt.buckets.plan import build_buckets
from commrt.buckets.step_graph import BY_CALLS, FIRST, NOT_WHOLE, NOTHING_QUEUED, BoundStep, StepGraphs
from commrt.errors import TransportClosed
from commrt.kernels.device import launch as device_launch
from commrt.kernels.device import packing
from commrt.kernels.layout import layout_of
from commrt.kernels.torch_packing import bits
from commrt.runtime import reading
from commrt.testing.ranks import run_ranks
from commrt.threads.streams import DONE, Streams
from commrt.transport import nccl as transport_module
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag


class Remembered(threading.local):
    """What the calling thread's device was made to remember."""

    def __init__(self):
        self.graphs = []

    @property
    def replays(self):
        return sum(graph.replays for graph in self.graphs)


remembered = Remembered()


class RecordingStreams(Streams):
    def record_event(self):
        assert nccl.recording() is None  # or nobody could ask whether it was reached
        return DONE

    def capture(self, work):
        remembered.graphs.append(nccl.record(work))
        return remembered.graphs[-1]


@pytest.fixture
def gpu(monkeypatch):
    """CPU tensors count as a GPU's, which remembers what it is told to."""
    monkeypatch.setattr(transport_module, "streams_of", lambda device: RecordingStreams())
    monkeypatch.setattr(reading, "copying", lambda out, source: lambda: nccl.ask(lambda: out.copy_(source)))
    with interpreted_gpu() as launches:
        for module in (packing, device_launch):
            monkeypatch.setattr(module, "launch_of", partial(noted_launch, launches))
        yield launches


def noted_launch(launches, variant, device):
    launch = launches.launch_of(variant, device)
    return lambda *arguments: nccl.ask(partial(launch, *arguments))


UNTRAINED = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Tanh(), nn.Linear(3, 2, bias=False))
"""Small, as the interpreter is slow; each layer is a bucket."""
STEPS = 6
RING = commrt.Ring()


def trained(world, graphs, wire=None, backward=lambda *given: given[-1].backward(), algorithm=RING, **options):
    model = deepcopy(UNTRAINED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options |= {"wire": wire, "bucket_cap_mb": 1e-5, "graphs": graphs}
    replica = commrt.attach(model, optimizer, algorithm, world=world, **options)
    reasons, kept = [], []
    for step in range(STEPS):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + world.rank))
        kept.append([param.grad for param in model.parameters()])  # so that the next ones lie elsewhere
        optimizer.zero_grad()
        backward(world, step, model, model(x).square().sum())
        optimizer.step()
        reasons.append(set(replica.why_not_graphs().values()))
    replays = world.comm_thread.submit(lambda: remembered.replays).result()
    return [param.tolist() for param in model.parameters()], reasons, replays, len(replica.buckets)


def require_same(ranks, connect=over_nccl, **options):
    """Graphs give the same bits as calls over NCCL, and were used from the first step that could."""
    by_graphs = run_ranks(ranks, lambda world: trained(world, True, **options), connect=connect)
    by_calls = run_ranks(ranks, lambda world: trained(world, False, **options), connect=over_nccl)
    assert [params for params, *_ in by_graphs] == [params for params, *_ in by_calls]
    for _, reasons, replays, buckets in by_graphs:
        assert reasons == [{FIRST}] * BY_CALLS + [set()] * (STEPS - BY_CALLS)
        assert replays == (STEPS - BY_CALLS) * buckets > STEPS
    assert {replays for _, _, replays, _ in by_calls} == {0}


def without_some(world, step, model, loss):
    """Gradients that some ranks, or all, do not have in this step."""
    lacking = {3: [0], 4: [0, 1], 5: [1]}.get(step, [])
    first, last = model[0].weight, model[2].weight
    loss.backward(inputs=[last] if world.rank in lacking else [first, last])


def off_the_grid(world, step, model, loss):
    """Rank 0's gradients lie where nothing is aligned, in some steps."""
    if world.rank == 0 and step % 2:
        for param in model.parameters():
            param.grad = torch.zeros(param.numel() + 1)[1:].view_as(param)
    loss.backward()


TRAININGS = {
    "gradients that live on the wire": {"gradients": "views"},
    "those in peers' memory": {"gradients": "views", "connect": over_peers},
    "sums that are unpacked from peers' memory": {"algorithm": commrt.Direct(), "connect": over_peers},
    "gradients that some ranks lack": {"backward": without_some},
    "gradients that one rank has at odd addresses": {"backward": off_the_grid},
    "a cast": pytest.param({"wire": torch.bfloat16}, marks=pytest.mark.slow),
}


@pytest.mark.parametrize("options", TRAININGS.values(), ids=TRAININGS)
def test_training_by_graphs_gives_the_bits_of_training_call_by_call(gpu, options):
    require_same(2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "double_tree", "direct"])
def test_what_three_ranks_unpack_from_peers_memory_is_what_nccl_brings(gpu, name):
    """By a schedule of many hops, of pieces, and of one hop; test_peers has the bits of all schedules."""
    require_same(3, over_peers, algorithm=ALGORITHMS[name]())


def test_a_rank_that_lacks_gradients_does_by_calls_what_others_do_by_graphs(gpu):
    body = partial(trained, backward=without_some)
    by_graphs = run_ranks(2, lambda world: body(world, True), connect=over_peers)
    by_calls = run_ranks(2, lambda world: body(world, False), connect=over_nccl)
    assert [params for params, *_ in by_graphs] == [params for params, *_ in by_calls]
    assert [NOT_WHOLE in reasons[3] for _, reasons, _, _ in by_graphs] == [True, False]


def test_when_the_device_of_one_rank_refuses_no_rank_uses_graphs(gpu, monkeypatch):
    asked = []

    def refuse(streams, work):
        asked.append(nccl.record(work))
        if len(asked) == 3:
            asked[-1].reset()
            raise RuntimeError("operation not permitted when stream is capturing")
        return asked[-1]

    monkeypatch.setattr(RecordingStreams, "capture", refuse)
    outcomes = run_ranks(2, lambda world: trained(world, True), connect=over_nccl)
    last = [str(reasons[-1]) for _, reasons, _, _ in outcomes]
    refused = next(rank for rank, reason in enumerate(last) if "operation not permitted" in reason)
    assert last[1 - refused] == str({f"the device of rank {refused} refused: ask that rank why"})
    assert last[refused] == str({"the device refused: operation not permitted when stream is capturing"})
    assert len(asked) <= 4  # each rank for each bucket, once
    assert sum(graph.replays for graph in asked) == 0


def test_graphs_are_made_when_backward_passes_have_ended(gpu, monkeypatch):
    """torch's random numbers of the device belong to the graph while one is made."""
    missing, made = [0, 0], []

    def capture(streams, work):
        made.append([*missing])
        return nccl.record(work)

    def backward(world, step, model, loss):
        def ready(param):
            missing[world.rank] -= 1

        missing[world.rank] = len(list(model.parameters()))
        hooks = [param.register_post_accumulate_grad_hook(ready) for param in model.parameters()]
        loss.backward()
        for hook in hooks:
            hook.remove()

    monkeypatch.setattr(RecordingStreams, "capture", capture)
    run_ranks(2, lambda world: trained(world, True, backward=backward), connect=over_nccl)
    assert made == [[0, 0]] * len(made) != []


def leaving_early(world, graphs):
    """Three full steps, three in which rank 2 has no data, three full ones: gradients, and replays after each three."""
    model = deepcopy(UNTRAINED)
    replica = commrt.attach(model, None, commrt.Ring(), world=world, bucket_cap_mb=1e-5, graphs=graphs)
    replays = []

    def steps(numbers):
        for number in numbers:
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + world.rank))
            model.zero_grad()
            model(x).square().sum().backward()

    for numbers in (range(3), range(3, 6), range(6, 9)):
        if numbers[0] == 3:
            with replica.join():
                steps([] if world.rank == 2 else numbers)
        else:
            steps(numbers)
        replays.append(world.comm_thread.submit(lambda: remembered.replays).result())
    return [param.grad.tolist() for param in model.parameters()], replays


@pytest.mark.slow
def test_ranks_that_saw_different_steps_in_join_use_graphs_together_afterwards(gpu):
    by_graphs = run_ranks(3, lambda world: leaving_early(world, True), connect=over_nccl)
    by_calls = run_ranks(3, lambda world: leaving_early(world, False), connect=over_nccl)
    assert [grads for grads, _ in by_graphs] == [grads for grads, _ in by_calls]
    assert [replays for _, replays in by_graphs] == [[2, 2, 4]] * 3  # none in join, and two buckets


@contextmanager
def two_transports():
    """Of two ranks, with a graph of one exchange each."""
    store = HashStore()
    transports = over_nccl(store, 2, 10.0)
    try:
        yield transports, [exchange_by_graph(transport) for transport in transports]
    finally:
        for transport in transports:
            transport.abort()


def exchange_by_graph(transport):
    ours, theirs = torch.zeros(4), torch.zeros(4)
    peer = 1 - transport.rank
    group = P2PGroup([P2PMessage(peer, ours)], [P2PMessage(peer, theirs)])
    exchange = transport.bind(group)
    return transport.capture(partial(exchange, Tag(0, 0)), group)


def test_capturing_is_no_exchange(gpu):
    with two_transports() as (transports, _):
        assert [transport.watch.counts for transport in transports] == [{0: 0, 1: 0}] * 2


@pytest.mark.parametrize("connect", [over_nccl, over_peers])
def test_a_graph_is_kept_as_long_as_it_is_used_and_so_is_what_it_uses(gpu, connect):
    transport, _ = connect(HashStore(), 2, 10.0)
    work = partial(int)  # stands for one with tensors
    replay = transport.capture(work, P2PGroup([], [], reads=connect is over_peers))
    known = [weakref.ref(work), weakref.ref(remembered.graphs.pop())]
    del work
    gc.collect()
    assert None not in [reference() for reference in known]
    del replay
    gc.collect()
    assert [reference() for reference in known] == [None] * 2
    transport.abort()


def test_a_status_that_cupy_does_not_know_is_a_refusal_too(gpu, monkeypatch):
    monkeypatch.setattr(RecordingStreams, "capture", lambda streams, work: {}[8])
    (transport,) = over_nccl(HashStore(), 1, 10.0)
    with pytest.raises(RuntimeError, match="8"):
        transport.capture(int, P2PGroup([], []))
    transport.abort()


@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_communicator_is_freed_though_graphs_of_it_are_in_use(gpu, how, monkeypatch):
    monkeypatch.setattr("commrt.transport.nccl_communicator.FREE_S", 60.0)
    with two_transports() as (transports, exchanges), ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda exchange: exchange(Tag(1, 0)), exchanges))
        for ended in [pool.submit(getattr(transport, how)) for transport in transports]:
            ended.result(20)
        with pytest.raises(TransportClosed):
            exchanges[0](Tag(2, 0))


def test_a_transport_that_nobody_closed_does_not_wait_for_its_graphs_at_exit(gpu):
    with two_transports() as (transports, exchanges):
        for transport in transports:
            transport.watch.communicator._collected().result(20)  # which is called then, and when it is collected
            assert transport.watch.communicator.nccl.comm == 0
        assert len(exchanges) == 2


def test_what_is_replayed_has_the_step_s_own_header_scale_and_gradients(gpu):
    """Of one bucket, in steps that exchange nothing."""
    named = [(name, nn.Parameter(torch.randn(count))) for name, count in (("a", 40), ("b", 33))]
    (bucket,) = build_buckets(named, None, 1 << 20)
    bound = BoundStep([SimpleNamespace(group=None, peer_parts=(), run=bool, finish=bool)])
    params, layout = [param for _, param in bucket.params], layout_of([40, 33])

    def capture(work, group):
        graph = nccl.record(work)
        return lambda tag: graph.replay()

    step_graphs = StepGraphs([bucket], SimpleNamespace(capture=capture))
    for step, (scale, skew) in enumerate([(0.5, 0), (0.5, 0), (0.25, 0), (2.0, 1), (2.0, 3), (1.0, 0)]):
        for param in params:
            param.grad = torch.randn(param.numel() + skew)[skew:]
        claim = Header(0, 1, 0, step, 0, 0)
        bucket.take(claim, bucket.names)
        expected, versions = [param.grad * scale for param in params], [param.grad._version + 1 for param in params]
        is_carried = step_graphs.carry(bucket, bound, scale, Tag(step, 0))
        if not is_carried:
            bucket.pack(scale)
            bucket.unpack()
        bucket.assign_missing()
        if step_graphs.is_due:
            step_graphs.capture(lambda refused: [0] if refused else [])
        assert (is_carried, [param.grad._version for param in params]) == (step >= BY_CALLS, versions)
        assert torch.equal(layout.header(bucket.wire) != 0, bits(encode(claim)))
        assert all(torch.equal(param.grad, want) for param, want in zip(params, expected, strict=True))
    assert step_graphs.reasons == {}


GRADIENTS = commrt.Gossip(payload="gradients")


@pytest.mark.parametrize(
    ("algorithm", "connect", "reason"),
    [(GRADIENTS, over_nccl, FIRST), (RING, None, NOTHING_QUEUED)],
    ids=["a schedule that never comes back", "a transport that queues nothing"],
)
def test_what_no_graph_can_carry_goes_by_calls_and_says_why(gpu, algorithm, connect, reason):
    body = partial(trained, graphs=True, algorithm=algorithm)
    for _, reasons, replays, _ in run_ranks(3, body, connect=connect):
        assert (reasons[-1], replays) == ({reason}, 0)
