# SPDX-License-Identifier: Apache-2.0
"""What a newcomer types: calls of a world beside all_reduce, names of the command line, what repr and dir show."""

from functools import partial

import pytest
import torch
from cases import for_each, on_ranks
from failing_ranks import raised
from local_loops import Loop
from torch.distributed import ReduceOp

import commrt
from commrt import Gossip, Ring, Torus2D
from commrt.algorithms.arguments import as_algorithm
from commrt.algorithms.catalogue import ALGORITHMS, POLICIES
from commrt.errors import UsageError
from commrt.quantizer import WIRE_NAMES
from commrt.runtime.wire import WIRES, as_wire, is_quantized
from commrt.testing.ranks import run_ranks

gossip_loop = partial(Loop, make=torch.optim.SGD)


@for_each("ranks", [1, 2, 5])
def test_ranks_meet_send_a_tensor_to_all_and_gather_objects(ranks):
    def body(world):
        world.barrier()
        last = ranks - 1
        sent = [torch.arange(6).view(2, 3).t(), torch.tensor([True, False]), torch.tensor(1 + 1j), torch.empty(0)]
        got = [tensor if world.rank == last else torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in sent]
        for tensor, wanted in zip(got, sent, strict=True):
            world.broadcast(tensor, root=last)
            assert torch.equal(tensor, wanted)
        with torch.inference_mode():
            assert world.all_gather_object("x" * world.rank) == ["x" * rank for rank in range(ranks)]
            assert world.broadcast_object({"of": world.rank}, root=last) == {"of": last}

        with pytest.raises(UsageError, match="type Linear cannot be sent to other ranks: send numbers, strings"):
            world.all_gather_object(torch.nn.Linear(1, 1))

    run_ranks(ranks, body)


@on_ranks(3, timeout_s=30.0)
def test_calls_go_on_among_those_that_are_left(world):
    gossip_loop(world, Gossip()).run(1).replica.drain()
    if world.rank == 1:
        return
    assert world.all_gather_object(world.rank) == [0, 2]  # nobody has noticed the loss
    world.broadcast(tensor := torch.tensor([world.rank]), root=2)
    assert tensor.tolist() == [2]
    assert "give one of the ranks that take part, world.members, [0, 2]" in raised(lambda: world.broadcast(tensor, 1))
    world.barrier()
    assert world.broadcast_object(world.rank) == 0


@on_ranks(2)
def test_all_reduce_takes_operations_by_the_names_of_torch(world):
    for op, wanted in (("avg", 1.5), (ReduceOp.AVG, 1.5), ("sum", 3.0), (ReduceOp(ReduceOp.SUM), 3.0)):
        world.all_reduce(tensor := torch.tensor([1.0 + world.rank]), op)
        assert tensor.tolist() == [wanted]
    for op in ("max", ReduceOp.MIN, 3):
        with pytest.raises(UsageError, match='use "mean", as gradients are averaged, or "sum"; for others take all_g'):
            world.all_reduce(tensor, op)


def test_algorithms_and_wires_have_the_names_of_the_command_line():
    for name, kind in ALGORITHMS.items():
        assert as_algorithm(name) == as_algorithm(kind.__name__) == kind()
    assert [type(as_algorithm(name)).__name__ for name in POLICIES] == ["Gossip", "BackupWorkers", "LocalSGD"]
    assert {as_wire(name) for name in WIRE_NAMES if not is_quantized(as_wire(name))} == {*WIRES}
    assert (as_wire("bfloat16"), as_wire("Int4")) == (torch.bfloat16, commrt.Int4())
    with pytest.raises(UsageError, match=r"no algorithm is called 'rung': choose one of backup, .*, torus2d"):
        as_algorithm("rung")
    with pytest.raises(UsageError, match="no wire is called 'int3': choose one of fp32, bf16, fp16, int8, int4, int2"):
        as_wire("int3")


@on_ranks(2)
def test_a_name_means_the_object(world):
    model = torch.nn.Linear(2, 1)
    replica = commrt.attach(model, torch.optim.SGD(model.parameters()), "ring", wire="bf16", world=world)
    assert replica._algorithm == Ring()
    for _ in range(2):
        world.all_reduce(tensor := torch.tensor([1.0]), algorithm="torus2d", wire="fp16")
        assert tensor.tolist() == [1.0]
    state = commrt.DDPState("Torus2D", "bf16")
    assert (state.algorithm, state.wire) == (Torus2D(), torch.bfloat16)
