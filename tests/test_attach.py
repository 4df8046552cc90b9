# SPDX-License-Identifier: Apache-2.0
"""What attach() takes and refuses, and several models in one world."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import for_each, on_ranks
from small_models import backward, data, gradients, halving, mean_gradients, net, sgd
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.functional import cross_entropy

import commrt
from commrt import Direct, Gossip
from commrt.algorithms import ring
from commrt.errors import DisagreementError, ScheduleError, UsageError
from commrt.local_sgd import LocalSGD
from commrt.quantization import Adaptive, Int4, Int8, dq

ODD = {
    "layers": {"model": lambda: net(nn.Linear(8, 8))},
    "algorithm": {"algorithm": commrt.Ring()},
    "wire": {"wire": torch.float16},
    "buckets": {"bucket_cap_mb": 1e-4},
    "broadcast_buffers": {"broadcast_buffers": False},
    "graphs": {"graphs": True},
    "same_bits": {"same_bits": True},
}


@for_each("what", ODD)
@on_ranks(3)
def test_a_rank_that_attaches_something_else_is_named_on_every_rank(world, what):
    odd = dict(ODD[what]) if world.rank == 2 else {}
    model = odd.pop("model", net)()
    field = "buckets" if what in ("layers", "wire") else what
    with pytest.raises(DisagreementError, match=f"rank 2 disagrees with rank 0 about {field}: "):
        commrt.attach(model, sgd(model), **{"algorithm": Direct(), "world": world, **odd})


def with_buffer(buffer):
    model = net()
    model.register_buffer("odd", buffer)
    return model


@for_each(
    ("make", "options", "says"),
    [
        (lambda: net().requires_grad_(requires_grad=False), {}, "no parameter that requires a gradient"),
        (lambda: net().to("meta"), {}, r"has no values: use model\.to_empty\(\)"),
        (
            lambda: nn.Linear(2, 2, dtype=torch.complex64),
            {},
            r"has gradients of dtype torch\.complex64: those of torch",
        ),
        (lambda: nn.Embedding(4, 2, sparse=True), {}, "use sparse=False"),
        (lambda: net(nn.LazyLinear(8)), {}, r"2\.weight has no shape yet: run one batch"),
        (lambda: with_buffer(torch.ones(1).expand(5)), {}, r"odd is expanded, .* use its \.clone\(\)"),
        (lambda: with_buffer(torch.eye(3).to_sparse()), {}, r"odd has layout torch\.sparse_coo"),
        (lambda: with_buffer(torch.ones(3, device="meta")), {}, r"different devices .*odd on meta\): move the model"),
        (torch.inference_mode()(net), {}, r"0\.weight was made under torch\.inference_mode"),
        (lambda: sgd(net()), {}, r"the model is a SGD: attach\(\) takes a torch\.nn\.Module first"),
        (net, {"wire": torch.int8}, r"wire=torch\.int8 cannot travel: use torch\.float32"),
        (net, {"bucket_cap_mb": 0}, "bucket_cap_mb=0 must be a positive number"),
        (net, {"bucket_cap_mb": float("inf")}, "bucket_cap_mb=inf must be a positive number"),
        (net, {"optimizer": sgd(net())}, "the SGD steps no parameter of the model"),
        (net, {"optimizer": commrt.Ring()}, r"a Ring was given as the optimizer: .* by its name \(algorithm="),
        (net, {"optimizer": [*net().parameters()]}, "a Parameter was given as the optimizer: pass a torch"),
        (net, {"optimizer": halving(sgd(net()))}, "a LambdaLR was given as the optimizer"),
        (net, {"algorithm": commrt.Torus2D(grid=(3, 3))}, "a grid of 3 x 3 does not fit 2 ranks"),
        (net, {"algorithm": "rung"}, "no algorithm is called 'rung': choose one of backup, direct"),
        (net, {"gradients": "copies"}, 'give "own", or "views"'),
        (
            lambda: net().bfloat16(),
            {"algorithm": Direct(), "wire": Int8(), "gradients": "views"},
            r"are torch\.bfloat16 and travel as torch\.float32",
        ),
        (net, {"algorithm": commrt.BackupWorkers(0)}, "BackupWorkers needs the optimizers"),
        (net, {"algorithm": LocalSGD(2)}, "needs the optimizers whose steps it counts"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_averaged_is_refused_with_a_sentence(world, make, options, says):
    with pytest.raises(UsageError, match=says):
        commrt.attach(make(), world=world, **options)


def deaf_to_the_last(schedule):
    """`schedule` without what the last rank sends."""
    return replace(schedule, steps=lambda: (hop.rows(hop.src < schedule.ranks - 1) for hop in schedule.steps()))


def broken(kind, **settings):
    """Return an algorithm of a `kind` whose last rank sends nothing."""

    class Broken(kind):
        def schedule(self, step, ranks):
            return deaf_to_the_last(super().schedule(step, ranks))

    return Broken(**settings)


BROKEN = (broken(commrt.Ring), broken(Gossip), broken(Gossip, payload="gradients"))
BF16, ADAPTIVE = torch.bfloat16, Adaptive(dq(30.0, 20))
BACKED, VIEWS = commrt.BackupWorkers(1, inner=Direct()), {"gradients": "views"}


@for_each(
    ("algorithm", "options", "says"),
    [
        (LocalSGD(wire=Int4()), {}, r"commrt\.Direct\(\)"),
        (LocalSGD(wire=torch.float16), {"wire": BF16}, "give it once"),
        (LocalSGD(inner=Gossip()), {"wire": BF16}, "would be rounded"),
        (LocalSGD(inner=Direct()), {"wire": ADAPTIVE}, "bits follow gradients"),
        (LocalSGD(), {"graphs": True}, "leave graphs out"),
        (Gossip(within=2), {"wire": BF16}, "leave wire out"),
        (commrt.Ring(), {"wire": Int4()}, "cannot carry ring: codes do not add.*commrt.Direct()"),
        (Gossip(), {"wire": Int8()}, "with gossip"),
        (Direct(), {"wire": Int8(), "graphs": True}, "cannot be captured yet"),
        (BACKED, {"wire": ADAPTIVE}, "a late rank misses the average"),
        (BACKED, {"wire": Int4()}, "without feedback"),
        (commrt.Torus2D(), {"same_bits": True}, "same_bits with torus 3x2, which adds in several orders: chunk 0 as"),
        (Gossip(), {"same_bits": True}, "same_bits=True with Gossip, where not every gradient"),
        (Direct(), {"wire": Int8(), "same_bits": True}, "which rounds a value by the block that it lies in"),
        (Direct(), {"same_bits": 1}, "same_bits=1: give True or False"),
        (Gossip(within=2), {"watch": True}, "watch=True with within="),
        (Gossip(payload="gradients"), {"watch": True}, "watch=True with Gossip"),
        (LocalSGD(inner=Gossip()), {"watch": True}, "watch=True with LocalSGD"),
        (Direct(), VIEWS | {"wire": BF16}, r"those of 0\.weight are torch\.float32 and travel as torch\.bfloat16"),
        (Gossip(), VIEWS, "with Gossip"),
        (BACKED, VIEWS, "with BackupWorkers"),
        (LocalSGD(4), VIEWS, "with LocalSGD"),
    ],
)
@on_ranks(6)
def test_what_an_algorithm_cannot_do_is_refused_with_a_sentence(world, algorithm, options, says):
    model = net()
    with pytest.raises(UsageError, match=says):
        commrt.attach(model, sgd(model), algorithm, world=world, **options)


@on_ranks(2)
def test_a_schedule_that_is_made_anew_in_each_step_is_told_of_once(world, caplog):
    row = torch.ones(4)
    model, anew = net(), SimpleNamespace(schedule=lambda _, ranks: ring.all_reduce(ranks).named("mine"))
    commrt.attach(model, algorithm=anew, world=world)
    for step in range(3):
        backward(model, world.rank, step)
        world.run(anew.schedule(step, 2), row)
        world.all_reduce(row, algorithm=anew)
    world.barrier()
    told = [message.split()[1] for message in caplog.messages if "makes the schedule mine anew" in message]
    assert [maker[:9] for maker in told] == ["namespace", "the", "namespace"]


@for_each("algorithm", [*BROKEN, *(LocalSGD(2, inner=each) for each in BROKEN[:2]), commrt.BackupWorkers(1, BROKEN[0])])
@on_ranks(3)
def test_an_algorithm_that_does_not_keep_its_promise_is_refused(world, algorithm):
    model = net()
    with pytest.raises(ScheduleError, match="is not a correct"):
        commrt.attach(model, sgd(model), algorithm, world=world)


@for_each("again", [lambda model: model, lambda model: model[0], nn.Sequential])
@on_ranks(2)
def test_a_parameter_is_attached_once_alone_or_inside_another_module(world, again):
    model = net()
    commrt.attach(model, world=world)
    with pytest.raises(UsageError, match="weight is attached already"):
        commrt.attach(again(model), world=world)


def test_attach_without_a_world_says_so():
    with pytest.raises(UsageError, match=r"call commrt\.init\(\) first"):
        commrt.attach(net())


@on_ranks(1)
def test_attach_in_inference_mode_is_refused(world):
    with torch.inference_mode(), pytest.raises(UsageError, match="call it outside"):
        commrt.attach(net(), world=world)


@on_ranks(2)
def test_a_model_on_a_gpu_connects_the_gpus(world):
    def connect(device):
        raise ConnectionError(device)

    world.connect = connect
    with FakeTensorMode():  # as if on a GPU
        model = nn.Embedding(2, 2, device="cuda:1")
    with pytest.raises(ConnectionError, match="cuda:1"):
        commrt.attach(model, world=world)


@for_each(("models", "chosen", "passes"), [(2, (0, 1), 0), (18, (17, 1), 0), (2, (0, 1), 1)])
@on_ranks(2)
def test_models_whose_backward_passes_differ_in_order_are_told_apart(world, models, chosen, passes):
    attached = [net() for _ in range(models)]
    for model in attached:  # gradients become ready in another order than that of what is attached
        commrt.attach(model[::-1], sgd(model), world=world, bucket_cap_mb=1e-9)
    for model in attached * passes:
        backward(model, world.rank)
    with pytest.raises(DisagreementError, match=r"models attached to one world in different orders"):
        backward(attached[chosen[world.rank]], world.rank)


@on_ranks(2)
def test_one_optimizer_may_step_two_attached_models_with_their_own_means(world):
    models = [net(), net(nn.Linear(8, 8))]
    optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1)
    replicas = [commrt.attach(model, optimizer, world=world) for model in models]
    for step in range(3):
        for model in models:
            backward(model, world.rank, step)
        if step == 0:
            assert all(map(torch.equal, gradients(models[0]), mean_gradients(range(2))))
        optimizer.step()
    assert [replica.replicas_equal() for replica in replicas] == [True, True]


@on_ranks(2)
def test_a_default_device_on_which_nothing_can_be_sent_is_no_hindrance(world):
    model = net(nn.BatchNorm1d(8))
    optimizer = sgd(model)
    inputs = [data(world.rank, step) for step in range(3)]
    with torch.device("meta"):
        replica = commrt.attach(model, optimizer, world=world)
        with replica.join(torch.amp.GradScaler("cpu")):
            for x, y in inputs[world.rank :]:
                cross_entropy(model(x), y).backward()
                optimizer.step()
        world.run(ring.all_reduce(2), inputs[0][0].view(-1))
        assert (replica.replicas_equal(), replica.step) == (True, 3)


@on_ranks(2)
def test_only_one_model_of_a_world_can_be_joined_and_the_others_wait(world):
    first, second = net(), net()
    replicas = [commrt.attach(model, world=world) for model in (first, second)]
    with replicas[0].join():
        with pytest.raises(UsageError, match=r"one model of a world can be joined"), replicas[1].join():
            pass
        with pytest.raises(UsageError, match=r"another model of this world is in join\(\)"):
            backward(second, world.rank)
    with replicas[1].join():
        backward(second, world.rank)
